"""The collectives of a schedule: when parameters are gathered and gradients are reduced."""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import BACKWARD, Action, Collective, CollectiveKind, Kind, unit_text
from pipegraph.schedule.schedule import Schedule
from pipegraph.units import format_number_of

# ---- unshard windows -------------------------------------------------------------------------------------------------
# Which sharded stages of a rank are whole at the same time, so that its parameters are gathered least often.


_AHEAD = (8, 4, 2, 1)  # the numbers of uses by which gathers are to be ahead, tried in this order


@dataclass(slots=True)
class Residency:
    """A stage that is whole from one use to another, of those that are counted from 0 over all stages of a rank.

    It begins with the first that needs the stage, or some uses earlier if there is room for it.
    """

    stage: int
    first: int
    last: int


def residencies(uses: Sequence[Collection[int]], resident: int | None = None) -> list[Residency]:
    """Return when stages are whole, in the order in which they are gathered, with the fewest possible residencies.

    A stage that is needed takes the place of the one whose next use is the furthest away (Belady, A study of
    replacement algorithms for virtual-storage computers, 1966). No other choice needs fewer gathers, prefetched or not.
    Of the choices with the fewest gathers, one that leaves room for each gather some uses ahead is returned, if the
    same rule finds one: as if every use also needed the stages of the next ones.

    Args:
        uses: the stages that each use needs whole at once, no more than ``resident``.
        resident: how many stages may be whole at a time; None: all.
    """
    fewest = _furthest_next_use(uses, resident)
    if resident is not None and len(fewest) > resident:
        for ahead in _AHEAD:
            candidates = _furthest_next_use(_with_next(uses, resident, ahead), resident)
            if len(candidates) == len(fewest):
                return candidates
    return fewest


def _with_next(uses: Sequence[Collection[int]], resident: int, ahead: int) -> list[Collection[int]]:
    """Return the uses, each with the stages of the next ``ahead`` uses, up to ``resident`` stages."""
    windows: list[Collection[int]] = []
    for number, stages in enumerate(uses):
        window = dict.fromkeys(stages)
        for next_stages in uses[number + 1 : number + 1 + ahead]:
            if len(window | dict.fromkeys(next_stages)) > resident:
                break
            window |= dict.fromkeys(next_stages)
        windows.append(window)
    return windows


def _furthest_next_use(uses: Sequence[Collection[int]], resident: int | None) -> list[Residency]:
    all_residencies: list[Residency] = []
    resident_stages: dict[int, Residency] = {}
    next_uses: dict[int, deque[int]] = {}
    for number, stages in enumerate(uses):
        for stage in stages:
            next_uses.setdefault(stage, deque()).append(number)
    for number, stages in enumerate(uses):
        for stage in stages:
            next_uses[stage].popleft()
        for stage in stages:
            if stage not in resident_stages:
                if len(resident_stages) == resident:
                    evictable = (candidate for candidate in resident_stages if candidate not in stages)
                    del resident_stages[
                        max(
                            evictable,
                            key=lambda candidate: next_uses[candidate][0] if next_uses[candidate] else math.inf,
                        )
                    ]
                resident_stages[stage] = Residency(stage, number, number)
                all_residencies.append(resident_stages[stage])
            resident_stages[stage].last = number
    return all_residencies


def earliest_gathers(all_residencies: Sequence[Residency], resident: int | None = None) -> list[int]:
    """Return for each residency after how many uses its gather can begin: when a place is free, and all before have.

    Args:
        all_residencies: what `residencies` returns for this number of ``resident`` stages.
    """
    begins: list[int] = []
    ends: list[int] = []  # of the residencies before, sorted
    for number, residency in enumerate(all_residencies):
        begins.append(0 if resident is None or number < resident else 1 + ends[number - resident])
        insort(ends, residency.last)
    return begins


# ---- collectives -----------------------------------------------------------------------------------------------------


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
