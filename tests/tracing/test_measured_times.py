"""What actions took, for simulating them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipegraph.schedule import Event, Schedule, Times, from_csv
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_times
from tests.tracing.recordings import event


def step(schedule: Schedule, *rows: Sequence[Event]) -> MeasuredStep:
    ranks = schedule.ranks
    return MeasuredStep(0, 0.0, tuple(map(tuple, rows)), ((),) * ranks, (True,) * ranks, (None,) * ranks)


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
