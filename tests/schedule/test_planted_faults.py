"""One fault in a schedule of any name: the message says which, and where."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, check, names, peak_activations
from tests.schedule.strategies import schedules

Rows = list[list[Action]]


def planted(schedule: Schedule, change: Callable[[Rows], object]) -> tuple[str, dict[int, int]]:
    """The first line of what `check` says about the schedule so changed, and the places."""
    rows = [list(row) for row in schedule.actions]
    change(rows)
    with pytest.raises(ScheduleError) as caught:
        check(replace(schedule, actions=rows))  # type: ignore[arg-type]
    return str(caught.value).splitlines()[0].removeprefix(f"{schedule.name}: "), caught.value.places


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
    message, places = planted(schedule, lambda rows: rows[rank].insert(again, action))
    assert message == f"{action} cannot be on rank {rank}: it is there already."
    assert places == {rank: again}


@every_name
@few
@given(st.data())
def test_a_missing_action(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name, microbatches=6))
    assume(not schedule.trains or schedule.microbatches > 1)  # the only B of all leaves a sound forward
    rank, at = a_place(data, schedule)
    action = schedule.actions[rank][at]
    message, places = planted(schedule, lambda rows: rows[rank].pop(at))
    if action.peer is None:
        assert message == f"{action} is missing on rank {rank}: stage {action.stage} needs it for every microbatch."
    else:
        peer = schedule.placement[action.partner.stage]
        assert message == f"{action} is missing on rank {rank}, although {action.partner} is on rank {peer}."
    assert places == {rank: len(schedule.actions[rank]) - 1}


@every_name
@few
@given(st.data())
def test_an_action_on_the_wrong_rank(name: str, data: st.DataObject) -> None:
    schedule = data.draw(schedules(name).filter(lambda schedule: schedule.ranks > 1))
    rank, at = a_place(data, schedule)
    action = schedule.actions[rank][at]
    wrong_rank = (rank + data.draw(st.integers(1, schedule.ranks - 1))) % schedule.ranks
    message, places = planted(schedule, lambda rows: rows[wrong_rank].insert(0, rows[rank].pop(at)))
    assert message == f"{action} cannot be on rank {wrong_rank}: stage {action.stage} is placed on rank {rank}."
    assert places == {wrong_rank: 0}


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

    message, places = planted(schedule, swap)
    assert message == f"On rank {rank}, {action} comes before {requirement}, which it needs."
    assert places == {rank: first}


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
    message, places = planted(schedule, change)
    assert message.startswith("This deadlocks: ")
    assert f"rank {rank} is at {second} and waits for {second.partner} of rank {peer}" in message
    assert f"rank {peer} is at {first.partner} and waits for {first} of rank {rank}" in message
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
    with pytest.raises(ScheduleError) as caught:
        check(schedule, limit)
    action = schedule.actions[rank][caught.value.places[rank]]
    assert action.kind is Kind.F
    assert f"{action} is too much for rank {rank}: with it, {limit + 1} activations are held." in str(caught.value)
