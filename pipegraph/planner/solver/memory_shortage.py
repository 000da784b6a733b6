"""Cuts that need little memory, and advice if none fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pipegraph.errors import PlanError, ScheduleError
from pipegraph.planner.solver.cut_search import equal_parts, search_cuts
from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.local_search import EQUAL, Incumbents
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import HELD, SAVED, Integers, PrefixSums
from pipegraph.units import format_bytes

_EFFORT_SHARE = 0.1  # of the effort, to find the least memory for another number of stages
_DOUBLINGS = 3  # of the number of stages


class MemoryShortage(PlanError):
    """No cuts fit into the memory.

    Attributes:
        needed: bytes that the fullest rank needs for ``cuts``.
        cuts: those that need the least.
    """

    def __init__(self, message: str, needed: int, cuts: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.needed, self.cuts = needed, tuple(cuts)


def starts_that_fit(
    sums: PrefixSums,
    memory: MemoryNeed,
    starts: Sequence[Integers],
    effort: float,
    memory_of: Callable[[int], MemoryNeed],
) -> list[Integers]:
    """Return the starts and, if none of them fits, the cuts that need the least.

    ``memory_of`` gives the need of the same schedule with another number of stages; it raises ScheduleError or
    PlanError if there is none. Raises a MemoryShortage that says what would fit if the cuts that need the least do not.
    """
    if any(memory.fits(start[None])[0] for start in starts):
        return list(starts)
    cuts, needed, bound = _least_memory(sums, memory, effort)
    if needed <= memory.limit:
        return [*starts, cuts]
    lines = [
        _sufficient_memory(memory, needed, bound),
        _parts_of_need(memory, cuts),
        *_with_more_stages(sums, memory, effort, memory_of),
    ]
    raise MemoryShortage("\n".join(lines), math.ceil(needed), cuts.tolist())


def _least_memory(sums: PrefixSums, memory: MemoryNeed, effort: float) -> tuple[Integers, float, float]:
    """Return (the cuts that need the least memory, what they need, a lower bound of what any cuts need)."""
    incumbents = Incumbents(memory, lambda cuts: np.ones(len(cuts), bool), kept=1)
    starts = [equal_parts(sums, memory.stages, [quantity]) for quantity in (HELD, SAVED)]
    bound = search_cuts(incumbents, CutSpace.all_cuts(sums.segments, memory.stages), starts, effort)
    return incumbents.best_cuts, incumbents.best_value, bound


def _sufficient_memory(memory: MemoryNeed, needed: float, bound: float) -> str:
    proved = bound >= needed * (1 - EQUAL)
    low, high = min(memory.limits), memory.limit
    has, base, more = f"{format_bytes(high)} on each rank", 0.0, ""
    if low < high:
        has, base, more = f"{format_bytes(low)} to {format_bytes(high)} on a rank", high, " more on each"
    least, known = math.ceil(needed - base), math.floor(bound - base)
    return (
        f"No cuts{'' if proved else ' that were found'} fit into {has}: {format_bytes(least)} ({least} bytes){more} "
        f"would be enough, {'and no less' if proved else f'and less than {format_bytes(known)}{more} would not'}."
    )


def _parts_of_need(memory: MemoryNeed, cuts: Integers) -> str:
    state, saved, buffers = (part[:, 0] for part in memory.parts(cuts[None]))
    rank = memory.fullest(cuts)
    return (
        f"Of that, rank {rank} needs {format_bytes(state[rank])} for parameters, buffers, gradients and optimizer "
        f"state, {format_bytes(saved[rank])} for saved activations, which recompute or smaller microbatches make less, "
        f"and {format_bytes(buffers[rank])} for receive buffers. What a kernel needs while it runs comes on top."
    )


def _with_more_stages(
    sums: PrefixSums, memory: MemoryNeed, effort: float, memory_of: Callable[[int], MemoryNeed]
) -> list[str]:
    """Say how much memory twice as many stages need, four times as many, and so on until they fit."""
    needs: list[str] = []
    for doubled in range(1, _DOUBLINGS + 1):
        stages = memory.stages << doubled
        if stages > sums.segments:
            break
        try:
            larger = memory_of(stages)
        except (ScheduleError, PlanError):
            break
        needed = _least_memory(sums, larger, _EFFORT_SHARE * effort)[1]
        needs.append(f"with {stages} stages on {larger.ranks} ranks it is {format_bytes(needed)}")
        if needed <= memory.limit:
            break
    return [f"The least on a rank depends on their number: {', '.join(needs)}."] if needs else []
