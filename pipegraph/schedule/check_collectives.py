"""Check that parameters are whole when they are used, and that gradients are reduced once."""

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
