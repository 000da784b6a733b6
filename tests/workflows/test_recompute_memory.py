"""What ranks keep for backwards that recompute some layers, compared with the prediction; and who chooses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph import Pipeline
from pipegraph.errors import ArgumentError
from pipegraph.package import Package
from pipegraph.planner.run_comparison import compare_run
from pipegraph.schedule import build
from pipegraph.workflows.train import Training
from tests.messages import refused
from tests.slow import cases


class Mlp(nn.Module):
    """Of operations that uncompiled kernels have too: bytes are predicted for compiled ones."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 96)
        self.up = nn.Linear(32, 96)
        self.down = nn.Linear(96, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mixer = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        return x + self.mlp(x)


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.layers = nn.ModuleList(Layer() for _ in range(8))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


INPUT = torch.randn(16, 16)
MIXED = {"": "none", "layers.*": "block", "*.mlp": "none"}


POINTS = ("layers.2", "layers.5")


def package_of(folder: Path, points: Sequence[str] = POINTS, **settings: Any) -> Package:
    plan = pipegraph.plan(pipegraph.capture(Layered(), (INPUT,)), points=points, **settings)
    return pipegraph.write_package(plan, folder / "package")


@pytest.mark.parametrize("schedule", cases(["1f1b", "zb-h1"], slow=["1f1b"]))
@pytest.mark.parametrize(
    "recompute",
    [
        "none",
        # The lists below have these, a stage each.
        pytest.param({"layers.*": "block"}, marks=pytest.mark.slow),
        pytest.param({"": "none", "layers[::2]": "block"}, marks=pytest.mark.slow),
        pytest.param(MIXED, marks=pytest.mark.slow),
        [{"layers.*": "block"}, MIXED, "none"],
        "layers.*=block;layers[::2].mlp=block;none",
    ],
)
def test_ranks_keep_what_was_predicted(recompute: Any, schedule: str, tmp_path: Path) -> None:
    assert_kept_as_predicted(package_of(tmp_path, recompute=recompute, balance="time"), schedule)


@pytest.mark.parametrize("recompute", cases(["block", {"layers.*": "block"}, MIXED], slow=["block"]))
def test_layers_that_a_stage_has_once_or_in_part_are_computed_again_too(recompute: Any, tmp_path: Path) -> None:
    """A module that such a stage has several times, here the Mlp, is not a separate block then."""
    points = ["layers.1.mlp", "layers.3", "layers.4"]
    assert_kept_as_predicted(package_of(tmp_path, points, recompute=recompute, balance="time"), "1f1b")


def assert_kept_as_predicted(package: Package, schedule: str) -> None:
    stages = len(package.manifest.stages)
    order = build(schedule, stages, 2 * stages)
    training = Training(package, order, kernels="eager")
    list(training.steps(1))
    comparison = compare_run(package.manifest, order, training.measured())
    measured = [rank["activations"].measured for rank in comparison.memory]
    assert measured == pytest.approx([rank["activations"].predicted for rank in comparison.memory], rel=0.05)


def test_the_plan_says_it_unless_the_pipeline_does(tmp_path: Path) -> None:
    package = package_of(tmp_path, recompute=["block", MIXED, "none"])
    planned = Pipeline(package, "gpipe", 2, kernels="eager")
    assert planned.recompute == "block (stage 0), =none,layers.*=block,*.mlp=none (stage 1), none (stage 2)"
    assert Pipeline(package, "gpipe", 2, kernels="eager", recompute="block").recompute == "block"


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    captured = pipegraph.capture(Layered(), (INPUT,))
    with refused(ArgumentError, '"*.mpl"', '"layers.0.mlp"', advice="a pattern"):
        pipegraph.plan(captured, points=["layers.2"], recompute={"layers.*": "none", "*.mpl": "none"})
    package = package_of(tmp_path)
    with refused(ArgumentError, '"layers.9"', advice="layers.0"):
        Pipeline(package, kernels="eager", recompute={"layers.9": "none"})
    with refused(ArgumentError, '"head"', advice="layers.0.mixer"):
        Pipeline(package, kernels="eager", recompute=[{"head": "none"}, "none", "none"])


def test_a_planned_pattern_may_match_nothing_in_its_own_stage(tmp_path: Path) -> None:
    """As every eighth layer may, where a planner gives a stage the choice of a model with such layers."""
    every_eighth = {"": "none", "layers[::8]": "block"}
    package = package_of(tmp_path, recompute=["none", every_eighth, "none"])  # layers.0 is in the first stage
    pipe = Pipeline(package, "gpipe", 2, torch.nn.functional.mse_loss, kernels="eager")
    assert pipe.recompute == "none (stages 0, 2), =none,layers[::8]=block (stage 1)"
    assert torch.isfinite(pipe.step(INPUT, target=torch.zeros(16, 4)).loss)


def test_a_plan_holds_no_policy() -> None:
    captured = pipegraph.capture(Layered(), (INPUT,))
    with refused(ArgumentError, "policy", "no plan", advice="Pipeline(…, recompute=policy)"):
        pipegraph.plan(captured, points=["layers.2"], recompute=lambda *_: True)


@pytest.mark.slow
def test_what_is_computed_again_is_chosen_with_the_cuts() -> None:
    captured = pipegraph.capture(Layered(), (INPUT,))
    settings: dict[str, Any] = {"stages": 3, "microbatches": 6, "hardware": "a100"}
    free = pipegraph.plan(captured, recompute="auto", **settings)
    least = pipegraph.plan(captured, recompute={"layers.*": "block"}, **settings)
    assert free.prediction is not None and least.prediction is not None
    values = []
    for part in (1.0, 0.5, 0.2, 0.0):
        memory = least.prediction.peak + part * (free.prediction.peak - least.prediction.peak)
        prediction = pipegraph.plan(captured, recompute="auto", memory_bytes=memory, **settings).prediction
        assert prediction is not None and prediction.peak <= memory
        for recompute in ("none", "min-cut", {"layers.*": "block"}):
            try:
                uniform = pipegraph.plan(captured, recompute=recompute, memory_bytes=memory, **settings).prediction
            except pipegraph.PlanError:
                continue
            assert uniform is not None and prediction.value <= uniform.value
        values.append(prediction.value)
    assert values == sorted(values)
