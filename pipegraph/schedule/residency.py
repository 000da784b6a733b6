"""Which sharded stages of a rank are whole at the same time, so that its parameters are gathered least often."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Residency:
    """A stage that is whole from one use to another. Uses are counted from 0, over all stages of a rank."""

    stage: int
    first: int
    last: int


def residencies(uses: Sequence[Collection[int]], resident: int | None = None) -> list[Residency]:
    """Return when stages are whole, in the order in which they are gathered: as few residencies as possible.

    A stage that is needed takes the place of the one whose next use is the furthest away (Belady, A study of
    replacement algorithms for virtual-storage computers, 1966). No other choice needs fewer gathers, prefetched or not.

    Args:
        uses: the stages that each use needs whole at once, no more than ``resident``.
        resident: how many stages may be whole at a time; None: all.
    """
    found: list[Residency] = []
    whole: dict[int, Residency] = {}
    later: dict[int, deque[int]] = {}
    for number, stages in enumerate(uses):
        for stage in stages:
            later.setdefault(stage, deque()).append(number)
    for number, stages in enumerate(uses):
        for stage in stages:
            later[stage].popleft()
        for stage in stages:
            if stage not in whole:
                if len(whole) == resident:
                    evictable = (other for other in whole if other not in stages)
                    del whole[max(evictable, key=lambda other: later[other][0] if later[other] else math.inf)]
                whole[stage] = Residency(stage, number, number)
                found.append(whole[stage])
            whole[stage].last = number
    return found


def earliest_gathers(found: Sequence[Residency], resident: int | None = None) -> list[int]:
    """Return for each residency after how many uses its gather can begin: when a place is free, and all before have.

    Args:
        found: what `residencies` returns for this number of ``resident`` stages.
    """
    begins: list[int] = []
    ends: list[int] = []  # of the residencies before, sorted
    for number, each in enumerate(found):
        begins.append(0 if resident is None or number < resident else 1 + ends[number - resident])
        insort(ends, each.last)
    return begins
