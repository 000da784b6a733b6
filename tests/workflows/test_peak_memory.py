"""The memory of ranks that train, compared with the plan, in several precisions."""

from __future__ import annotations

from pathlib import Path

import pytest

import pipegraph
from pipegraph.planner.run_comparison import compare_run
from pipegraph.schedule import build
from pipegraph.workflows.train import Training
from tests.runtime import ranks
from tests.workflows import peak_ranks
from tests.workflows.test_recompute_memory import INPUT, Layered

PRECISIONS = [None, "fp32", "bf16", "bf16-true"]


def package(folder: Path, schedule: str, precision: str | None) -> pipegraph.Package:
    captured = pipegraph.capture(Layered(), (INPUT,))
    plan = pipegraph.plan(
        captured,
        points=["layers.4"],
        schedule=schedule,
        microbatches=peak_ranks.MICROBATCHES,
        recompute="none",
        precision=precision,
    )
    return pipegraph.write_package(plan, folder)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_the_peak_is_within_a_tenth(schedule: str, precision: str | None, tmp_path: Path) -> None:
    planned = package(tmp_path / "package", schedule, precision).manifest.prediction
    assert planned is not None
    peaks = ranks.run(peak_ranks.peak, 2, str(tmp_path / "package"), schedule, precision)
    assert peaks == [pytest.approx(needed, rel=0.1) for needed in planned.memory]


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_a_run_in_the_planned_precision_holds_what_was_predicted(precision: str, tmp_path: Path) -> None:
    split = package(tmp_path / "package", "1f1b", precision)
    schedule = build("1f1b", 2, peak_ranks.MICROBATCHES)
    training = Training(split, schedule, kernels="eager", precision=precision)
    list(training.steps(1))
    comparison = compare_run(split.manifest, schedule, training.measured())
    assert not any("--precision" in hint for hint in comparison.hints)
    for rank in comparison.memory:
        for kind in ("parameters", "gradients"):
            assert rank[kind].measured == rank[kind].predicted
        for kind in ("optimizer state", "activations"):
            assert rank[kind].measured == pytest.approx(rank[kind].predicted, rel=0.05)
    other = Training(split, schedule, kernels="eager")
    list(other.steps(1))
    hints = compare_run(split.manifest, schedule, other.measured()).hints
    assert any(f"--precision {precision}, and this run used the package's own dtypes" in hint for hint in hints)
