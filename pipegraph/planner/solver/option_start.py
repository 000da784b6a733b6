"""The candidate that a search begins with: even cuts, with the fastest options that ranks have room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pipegraph.planner.solver.cut_search import largest_stage
from pipegraph.planner.solver.cut_space import StageCosts, StageFigures
from pipegraph.planner.solver.local_search import EQUAL
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import TIMES, Booleans, Integers
from pipegraph.planner.solver.stage_options import OptionSpace, OptionSums

_TRIED = 6  # limits of what a stage may need


def even_start(
    space: OptionSpace,
    sums: OptionSums,
    makespan: Makespan,
    seconds: StageCosts,
    memory: MemoryNeed,
    allowed: Booleans,
    placement: Sequence[int],
) -> Integers:
    """Return even cuts, with the fastest options that ranks have room for: a candidate that fits, if one was found.

    Even cuts are those of which the slowest stage is the fastest. They may leave a rank with stages that need much
    memory, and so with slow options or none. So stages that need more than a part of the memory are left out, of which
    several are tried.

    Args:
        space: the cuts of which each stage fits its rank with some option, if the rank holds nothing else.
        seconds: of a step at least, by what a stage is.
        allowed: the options that stages may have: (stages, options).
        placement: the rank of each stage.
    """
    bytes_needed = StageFigures(memory.stage_bound, space)
    most = [memory.limit]
    if memory.limits:
        fullest = largest_stage(memory, space.cheapest(bytes_needed, np.maximum), sums.segments)
        most = np.linspace(fullest * (1 + EQUAL), memory.limit, _TRIED).tolist()
    starts = []
    for limit in most:
        narrow = space.restrict(lambda *stage, limit=limit: bytes_needed(*stage) <= limit)
        cuts = narrow.cheapest(seconds, np.maximum)
        starts.append(_fastest_options(cuts, sums, memory, allowed, np.array(placement)))
    candidates = np.unique(starts, axis=0)
    missing = (memory.values(candidates) - memory.limit).clip(min=0.0)
    best: Integers = candidates[np.lexsort((makespan.values(candidates), missing))[0]]
    return best


def _fastest_options(
    cuts: Integers, sums: OptionSums, memory: MemoryNeed, allowed: Booleans, placement: Integers
) -> Integers:
    """Return these cuts with the options with which each rank computes for the shortest time, of those that fit into
    its memory; those that need the least on a rank where none fit.

    What a rank needs depends on its own stages alone, so all ranks try options at once. A rank's first stages have one
    option and the others another, since those that come first keep the most microbatches.
    """
    ranks, stages = memory.ranks, len(placement)
    passed: Counter[int] = Counter()
    place = np.zeros(stages, np.int64)  # among the stages of its rank
    for stage, rank in enumerate(placement.tolist()):
        place[stage] = passed[rank]
        passed[rank] += 1
    first, then, change = (
        grid.reshape(-1, 1) for grid in np.indices((sums.options, sums.options, max(passed.values())))
    )
    tried = np.unique(np.where(place <= change, first, then), axis=0)  # (candidates, stages)
    candidates = np.column_stack([np.tile(cuts, (len(tried), 1)), tried])
    holds = np.arange(ranks)[:, None] == placement
    seconds = holds @ sums.stages(candidates)[list(TIMES)].sum(axis=0)  # (ranks, candidates)
    required_bytes = memory.of_ranks(candidates)
    forbidden = holds @ ~allowed[np.arange(stages), tried].T
    seconds[forbidden | (required_bytes > np.array(memory.limits or [np.inf])[:, None])] = np.inf
    required_bytes[forbidden] = np.inf
    chosen = np.where(np.isfinite(seconds).any(axis=1), seconds.argmin(axis=1), required_bytes.argmin(axis=1))
    return np.append(cuts, tried[chosen[placement], np.arange(stages)])
