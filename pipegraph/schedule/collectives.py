"""The collectives of a schedule: when parameters are gathered and gradients are reduced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import BACKWARD, Action, Collective, CollectiveKind, Kind, unit_text
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.unshard_windows import earliest_gathers, residencies
from pipegraph.units import format_number_of

CONTRIBUTES = BACKWARD - {Kind.I}
"""The kinds that add to a stage's gradients."""


def place_collectives(
    schedule: Schedule, sharded: Collection[int], replicated: Collection[int] = (), resident: int | None = None
) -> Schedule:
    """Return the schedule with the collectives of these stages, as `lower` describes them.

    Raises ScheduleError for stages that do not exist, and for a ``resident`` that is too small.
    """
    for stage in (*sharded, *replicated):
        if type(stage) is not int or not 0 <= stage < schedule.stages:
            raise ScheduleError(
                f"{schedule.name} has the stages 0 to {schedule.stages - 1}: {stage!r} cannot be sharded or replicated."
            )
    require_resident(resident)
    reduced = {*sharded, *replicated} if schedule.trains else set()
    rows = (_of_rank(schedule, rank, {*sharded}, reduced, resident) for rank in range(schedule.ranks))
    return schedule.changed(collectives=tuple(chain.from_iterable(rows)))


def require_resident(resident: object) -> None:
    """Raise ScheduleError unless this is a number of stages that may be whole at a time, or None for all."""
    if resident is not None and (type(resident) is not int or resident < 1):
        raise ScheduleError(f"resident={resident!r} stages cannot be whole at a time: give 1 or more, or None for all.")


@dataclass
class _CollectivesBefore:
    """The collectives before an action: memory is freed first, and what is waited for comes before what is not."""

    reshard: list[int] = field(default_factory=list)
    unshard: list[int] = field(default_factory=list)
    reduce_grad: list[int] = field(default_factory=list)

    def collectives(self, next_action: Action | None) -> Iterator[Collective]:
        yield from (Collective(stage, CollectiveKind.RESHARD, next_action) for stage in self.reshard)
        yield from (Collective(stage, CollectiveKind.UNSHARD, next_action) for stage in self.unshard)
        yield from (Collective(stage, CollectiveKind.REDUCE_GRAD, next_action) for stage in self.reduce_grad)


def _of_rank(
    schedule: Schedule, rank: int, sharded: Collection[int], reduced: Collection[int], resident: int | None
) -> Iterator[Collective]:
    row = schedule.actions[rank]
    places: dict[int, _CollectivesBefore] = defaultdict(_CollectivesBefore)  # by position: before the action there
    uses: list[tuple[int, ...]] = []
    ends: list[int] = []  # of each use, the position after it
    last_contribution: dict[int, int] = {}
    position = 0
    for unit in schedule.units(rank):
        position += len(unit)
        stages = dict.fromkeys(action.stage for action in unit if action.peer is None and action.stage in sharded)
        if stages:
            if resident is not None and len(stages) > resident:
                raise ScheduleError(
                    f"{schedule.name}: {unit_text(unit)} on rank {rank} needs {len(stages)} sharded stages at once, "
                    f"and with resident={resident} only {format_number_of('stage', resident)} may be whole.",
                    f"resident={len(stages)}, or a schedule without overlapped pairs.",
                )
            uses.append(tuple(stages))
            ends.append(position)
        for action in unit:
            if action.kind in CONTRIBUTES and action.stage in reduced:
                last_contribution[action.stage] = position
    all_residencies = residencies(uses, resident)
    for residency, begin in zip(all_residencies, earliest_gathers(all_residencies, resident), strict=True):
        places[ends[begin - 1] if begin else 0].unshard.append(residency.stage)
        places[ends[residency.last]].reshard.append(residency.stage)
    for stage, end in last_contribution.items():
        places[end].reduce_grad.append(stage)
    for position, place in sorted(places.items()):
        yield from place.collectives(row[position] if position < len(row) else None)
