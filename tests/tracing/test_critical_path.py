"""The critical path of measured steps, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.reading.read_run import read_run
from tests.tracing.recordings import write_run
from tests.tracing.test_idle_causes import EVEN, FAR, SCHEDULE, SLOW_HOST, UNEVEN, analysed


def path(analysis_path: object) -> list[str]:
    return [str(event.action) for event in analysis_path]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [EVEN, FAR, SLOW_HOST], ids=["even", "far", "slow-host"])
def test_it_goes_back_over_what_each_action_waited_for(rows: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    critical = analysed(tmp_path, rows).critical
    assert critical is not None
    assert path(critical.critical_path)[-2:] == ["1B1", "0B1"]
    assert path(critical.critical_path)[:2] == ["0F0", "1F0"]


def test_the_longest_stage_is_on_it(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, UNEVEN)
    assert analysis.critical is not None
    assert path(analysis.critical.critical_path) == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert analysis.critical_path.endswith("rank 1 80%, rank 0 20%")


def test_the_path_includes_the_time_between_its_actions(tmp_path: Path) -> None:
    assert analysed(tmp_path, SLOW_HOST).critical_path.endswith("transfers and overhead 3%")


def test_ranks_that_take_turns_have_that_of_the_simulated_step(tmp_path: Path) -> None:
    analysis = analyse_run(read_run(write_run(tmp_path / "run", SCHEDULE, {3: UNEVEN}, processes=1)))
    assert analysis.critical is None
    assert analysis.critical_path.endswith("rank 1 80%, rank 0 20%")
