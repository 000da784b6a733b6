"""What actions took, for simulating them, and what they waited for, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipegraph.schedule import Event, Schedule, Times, from_csv
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_times
from pipegraph.tracing.analysis.run_analysis import analyse_run
from pipegraph.tracing.read_run import read_run
from tests.tracing.recordings import event, write_run
from tests.tracing.test_idle_causes import EVEN, FAR, SCHEDULE, SLOW_HOST, UNEVEN, analysed


def step(schedule: Schedule, *rows: Sequence[Event]) -> MeasuredStep:
    ranks = schedule.ranks
    return MeasuredStep(0, 0.0, tuple(map(tuple, rows)), ((),) * ranks, (True,) * ranks, (None,) * ranks, ((),) * ranks)


def test_backwards_whole_and_divided_take_their_mean() -> None:
    schedule = from_csv("0F0,0B0,0F1,0I1,0W1\n")
    row = [event("0F0", 0, 1), event("0B0", 1, 4), event("0F1", 4, 5), event("0I1", 5, 7), event("0W1", 7, 8)]
    times = measured_times([step(schedule, row)], schedule, None).times
    assert (times.forward, times.input_grad, times.weight_grad) == ((1.0,), (2.0,), (1.0,))


@pytest.mark.parametrize(("predicted", "share"), [(None, 2.0), (Times((1.0,), (1.0,), (3.0,)), 1.0)])
def test_a_whole_backward_is_shared_out_as_predicted_or_halved(predicted: Times | None, share: float) -> None:
    schedule = from_csv("0F0,0B0\n")
    measured = measured_times([step(schedule, [event("0F0", 0, 1), event("0B0", 1, 5)])], schedule, predicted)
    assert measured.times.input_grad == (share,)
    assert measured.shares == f"I and W taken as {'predicted shares' if predicted else 'halves'} of B"


def test_a_stage_without_a_trace_takes_what_the_others_let_expect() -> None:
    schedule = from_csv("0F0,0B0\n1F0,1B0\n")
    row = [event("0F0", 0, 2), event("0B0", 2, 6)]
    predicted = Times((1.0, 2.0), (1.0, 3.0), (1.0, 1.0))
    measured = measured_times([step(schedule, row, [])], schedule, predicted)
    assert measured.times.forward == (2.0, 4.0) and measured.times.input_grad == (2.0, 6.0)
    assert measured_times([step(schedule, row, [])], schedule, None).times.forward == (2.0, 2.0)


def path(analysis_path: object) -> list[str]:
    return [str(event.action) for event in analysis_path]  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [EVEN, FAR, SLOW_HOST], ids=["even", "far", "slow-host"])
def test_the_critical_path_goes_back_over_what_each_action_waited_for(rows: list, tmp_path: Path) -> None:  # type: ignore[type-arg]
    critical = analysed(tmp_path, rows).critical
    assert critical is not None
    assert path(critical.critical_path)[-2:] == ["1B1", "0B1"]
    assert path(critical.critical_path)[:2] == ["0F0", "1F0"]


def test_the_longest_stage_is_on_the_critical_path(tmp_path: Path) -> None:
    analysis = analysed(tmp_path, UNEVEN)
    assert analysis.critical is not None
    assert path(analysis.critical.critical_path) == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]
    assert analysis.critical_path.endswith("rank 1 80 %, rank 0 20 %")


def test_the_critical_path_includes_the_time_between_its_actions(tmp_path: Path) -> None:
    assert analysed(tmp_path, SLOW_HOST).critical_path.endswith("transfers and overhead 3 %")


def test_ranks_that_take_turns_have_the_critical_path_of_the_simulated_step(tmp_path: Path) -> None:
    analysis = analyse_run(read_run(write_run(tmp_path / "run", SCHEDULE, {3: UNEVEN}, processes=1)))
    assert analysis.critical is None
    assert analysis.critical_path.endswith("rank 1 80 %, rank 0 20 %")
