"""Whether parameters are whole where they are used, and gradients are reduced once."""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Collective, CollectiveKind
from pipegraph.schedule.collectives import CONTRIBUTES, require_resident
from pipegraph.schedule.faults import fault
from pipegraph.schedule.schedule import Schedule


def check_collectives(schedule: Schedule, resident: int | None = None) -> None:
    """Check rule 5 of `check`. Raises ScheduleError."""
    require_resident(resident)
    if schedule.collectives:
        for rank in range(schedule.ranks):
            _check_parameters(schedule, rank, resident)
            if schedule.trains:
                _check_gradients(schedule, rank)


def _check_parameters(schedule: Schedule, rank: int, resident: int | None) -> None:
    whole: set[int] = set()
    for position, each in _positions(schedule, rank):
        stage = each.stage
        if isinstance(each, Action):
            if each.peer is None and stage in schedule.sharded and stage not in whole:
                what = f"the parameters of stage {stage} are sharded there"
                advice = f"Put {stage}UNSHARD before {each}, or let lower() place all collectives."
                raise _wrong(schedule, each, rank, position, what, advice)
        elif each.kind is CollectiveKind.UNSHARD:
            if stage in whole:
                what = f"stage {stage} is whole already"
                raise _wrong(schedule, each, rank, position, what, f"Remove it, or put {stage}RESHARD before it.")
            whole.add(stage)
            if resident is not None and len(whole) > resident:
                what = f"with it, {len(whole)} stages are whole, and resident={resident}"
                others = " or ".join(f"{other}RESHARD" for other in sorted(whole - {stage}))
                advice = f"Put {others} before it, or give resident={len(whole)}."
                raise _wrong(schedule, each, rank, position, what, advice)
        elif each.kind is CollectiveKind.RESHARD:
            if stage not in whole:
                what = f"stage {stage} is sharded already"
                raise _wrong(schedule, each, rank, position, what, f"Remove it, or put {stage}UNSHARD before it.")
            whole.remove(stage)
        elif not schedule.trains:
            what = "a schedule without a backward has no gradients"
            raise _wrong(schedule, each, rank, position, what, "Remove it.")
    row = schedule.actions[rank]
    for stage in sorted(whole):
        last = max(at for at, action in enumerate(row) if action.stage == stage and action.peer is None)
        what = f"Stage {stage} is still whole at the end of rank {rank}."
        raise fault(schedule, what, {rank: len(row)}, _after(schedule, rank, last, f"{stage}RESHARD"))


def _check_gradients(schedule: Schedule, rank: int) -> None:
    row = schedule.actions[rank]
    last = {action.stage: at for at, action in enumerate(row) if action.kind in CONTRIBUTES}
    done: set[int] = set()
    for position, each in _positions(schedule, rank):
        if not isinstance(each, Collective) or each.kind is not CollectiveKind.REDUCE_GRAD:
            continue
        if each.stage in done:
            what = "the gradients of this stage are reduced before it"
            raise _wrong(schedule, each, rank, position, what, "Remove one of the two.")
        done.add(each.stage)
        if position <= last[each.stage]:
            what = f"{row[last[each.stage]]} adds to these gradients later on"
            raise _wrong(schedule, each, rank, position, what, f"Move it after {row[last[each.stage]]}.")
    for stage in sorted(schedule.sharded - done):
        if schedule.placement[stage] == rank:
            what = f"{stage}REDUCE_GRAD is missing on rank {rank}: each rank has the gradients of its own rows only."
            raise fault(schedule, what, {rank: len(row)}, _after(schedule, rank, last[stage], f"{stage}REDUCE_GRAD"))


def _positions(schedule: Schedule, rank: int) -> Iterator[tuple[int, Action | Collective]]:
    """Yield all that a rank does, each with the number of actions before it."""
    position = 0
    for each in schedule.program(rank):
        yield position, each
        position += isinstance(each, Action)


def _after(schedule: Schedule, rank: int, position: int, collective: str) -> str:
    return f"Add {collective} after {schedule.actions[rank][position]}, or let lower() place all collectives."


def _wrong(
    schedule: Schedule, each: Action | Collective, rank: int, position: int, why: str, advice: str
) -> ScheduleError:
    return fault(schedule, f"{each} cannot be at position {position} of rank {rank}: {why}.", {rank: position}, advice)
