"""What to do where memory is short."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pipegraph.errors import PlanError, ScheduleError
from pipegraph.planner.solver.objectives.memory_need import Memory
from pipegraph.planner.solver.prefix_sums import HELD, SAVED, Integers, Sums
from pipegraph.planner.solver.search.cut_search import even_cuts, search
from pipegraph.planner.solver.search.cut_space import Space
from pipegraph.planner.solver.search.incumbents import EQUAL, Pool
from pipegraph.units import format_bytes

MemoryOf = Callable[[int], Memory]
"""Of the same schedule with so many stages. Raises ScheduleError or PlanError where that is none."""


class MemoryShortage(PlanError):
    """No cuts fit into the memory. ``needed``: the bytes of the fullest rank for ``cuts``, which need the least."""

    def __init__(self, message: str, needed: int, cuts: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.needed, self.cuts = needed, tuple(cuts)


_LOOK = 0.1  # of the effort, for each other number of stages
_DOUBLINGS = 3


def fitting(
    sums: Sums, memory: Memory, starts: Sequence[Integers], effort: float, memory_of: MemoryOf | None
) -> list[Integers]:
    """The starts and, if none of them fits, the cuts that need the least.

    Raises MemoryShortage, which says what would fit, where they do not either.
    """
    if any(memory.fits(start[None])[0] for start in starts):
        return list(starts)
    cuts, needed, bound = _least(sums, memory, effort)
    if needed <= memory.limit:
        return [*starts, cuts]
    lines = [_what_would_do(memory, needed, bound), _what_it_is(memory, cuts)]
    if memory_of is not None:
        lines += _with_more_stages(sums, memory, effort, memory_of)
    raise MemoryShortage("\n".join(lines), math.ceil(needed), cuts.tolist())


def _least(sums: Sums, memory: Memory, effort: float) -> tuple[Integers, float, float]:
    """The cuts that need the least memory, how much, and what no cuts need less than."""
    pool = Pool(memory, lambda cuts: np.ones(len(cuts), bool), kept=1)
    starts = [even_cuts(sums, memory.stages, [quantity]) for quantity in (HELD, SAVED)]
    bound = search(pool, Space.every(sums.segments, memory.stages), starts, effort)
    return pool.first, pool.best, bound


def _what_would_do(memory: Memory, needed: float, bound: float) -> str:
    proved = bound >= needed * (1 - EQUAL)
    low, high = min(memory.limits), memory.limit
    has, base, more = f"{format_bytes(high)} on each rank", 0.0, ""
    if low < high:
        has, base, more = f"{format_bytes(low)} to {format_bytes(high)} on a rank", high, " more on each"
    least, known = math.ceil(needed - base), math.floor(bound - base)
    return (
        f"No cuts{'' if proved else ' that were found'} fit into {has}: {format_bytes(least)} ({least} bytes){more} "
        f"would do, {'and no less' if proved else f'and less than {format_bytes(known)}{more} would not'}."
    )


def _what_it_is(memory: Memory, cuts: Integers) -> str:
    state, saved, buffers = (part[:, 0] for part in memory.parts(cuts[None]))
    rank = memory.fullest(cuts)
    return (
        f"Of that, rank {rank} needs {format_bytes(state[rank])} for parameters, buffers, gradients and optimizer "
        f"state, {format_bytes(saved[rank])} for saved activations, which recompute or smaller microbatches make less, "
        f"and {format_bytes(buffers[rank])} for receive buffers. What a kernel needs while it runs comes on top."
    )


def _with_more_stages(sums: Sums, memory: Memory, effort: float, memory_of: MemoryOf) -> list[str]:
    """What is the least with twice as many stages, four times, and so on, until that fits."""
    tried: list[str] = []
    for doubled in range(1, _DOUBLINGS + 1):
        stages = memory.stages << doubled
        if stages > sums.segments:
            break
        try:
            larger = memory_of(stages)
        except (ScheduleError, PlanError):
            break
        needed = _least(sums, larger, _LOOK * effort)[1]
        tried.append(f"with {stages} stages on {larger.ranks} ranks it is {format_bytes(needed)}")
        if needed <= memory.limit:
            break
    return [f"The least on a rank depends on their number: {', '.join(tried)}."] if tried else []
