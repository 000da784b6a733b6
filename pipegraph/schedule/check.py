"""The verifier of schedules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.deadlock import explain, stuck
from pipegraph.schedule.grid import marked_grid
from pipegraph.schedule.memory import held_activations
from pipegraph.schedule.replay import slots
from pipegraph.schedule.schedule import Schedule

Place = tuple[int, int]
"""(rank, position among its actions)"""


def check(schedule: Schedule, memory_limit: int | None = None) -> None:
    """Raise ScheduleError, and nothing else, unless the schedule can run.

    1. Each action stands on the rank that holds its stage, and names a stage and a microbatch that exist.
    2. For each stage and microbatch there is one F; with a backward, also one B, or one I and one W. A lowered schedule
       has one SEND and one RECV for each edge between ranks, microbatch and direction, and no others.
       An overlapped pair stands on one rank, its F first.
    3. Run with one action at a time on each rank, each transfer blocking until its partner arrives, all come to an end.
       So dependencies hold, and transfers between two ranks are received in the order in which they are sent.
    4. No rank holds more than ``memory_limit`` activations, counted in saved activations of one stage and microbatch.

    The message says which rule is broken, and draws the schedule with the place marked.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"check takes a Schedule, not {type(schedule).__name__}. from_csv reads one from text.")
    if not isinstance(memory_limit, int | float | None):
        raise ScheduleError(f"A memory limit is a number of activations, such as memory_limit=4, not {memory_limit!r}.")
    places = _check_each(schedule)
    _check_complete(schedule, places)
    _check_overlapped(schedule, places)
    if reached := stuck(schedule):
        what, marks, advice = explain(schedule, reached, places)
        raise _fault(schedule, what, marks, advice)
    if memory_limit is not None and schedule.has_backward:
        _check_memory(schedule, memory_limit)


def _check_each(schedule: Schedule) -> dict[Action, Place]:
    """Check every action by itself, and that none stands twice. Return where each one stands."""
    places: dict[Action, Place] = {}
    for rank, actions in enumerate(schedule.actions):
        for position, action in enumerate(actions):
            wrong = None
            if max(action.stage, action.peer or 0) >= schedule.stages:
                wrong = f"there are only stages 0 to {schedule.stages - 1}", "Name one of those, or place more stages."
            elif action.microbatch >= schedule.microbatches:
                wrong = f"there are only microbatches 0 to {schedule.microbatches - 1}", "Name one of those."
            elif (holder := schedule.placement[action.stage]) != rank:
                wrong = f"stage {action.stage} is placed on rank {holder}", f"Move {action} to rank {holder}."
            elif action in places:
                wrong = "it stands there already", "Remove one of the two."
            elif action.peer is not None:
                wrong = _wrong_transfer(schedule, action, action.peer)
            if wrong is not None:
                why, advice = wrong
                raise _fault(schedule, f"{action} cannot stand on rank {rank}: {why}.", {rank: position}, advice)
            places[action] = (rank, position)
    for part, (rank, position) in places.items():
        if part.kind is Kind.I or part.kind is Kind.W:
            whole = Action(part.stage, Kind.B, part.microbatch)
            if whole in places:
                what = f"{whole} and {part} cannot both stand on rank {rank}: B is I and W in one."
                marks = {rank: max(position, places[whole][1])}
                raise _fault(schedule, what, marks, f"Keep either {whole}, or an I and a W.")
    return places


def _wrong_transfer(schedule: Schedule, action: Action, peer: int) -> tuple[str, str] | None:
    """Why the schedule can have no such transfer, and what to do about it."""
    dependencies = schedule.dependencies
    producer, consumer = edge = (min(action.stage, peer), max(action.stage, peer))
    if not dependencies.crosses(edge):
        return f"stages {producer} and {consumer} are on the same rank", "Remove it: the value is there already."
    if action.kind in (Kind.SEND_F, Kind.RECV_F):
        if consumer not in dependencies.consumers.get(producer, ()):
            return f"no value goes from stage {producer} to stage {consumer}", f"Remove it, or add {edge} to the edges."
    elif not schedule.has_backward:
        return "the schedule has no backward", "Remove it, or add B to every stage and microbatch."
    elif consumer not in dependencies.gradient_consumers.get(producer, ()):
        return (
            f"no gradient goes from stage {consumer} to stage {producer}",
            f"Remove it, or let {edge} carry gradients.",
        )
    return None


def _check_complete(schedule: Schedule, places: Mapping[Action, Place]) -> None:
    """Check that nothing is missing. Every action looked for is there but the last, so this ends soon."""
    for action in _required(schedule, places):
        if action not in places:
            rank = schedule.placement[action.stage]
            if action.peer is None:
                what = f"{action} is missing on rank {rank}: stage {action.stage} needs it for every microbatch."
                advice = f"Add {action} to rank {rank}."
            else:
                partner = action.partner
                other = schedule.placement[partner.stage]
                there = f"though {partner} stands" if partner in places else f"and so is {partner}"
                what = f"{action} is missing on rank {rank}, {there} on rank {other}."
                advice = f"Add {action} to rank {rank}, or let lower() place all transfers."
            raise _fault(schedule, what, {rank: len(schedule.actions[rank])}, advice)


def _required(schedule: Schedule, places: Mapping[Action, Place]) -> Iterator[Action]:
    """All the actions that a schedule of this size must have."""
    dependencies = schedule.dependencies
    for microbatch in range(schedule.microbatches):
        for stage in range(schedule.stages):
            yield Action(stage, Kind.F, microbatch)
            if schedule.has_backward:
                divided = [Action(stage, Kind.I, microbatch), Action(stage, Kind.W, microbatch)]
                yield from divided if any(part in places for part in divided) else [Action(stage, Kind.B, microbatch)]
        if schedule.lowered:
            for producer, consumer in filter(dependencies.crosses, dependencies.edges):
                send = Action(producer, Kind.SEND_F, microbatch, consumer)
                yield from (send, send.partner)
        if schedule.lowered and schedule.has_backward:
            for producer, consumer in filter(dependencies.crosses, dependencies.gradient_edges):
                send = Action(consumer, Kind.SEND_B, microbatch, producer)
                yield from (send, send.partner)


def _check_overlapped(schedule: Schedule, places: Mapping[Action, Place]) -> None:
    for forward, backward in sorted(schedule.overlapped, key=str):
        found = [places[action] for action in (forward, backward) if action in places]
        ranks, positions = {rank for rank, _ in found}, [position for _, position in found]
        if len(found) < 2 or len(ranks) > 1 or positions != sorted(positions):
            what = f"{forward} and {backward} cannot overlap: they are not an F and a later B of one rank."
            raise _fault(schedule, what, dict(found) or {0: 0}, "Unmark the pair, or put the two on one rank in order.")


def _check_memory(schedule: Schedule, limit: float) -> None:
    for rank, actions in enumerate(schedule.actions):
        for position, held in enumerate(held_activations(actions)):
            if held > limit:
                what = f"{actions[position]} is too much for rank {rank}: with it, {held} activations are held."
                advice = f"The limit is {limit}: let a B or W come first, raise the limit, or try another schedule."
                raise _fault(schedule, what, {rank: position}, advice)


def _fault(schedule: Schedule, what: str, marks: Mapping[int, int], advice: str) -> ScheduleError:
    picture = marked_grid(schedule.actions, slots(schedule.actions, schedule.dependencies), marks)
    return ScheduleError(f"{schedule.name}: {what}\n{picture}\n{advice}")
