"""Whether a schedule can run: first each action by itself, then whether all run to their end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Collective, CollectiveKind, Kind, unit_text
from pipegraph.schedule.action_arrays import RECV_F, SEND_F, ActionArrays, B, I, W
from pipegraph.schedule.collectives import CONTRIBUTES, require_resident
from pipegraph.schedule.lifetimes import held_activations
from pipegraph.schedule.replay import NEVER, marked_grid, replay, slots
from pipegraph.schedule.schedule import Schedule, require_schedule


def fault(schedule: Schedule, problem: str, places: Mapping[int, int], advice: str) -> ScheduleError:
    """Return an error that says what is wrong, draws the places (rank → position) and says what to try."""
    picture = marked_grid(schedule.cells(), slots(schedule.arrays), places)
    return ScheduleError(f"{schedule.name}: {problem}\n{picture}", f"{advice[0].lower()}{advice[1:]}", places)


# ---- check collectives -----------------------------------------------------------------------------------------------
# Check that parameters are whole when they are used, and that gradients are reduced once.


def check_collectives(schedule: Schedule, resident: int | None = None) -> None:
    """Check rule 5 of `check`. Raises ScheduleError."""
    require_resident(resident)
    if schedule.collectives:
        for rank in range(schedule.ranks):
            _check_parameters(schedule, rank, resident)
            if schedule.trains:
                _check_gradients(schedule, rank)


def _check_parameters(schedule: Schedule, rank: int, resident: int | None) -> None:
    unsharded_stages: set[int] = set()
    for position, operation in _positions(schedule, rank):
        stage = operation.stage
        if isinstance(operation, Action):
            if operation.peer is None and stage in schedule.sharded and stage not in unsharded_stages:
                problem = f"the parameters of stage {stage} are sharded there"
                advice = f"Put {stage}UNSHARD before {operation}, or let lower() place all collectives."
                raise _wrong(schedule, operation, rank, position, problem, advice)
        elif operation.kind is CollectiveKind.UNSHARD:
            if stage in unsharded_stages:
                problem = f"stage {stage} is whole already"
                raise _wrong(
                    schedule, operation, rank, position, problem, f"Remove it, or put {stage}RESHARD before it."
                )
            unsharded_stages.add(stage)
            if resident is not None and len(unsharded_stages) > resident:
                problem = f"with it, {len(unsharded_stages)} stages are whole, and resident={resident}"
                reshards = " or ".join(
                    f"{resident_stage}RESHARD" for resident_stage in sorted(unsharded_stages - {stage})
                )
                advice = f"Put {reshards} before it, or give resident={len(unsharded_stages)}."
                raise _wrong(schedule, operation, rank, position, problem, advice)
        elif operation.kind is CollectiveKind.RESHARD:
            if stage not in unsharded_stages:
                problem = f"stage {stage} is sharded already"
                raise _wrong(
                    schedule, operation, rank, position, problem, f"Remove it, or put {stage}UNSHARD before it."
                )
            unsharded_stages.remove(stage)
        elif not schedule.trains:
            problem = "a schedule without a backward has no gradients"
            raise _wrong(schedule, operation, rank, position, problem, "Remove it.")
    row = schedule.actions[rank]
    for stage in sorted(unsharded_stages):
        last = max(at for at, action in enumerate(row) if action.stage == stage and action.peer is None)
        problem = f"Stage {stage} is still whole at the end of rank {rank}."
        raise fault(schedule, problem, {rank: len(row)}, _advice(schedule, rank, last, f"{stage}RESHARD"))


def _check_gradients(schedule: Schedule, rank: int) -> None:
    row = schedule.actions[rank]
    last = {action.stage: at for at, action in enumerate(row) if action.kind in CONTRIBUTES}
    done: set[int] = set()
    for position, operation in _positions(schedule, rank):
        if not isinstance(operation, Collective) or operation.kind is not CollectiveKind.REDUCE_GRAD:
            continue
        if operation.stage in done:
            problem = "the gradients of this stage are reduced before it"
            raise _wrong(schedule, operation, rank, position, problem, "Remove one of the two.")
        done.add(operation.stage)
        if position <= last[operation.stage]:
            problem = f"{row[last[operation.stage]]} adds to these gradients later on"
            raise _wrong(schedule, operation, rank, position, problem, f"Move it after {row[last[operation.stage]]}.")
    for stage in sorted(schedule.sharded - done):
        if schedule.placement[stage] == rank:
            problem = f"{stage}REDUCE_GRAD is missing on rank {rank}: each rank has only the gradients of its rows."
            raise fault(
                schedule, problem, {rank: len(row)}, _advice(schedule, rank, last[stage], f"{stage}REDUCE_GRAD")
            )


def _positions(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action | Collective]]:
    """Yield all that a rank does, each with the number of actions before it."""
    position = 0
    for operation in schedule.program(rank):
        yield position, operation
        position += isinstance(operation, Action)


def _advice(schedule: Schedule, rank: int, position: int, collective: str) -> str:
    return f"Add {collective} after {schedule.actions[rank][position]}, or let lower() place all collectives."


def _wrong(
    schedule: Schedule, operation: Action | Collective, rank: int, position: int, why: str, advice: str
) -> ScheduleError:
    return fault(
        schedule, f"{operation} cannot be at position {position} of rank {rank}: {why}.", {rank: position}, advice
    )


# ---- check -----------------------------------------------------------------------------------------------------------


Violations = tuple[NDArray[np.bool_], Callable[[Action], str], Callable[[Action], str]]
"""(for each action, whether it breaks a rule; why such an action is wrong; what to do about it)"""


def check(schedule: Schedule, memory_limit: float | None = None, resident: int | None = None) -> None:
    """Raise ScheduleError, and nothing else, unless the schedule can run.

    1. Each action is on the rank that holds its stage, and names a stage and a microbatch that exist.
    2. Each stage and microbatch has one F; with a backward, also one B, or one I and one W. A lowered schedule has one
       SEND and one RECV for each edge between ranks, microbatch and direction, and no others. An overlapped pair is on
       one rank, its F first, and its B needs no result of its F.
    3. If each rank runs one action at a time, and each transfer blocks until its partner arrives, all ranks come to an
       end. So dependencies hold, and transfers between two ranks are received in the order in which they are sent. The
       two adjacent actions of an overlapped pair begin together, when both have what they need.
    4. No rank holds more than ``memory_limit`` saved activations of one stage and microbatch.
    5. If it has collectives: every action that computes finds the parameters of its stage whole; of a rank's sharded
       stages no more than ``resident`` are whole at a time, and none at the end; none is gathered twice; and the
       gradients of each stage that is sharded or replicated are reduced once, after the last W or B. A stage is sharded
       if anything is gathered for it (`Schedule.sharded`).

    The message says which rule is broken, and draws the schedule with the place marked. The error's ``places`` maps
    each rank at fault to the position among its actions.
    """
    require_schedule("check", schedule)
    if not isinstance(memory_limit, int | float | None) or memory_limit != memory_limit:  # NaN equals nothing
        raise ScheduleError(f"A memory limit is a number of activations, such as memory_limit=4, not {memory_limit!r}.")
    check_actions(schedule)
    check_collectives(schedule, resident)
    if reached := _stuck(schedule):
        raise fault(schedule, *_explain(schedule, reached))
    if memory_limit is not None and schedule.trains:
        _check_memory(schedule, memory_limit)


def check_actions(schedule: Schedule) -> None:
    """Check the rules 1 and 2 of `check`, which hold whatever the order of the actions is."""
    _check_each(schedule)
    _check_divided(schedule)
    _check_complete(schedule)
    _check_overlapped(schedule)


def _check_each(schedule: Schedule) -> None:
    """Check every action by itself, and that none occurs twice."""
    rules = [*_action_rules(schedule), *(_transfer_rules(schedule) if schedule.lowered else ())]
    wrong = np.flatnonzero(np.logical_or.reduce([broken for broken, _, _ in rules]))
    if len(wrong):
        first = int(wrong[0])
        rank, position = schedule.arrays.place(first)
        action = schedule.arrays.action(first)
        why, advice = next((why(action), advice(action)) for broken, why, advice in rules if broken[first])
        raise fault(schedule, f"{action} cannot be on rank {rank}: {why}.", {rank: position}, advice)


def _action_rules(schedule: Schedule) -> Iterator[Violations]:
    arrays, stages = schedule.arrays, schedule.stages
    yield (
        np.maximum(arrays.stage, arrays.peer) >= stages,
        lambda action: f"there are only stages 0 to {stages - 1}",
        lambda action: "Name one of those, or place more stages.",
    )
    yield (
        arrays.microbatch >= schedule.microbatches,
        lambda action: f"there are only microbatches 0 to {schedule.microbatches - 1}",
        lambda action: "Name one of those.",
    )
    yield (
        np.array(schedule.placement)[np.minimum(arrays.stage, stages - 1)] != arrays.rank,
        lambda action: f"stage {action.stage} is placed on rank {schedule.placement[action.stage]}",
        lambda action: f"Move {action} to rank {schedule.placement[action.stage]}.",
    )
    repeated = np.zeros(arrays.count, bool)
    again = arrays.index.repeated()
    firsts = arrays.index.find(arrays.results[again])
    repeated[again[arrays.kind[again] == arrays.kind[firsts]]] = True
    yield repeated, lambda action: "it is there already", lambda action: "Remove one of the two."


def _transfer_rules(schedule: Schedule) -> Iterator[Violations]:
    arrays, placement = schedule.arrays, np.array(schedule.placement)
    transfers = arrays.peer >= 0
    forward = transfers & ((arrays.kind == SEND_F) | (arrays.kind == RECV_F))
    last = schedule.stages - 1
    yield (
        transfers & (placement[np.minimum(arrays.stage, last)] == placement[np.minimum(arrays.peer, last)]),
        lambda action: "stages {} and {} are on the same rank".format(*_edge(action)),
        lambda action: "Remove it: the value is there already.",
    )
    yield (
        forward & (arrays.edge < 0),
        lambda action: "no value goes from stage {} to stage {}".format(*_edge(action)),
        lambda action: f"Remove it, or add {_edge(action)} to the edges.",
    )
    yield (
        transfers & ~forward & (not schedule.trains),
        lambda action: "the schedule has no backward",
        lambda action: "Remove it, or add B to every stage and microbatch.",
    )
    yield (
        transfers & ~forward & ~np.append(arrays.returns, False)[arrays.edge],
        lambda action: "no gradient goes from stage {1} to stage {0}".format(*_edge(action)),
        lambda action: f"Remove it, or let {_edge(action)} carry gradients.",
    )


def _edge(transfer: Action) -> tuple[int, int]:
    return min(transfer.stage, transfer.partner.stage), max(transfer.stage, transfer.partner.stage)


def _check_divided(schedule: Schedule) -> None:
    """Check that a backward is either a B, or an I and a W. No action occurs twice."""
    arrays = schedule.arrays
    task = arrays.stage * (1 + arrays.microbatch.max(initial=0)) + arrays.microbatch
    wholes = np.flatnonzero(arrays.kind == B)
    parts = np.flatnonzero((arrays.kind == I) | (arrays.kind == W))
    parts = parts[np.isin(task[parts], task[wholes])]
    if len(parts):
        backward_number = int(wholes[task[wholes] == task[parts[0]]][0])
        (rank, first), (_, second) = arrays.place(backward_number), arrays.place(int(parts[0]))
        backward, half = arrays.action(backward_number), arrays.action(int(parts[0]))
        problem = f"{backward} and {half} cannot both be on rank {rank}: B is I and W in one."
        raise fault(schedule, problem, {rank: max(first, second)}, f"Keep either {backward}, or an I and a W.")


def _check_complete(schedule: Schedule) -> None:
    """Check that nothing is missing. No action occurs twice, so counting the actions of each microbatch is enough."""
    arrays, dependencies = schedule.arrays, schedule.dependencies
    # There are too few actions for all of these microbatches to be complete.
    counted = min(schedule.microbatches, arrays.count // schedule.stages + 1)
    weight = 1 + (arrays.kind == B)
    inside = arrays.microbatch < counted
    totals = np.bincount(arrays.microbatch[inside], weight[inside], counted)
    transfers = 0
    if schedule.lowered:
        crossing = sum(map(dependencies.crosses, dependencies.edges))
        returning = sum(map(dependencies.crosses, dependencies.gradient_edges)) if schedule.trains else 0
        transfers = 2 * (crossing + returning)
    short = np.flatnonzero(totals < schedule.stages * (3 if schedule.trains else 1) + transfers)
    if len(short):
        raise _missing(schedule, int(short[0]))


def _missing(schedule: Schedule, microbatch: int) -> ScheduleError:
    actions = {action for row in schedule.actions for action in row if action.microbatch == microbatch}
    action = next(action for action in _required(schedule, microbatch, actions) if action not in actions)
    rank = schedule.placement[action.stage]
    if action.peer is None:
        problem = f"{action} is missing on rank {rank}: stage {action.stage} needs it for every microbatch."
        advice = f"Add {action} to rank {rank}."
    else:
        partner = action.partner
        also = f"although {partner} is" if partner in actions else f"and so is {partner}"
        problem = f"{action} is missing on rank {rank}, {also} on rank {schedule.placement[partner.stage]}."
        advice = f"Add {action} to rank {rank}, or let lower() place all transfers."
    return fault(schedule, problem, {rank: len(schedule.actions[rank])}, advice)


def _required(schedule: Schedule, microbatch: int, actions: set[Action]) -> Iterator[Action]:
    """Yield all the actions of a microbatch that this schedule must have."""
    dependencies = schedule.dependencies
    for stage in range(schedule.stages):
        yield Action(stage, Kind.F, microbatch)
        if schedule.trains:
            divided = [Action(stage, Kind.I, microbatch), Action(stage, Kind.W, microbatch)]
            yield from divided if not actions.isdisjoint(divided) else [Action(stage, Kind.B, microbatch)]
    if schedule.lowered:
        for producer, consumer in filter(dependencies.crosses, dependencies.edges):
            send = Action(producer, Kind.SEND_F, microbatch, consumer)
            yield from (send, send.partner)
    if schedule.lowered and schedule.trains:
        for producer, consumer in filter(dependencies.crosses, dependencies.gradient_edges):
            send = Action(consumer, Kind.SEND_B, microbatch, producer)
            yield from (send, send.partner)


def _check_overlapped(schedule: Schedule) -> None:
    arrays = schedule.arrays
    pairs = sorted(schedule.overlapped, key=lambda pair: [(action.stage, action.microbatch) for action in pair])
    forward, backward = arrays.numbers(first for first, _ in pairs), arrays.numbers(second for _, second in pairs)
    rank = np.append(arrays.rank, -1)
    apart = (rank[forward] != rank[backward]) | (backward <= forward)
    same_task = np.array([(f.stage, f.microbatch) == (b.stage, b.microbatch) for f, b in pairs], bool)
    for pair in np.flatnonzero(apart | same_task)[:1]:
        first, second = pairs[pair]
        places = dict(arrays.place(int(number[pair])) for number in (forward, backward) if number[pair] < arrays.count)
        problem, advice = "they are not an F and a later B of one rank", ", or put the two on one rank in order"
        if not apart[pair]:
            problem, advice = f"{second} needs what {first} saves", ""
        problem = f"{first} and {second} cannot overlap: {problem}."
        raise fault(schedule, problem, places or {0: 0}, f"Unmark the pair{advice}.")


def _check_memory(schedule: Schedule, limit: float) -> None:
    for rank, activations in enumerate(held_activations(schedule)):
        over = np.flatnonzero(activations > limit)
        if len(over):
            action, most = schedule.actions[rank][over[0]], activations[over[0]]
            problem = f"{action} is too much for rank {rank}: with it, {most} activations are held."
            advice = f"Let a B or W come first, raise the limit of {limit}, or try another schedule."
            raise fault(schedule, problem, {rank: int(over[0])}, advice)


def _stuck(schedule: Schedule) -> dict[int, int]:
    """Return where each rank that cannot continue stops: rank → position. Empty if all come to an end."""
    arrays = schedule.arrays
    ranks, stopped = np.unique(arrays.rank[replay(arrays) == NEVER], return_counts=True)
    return {
        rank: len(schedule.actions[rank]) - count for rank, count in zip(ranks.tolist(), stopped.tolist(), strict=True)
    }


def _explain(schedule: Schedule, reached: Mapping[int, int]) -> tuple[str, dict[int, int], str]:
    """Return why the ranks are stuck: (the problem, the places to mark as rank → position, the advice).

    Every action that another needs must exist. So each stuck action waits for a later action of the same rank, which is
    an error of order, or for an action of another stuck rank. If all wait for other ranks, some of these waits form a
    cycle.
    """
    arrays = schedule.arrays
    waits: dict[int, int] = {}  # stuck rank → an action that it waits for
    for rank, position in reached.items():
        for number, maker in _needs(arrays, arrays.bounds[rank] + position):
            holder, at = arrays.place(maker)
            computes = arrays.action(maker).peer is None
            if holder not in reached or at + computes <= reached[holder]:
                continue  # it is available: a transfer when its rank arrives, another action when it ends
            if holder == rank:
                first, second = arrays.action(number), arrays.action(maker)
                problem = f"On rank {rank}, {first} comes before {second}, which it needs."
                return problem, {rank: arrays.place(number)[1]}, f"Move {first} after {second}."
            waits[rank] = maker
    circle: list[int] = []
    rank = min(waits)
    while rank not in circle:
        circle.append(rank)
        rank, _ = arrays.place(waits[rank])
    circle = circle[circle.index(rank) :]
    at_pair = [rank for rank in circle if arrays.bounds[rank] + reached[rank] in arrays.pairs]
    steps = "; ".join(
        f"rank {rank} is at {unit_text(schedule.actions[rank][reached[rank] : reached[rank] + 1 + (rank in at_pair)])} "
        f"and waits for {arrays.action(waits[rank])} of rank {arrays.place(waits[rank])[0]}"
        for rank in circle
    )
    advice = "Order the transfers of every two ranks alike on both, or let lower() place them."
    if not schedule.lowered:
        advice = "Order the actions of these ranks so that one of them can continue."
    if at_pair:
        advice += " Or unmark the pair: two actions overlap only if both can begin."
    return f"This deadlocks: {steps}.", {rank: reached[rank] for rank in circle}, advice


def _needs(arrays: ActionArrays, number: int) -> Iterator[tuple[int, int]]:
    """Yield what an action, or the overlapped pair that it begins, waits for, as (action, what it needs)."""
    action, makers = arrays.needs
    for part in (number, number + 1) if number in arrays.pairs else (number,):
        first, last = np.searchsorted(action, part), np.searchsorted(action, part, "right")
        yield from ((part, int(maker)) for maker in makers[first:last] if maker != number)
