"""Which sharded stages of a rank are whole at the same time, so that its parameters are gathered least often."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

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
