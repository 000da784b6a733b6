"""One fault in a schedule of any name: the message says which, and where."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, check, names, peak_activations
from tests.messages import refused
from tests.schedule.strategies import schedules

Rows = list[list[Action]]


def refused_places(schedule: Schedule, change: Callable[[Rows], object], *parts: str) -> dict[int, int]:
    """Where `check` refuses the schedule so changed; the problem names ``parts``."""
    rows = [list(row) for row in schedule.actions]
    change(rows)
    with refused(ScheduleError, *parts) as caught:
        check(replace(schedule, actions=rows))  # type: ignore[arg-type]
    return caught.value.places


def a_place(data: st.DataObject, schedule: Schedule) -> tuple[int, int]:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    return rank, data.draw(st.integers(0, len(schedule.actions[rank]) - 1))


every_name = pytest.mark.parametrize("name", names())
few = settings(max_examples=20)


@every_name
@few
@given(st.data())
def test_a_duplicate(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    rank, at = a_place(data, schedule)
    action = schedule.actions[rank][at]
    again = data.draw(st.integers(at + 1, len(schedule.actions[rank])))
    parts = f"{action} cannot be on rank {rank}: ", "already"
    assert refused_places(schedule, lambda rows: rows[rank].insert(again, action), *parts) == {rank: again}


@every_name
@few
@given(st.data())
def test_a_missing_action(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name, microbatches=6))
    assume(not schedule.trains or schedule.microbatches > 1)  # the only B of all leaves a sound forward
    rank, at = a_place(data, schedule)
    action = schedule.actions[rank][at]
    if action.peer is None:
        reason = f"stage {action.stage} "
    else:
        reason = f"{action.partner} is on rank {schedule.placement[action.partner.stage]}"
    places = refused_places(schedule, lambda rows: rows[rank].pop(at), f"{action} is missing on rank {rank}", reason)
    assert places == {rank: len(schedule.actions[rank]) - 1}


@every_name
@few
@given(st.data())
def test_an_action_on_the_wrong_rank(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name).filter(lambda schedule: schedule.ranks > 1))
    rank, at = a_place(data, schedule)
    action = schedule.actions[rank][at]
    wrong_rank = (rank + data.draw(st.integers(1, schedule.ranks - 1))) % schedule.ranks
    change = lambda rows: rows[wrong_rank].insert(0, rows[rank].pop(at))  # noqa: E731
    parts = f"{action} cannot be on rank {wrong_rank}: ", f"stage {action.stage} is placed on rank {rank}"
    assert refused_places(schedule, change, *parts) == {wrong_rank: 0}


@every_name
@few
@given(st.data())
def test_two_actions_of_a_microbatch_in_the_wrong_order(name: str, data: st.DataObject) -> None:
    schedule = replace(data.draw(schedules(name, lowered=True if name == "forward" else None)), overlapped=frozenset())
    needs = {Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I, Kind.SEND_F: Kind.F}
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    able = [at for at, action in enumerate(schedule.actions[rank]) if action.kind in needs]
    assume(able)  # on the last rank nothing follows a forward without a backward
    second = data.draw(st.sampled_from(able))
    action = schedule.actions[rank][second]
    requirement = Action(action.stage, needs[action.kind], action.microbatch)
    first = schedule.actions[rank].index(requirement)

    def swap(rows: Rows) -> None:
        rows[rank][first], rows[rank][second] = action, requirement

    parts = f"rank {rank}, ", f"{action} comes before {requirement}, "
    assert refused_places(schedule, swap, *parts) == {rank: first}


@every_name
@few
@given(st.data())
def test_crossed_receives(name: str, data: st.DataObject) -> None:
    """A rank receives the second of two messages before the first."""
    schedule = data.draw(schedules(name, lowered=True).filter(lambda s: s.ranks > 1 and s.microbatches > 1))
    arriving = {
        (rank, schedule.placement[action.partner.stage])
        for rank, row in enumerate(schedule.actions)
        for action in row
        if action.peer is not None and not action.sends
    }
    rank, peer = data.draw(st.sampled_from(sorted(arriving)))
    receives = [
        at
        for at, action in enumerate(schedule.actions[rank])
        if action.peer is not None and not action.sends and schedule.placement[action.peer] == peer
    ]
    number = data.draw(st.integers(0, len(receives) - 2))
    first, second = (schedule.actions[rank][receives[at]] for at in (number, number + 1))
    change = lambda rows: rows[rank].insert(receives[number], rows[rank].pop(receives[number + 1]))  # noqa: E731
    places = refused_places(
        schedule,
        change,
        f"rank {rank} is at {second} and waits for {second.partner} of rank {peer}",
        f"rank {peer} is at {first.partner} and waits for {first} of rank {rank}",
    )
    assert places == {rank: receives[number], peer: schedule.actions[peer].index(first.partner)}


@every_name
@few
@given(st.data())
def test_too_much_memory(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name))
    peaks = peak_activations(schedule)
    check(schedule, memory_limit=max(peaks))
    if not schedule.trains:
        return
    limit = data.draw(st.integers(0, max(peaks) - 1))
    rank = next(rank for rank, peak in enumerate(peaks) if peak > limit)
    with refused(ScheduleError, f"too much for rank {rank}", f"{limit + 1} activations") as caught:
        check(schedule, limit)
    action = schedule.actions[rank][caught.value.places[rank]]
    assert action.kind is Kind.F
    assert str(action) in caught.value.problem
