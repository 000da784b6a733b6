"""Collectives in simulated time: they run at the same time as actions, which wait for them only if they must."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import (
    ParameterBytes,
    Schedule,
    Timeline,
    Times,
    build,
    from_csv,
    lower,
    parameter_bytes,
    simulate,
)
from tests.messages import refused
from tests.schedule.strategies import schedules

ONE_RANK = from_csv("0UNSHARD,1UNSHARD,0F0,1F0,1B0,1RESHARD,1REDUCE_GRAD,0B0,0RESHARD,0REDUCE_GRAD\n")


def rows(timeline: Timeline) -> list[str]:
    """Each rank's actions, then its collectives, from start to end."""
    actions = [(str(event.action), event) for row in timeline.events for event in row]
    collectives = [(str(event.collective), event) for row in timeline.collectives for event in row.events]
    return [f"{text} {event.start:g}–{event.end:g}" for text, event in actions + collectives]


def test_collectives_run_beside_actions_and_one_after_the_other() -> None:
    timeline = simulate(ONE_RANK, Times.equal(2, unshard=1.5, reduce_grad=(1, 4)))  # type: ignore[arg-type]
    assert rows(timeline) == [
        *("0F0 1.5–2.5", "1F0 3–4", "1B0 4–6", "0B0 6–8"),
        *("0UNSHARD 0–1.5", "1UNSHARD 1.5–3", "1REDUCE_GRAD 6–10", "0REDUCE_GRAD 10–11"),
    ]
    assert (timeline.makespan, timeline.span, timeline.busy) == (11, 6.5, (6,))
    assert timeline.bubble == 1 - 6 / 11
    assert (timeline.gather_waits, timeline.peak_whole) == ((2,), (2,))
    assert timeline.describe_critical_path() == "1F0 → 1B0: collectives 73 %, rank 0 27 %"


def test_a_schedule_without_collectives_has_none() -> None:
    timeline = simulate(build("1f1b", 2, 2), Times.equal(2, unshard=9, reduce_grad=9))
    assert timeline.makespan == simulate(build("1f1b", 2, 2), Times.equal(2)).makespan
    assert (timeline.collectives, timeline.peak_whole, timeline.gather_waits) == ((), (0, 0), (0, 0))


def test_a_prefetched_gather_is_not_waited_for() -> None:
    order = from_csv("0F0,0F1,1F0,1F1,2F0,2F1\n")
    times = Times.equal(3, unshard=2)
    assert [simulate(lower(order, sharded=range(3), resident=n), times).gather_waits for n in (1, 2, 3)] == [
        (6,),
        (2,),
        (2,),
    ]


@settings(max_examples=50, deadline=None)
@given(schedules(lowered=False), st.sampled_from((2, 3, None)), st.floats(0, 3), st.floats(0, 3))
def test_times_with_collectives(schedule: Schedule, resident: int | None, unshard: float, reduce_grad: float) -> None:
    times = Times.equal(schedule.stages, unshard=unshard, reduce_grad=reduce_grad)
    lowered = lower(schedule, sharded=range(schedule.stages), resident=resident)
    timeline, plain = simulate(lowered, times), simulate(lowered.changed(collectives=()), times)
    assert timeline.makespan >= plain.makespan - 1e-9
    assert timeline.busy == pytest.approx(plain.busy)
    if resident is not None:
        assert max(timeline.peak_whole) <= resident
    for row, collectives in zip(timeline.events, timeline.collectives, strict=True):
        ends = [0.0, *(collective.end for collective in collectives.events)]
        assert all(collective.start >= end for collective, end in zip(collectives.events, ends, strict=False))
        periods = {(period.stage, period.start, period.end) for period in collectives.parameters}
        for event in row:
            assert any(s == event.action.stage and a <= event.start and event.end <= b for s, a, b in periods)
    if unshard == reduce_grad == 0:
        assert timeline.makespan == plain.makespan
    path = timeline.critical_path
    assert all(first.end <= second.start + 1e-9 for first, second in pairwise(path))


def test_bytes_at_rest_and_within_a_step() -> None:
    times = Times.equal(2, reduce_grad=3)
    assert parameter_bytes(ONE_RANK, times, (100, 60), (50, 30)) == (ParameterBytes(80, 240, 80 + 100 + 160),)
    few = lower(from_csv("0F0,1F0,1B0,0B0\n"), sharded=[0, 1], resident=1)
    assert parameter_bytes(few, times, (100, 60), (50, 30)) == (ParameterBytes(80, 180, 80 + 100 + 160),)
    quick = Times.equal(2)
    assert parameter_bytes(few, quick, (100, 60), (50, 30)) == (ParameterBytes(80, 180, 80 + 100 + 100),)
    # 1REDUCE_GRAD begins when the parameters of stage 1 were freed and those of stage 0 gathered.
    for cost in (times, quick):
        assert parameter_bytes(few, cost, (100, 60), (50, 30), exchanged=True)[0].with_gradients >= 80 + 100 + 60 * 2
    assert parameter_bytes(ONE_RANK, quick, (100, 60), (50, 30), exchanged=True)[0].with_gradients == 80 + 160 + 60
    mixed = lower(build("1f1b", 2, 2), sharded=[0], replicated=[1])
    assert parameter_bytes(mixed, times, (100, 60), (50, 30)) == (
        ParameterBytes(50, 150, 250),
        ParameterBytes(60, 60, 60),
    )
    assert parameter_bytes(build("1f1b", 2, 2), times, (100, 60), (50, 30))[1] == ParameterBytes(60, 60, 60)
    with refused(ScheduleError, "whole", "2 stages", "1 were given"):
        parameter_bytes(ONE_RANK, times, (100,), (50, 30))


def test_times_of_collectives() -> None:
    text = '{"forward": [1, 1], "input_grad": [1, 1], "weight_grad": [1, 1], "unshard": 0.5, "reduce_grad": [0.25, 1]}'
    times = Times.from_json(text)
    assert (times.unshard, times.reduce_grad) == (0.5, (0.25, 1))
    assert [times.of_collective(collective) for collective in ONE_RANK.collectives] == [0.5, 0.5, 0, 1, 0, 0.25]
    with refused(ScheduleError, "unshard", "are 2", "3 were given"):
        Times.equal(2, unshard=(1, 1, 1))  # type: ignore[arg-type]
    with refused(ScheduleError, "reduce_grad", "not -1"):
        Times.equal(2, reduce_grad=-1)


def test_parameters_that_are_not_there() -> None:
    with refused(ScheduleError, "1F0", "position 1 of rank 0", "stage 1", advice="put 1UNSHARD before 1F0"):
        simulate(from_csv("0F0,1F0,1UNSHARD,1B0,0B0,1RESHARD,1REDUCE_GRAD\n"), Times.equal(2))
