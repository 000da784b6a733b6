"""The search for the candidates with the least value of an objective, and for the most even ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.branch_and_bound import BranchAndBound
from pipegraph.planner.solver.cut_space import CutSpace, StageCosts, StageFigures
from pipegraph.planner.solver.local_search import (
    EQUAL,
    Incumbents,
    Moves,
    hill_climb,
    iterated_local_search,
    without_empty_stages,
)
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import Objective
from pipegraph.planner.solver.prefix_sums import TIMES, Booleans, Floats, Integers, PrefixSums, split

_FLOPS_SHARE = 1e-9  # how much evenness in operations counts, compared with evenness in weight

_ALL_STEPS = 10_000_000  # if valuing all cuts takes fewer steps, all are valued
_STEPS = 120_000_000  # of any other search with an effort of 1 and one option
_BRANCHED, _SEARCHED = 0.4, 0.7  # the parts of these steps after which branch and bound, then local search, stop
_RELAXED = 10  # times the effort that branch and bound may take for a relaxation of all; what is left is smaller


def equal_parts(sums: PrefixSums, stages: int, quantities: Sequence[int]) -> Integers:
    """Return the cuts nearest to equal parts of the sum of these quantities."""
    prefix_sums = sums.prefix_sums[list(quantities)].sum(axis=0)
    targets = prefix_sums[-1] * np.arange(1, stages) / stages
    return without_empty_stages(np.abs(prefix_sums - targets[:, None]).argmin(axis=1), sums.segments)


def most_even_cuts(costs: Sequence[SegmentCost], stages: int, largest: float) -> tuple[int, ...]:
    """Return the most even of all cuts of which no stage weighs more than ``largest``; there must be such cuts.

    The most even cuts have the least sum of squares of weights (a stage's F + I + W); of equal ones, of operations.
    """
    weights = [cost.forward + cost.input_grad + cost.weight_grad for cost in costs]
    weight, limit = _shares_before(weights), largest / (sum(weights) or 1.0) * (1 + EQUAL)
    work = _shares_before([float(cost.flops) for cost in costs])

    def is_light(stage: int, begins: Integers, ends: Integers) -> Booleans:
        allowed: Booleans = weight[ends][:, None] - weight[begins] <= limit
        return allowed

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        unevenness: Floats = (weight[ends][:, None] - weight[begins]) ** 2
        return unevenness + _FLOPS_SHARE * (work[ends][:, None] - work[begins]) ** 2

    return tuple(CutSpace.all_cuts(len(costs), stages).restrict(is_light).cheapest(squares, np.add)[1].tolist())


def _shares_before(figures: Sequence[float]) -> Floats:
    """Return the sum before each edge, as a part of the whole."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures)])
    return sums / (sums[-1] or 1.0)


def search(
    incumbents: Incumbents,
    moves: Moves,
    space: CutSpace,
    starts: Iterable[Integers],
    effort: float,
    outer_bound: Callable[[float], float] = lambda enough: 0.0,
) -> float:
    """Find the best candidates of a space, and return a lower bound of their value.

    1. Climb from each start. Remove stages from the space that no better candidates have. Climb once more from the
       candidate whose largest stage is the smallest.
    2. If few candidates are left, value all. Otherwise bound them by branch and bound, look for better ones by local
       search, and continue with branch and bound. Where the effort is not enough for one relaxation, only local search
       is left.
    3. Of equally good candidates, prefer the most even one.

    ``outer_bound`` returns a value that no candidate goes below; it is not made tighter than its argument.
    """
    objective = incumbents.objective
    for start in starts:
        hill_climb(incumbents, moves, start)
    steps = int(effort * search_steps(space.options))
    are_few = moves.count * objective.steps <= _ALL_STEPS
    if space.steps > _RELAXED * steps and not are_few:
        bound = outer_bound(incumbents.target)
        if bound < incumbents.target:
            iterated_local_search(incumbents, moves, int(_SEARCHED * steps))
        return min(bound, incumbents.best_value)
    near = space.restrict(lambda *stage: objective.stage_bound(*stage) <= incumbents.best_value * (1 + EQUAL))
    subspace, bound = _better(incumbents, near), incumbents.best_value
    if not subspace.empty:
        bound, _ = subspace.cheapest(objective.stage_bound, np.maximum)
        hill_climb(incumbents, moves, _most_even(objective, subspace, bound))
        subspace = _better(incumbents, subspace)
    if subspace.empty:
        bound = incumbents.best_value
    elif are_few:
        for batch in moves.all_candidates():
            incumbents.add(batch[space.contains(batch)])
        bound = incumbents.best_value
    else:
        tree = BranchAndBound(
            incumbents, subspace, incumbents.best_cuts, max(bound, outer_bound(incumbents.target)), moves
        )
        if tree.bound < incumbents.best_value:
            tree.run(int(_BRANCHED * steps))
        if tree.bound < incumbents.best_value:
            iterated_local_search(incumbents, moves, int(_SEARCHED * steps))
            tree.run(steps)
        bound = tree.bound
    incumbents.add(moves.near(incumbents.best_cuts))
    even = _most_even(objective, near, largest_stage(objective, incumbents.best_cuts, near))
    if incumbents.fit(even[None])[0] and incumbents.add(even[None])[0] <= incumbents.best_value * (1 + EQUAL):
        incumbents.prefer(even)
    return bound


def search_steps(options: int) -> int:
    """Return the steps of a search with an effort of 1: a few seconds, or about ten with several options."""
    return _STEPS * min(options, 2)


def _better(incumbents: Incumbents, space: CutSpace) -> CutSpace:
    """Return the space without stages that no candidates better than the best ones have."""
    return space.restrict(lambda *stage: incumbents.objective.stage_bound(*stage) < incumbents.target)


def largest_stage(objective: Objective, candidate: Integers, space: CutSpace) -> float:
    """Return the largest bound of a single stage of a candidate (numbers,) of the space."""
    cuts, options = split(candidate[None], space.options)
    edges = np.concatenate([[0], cuts[0], space.last[-1:]])
    return max(
        float(objective.stage_bound(stage, edges[stage : stage + 1], edges[stage + 1 : stage + 2])[option, 0, 0])
        for stage, option in enumerate(options[0])
    )


def _most_even(objective: Objective, space: CutSpace, largest: float) -> Integers:
    """Return the candidate with the least sum of squares of stages, among those whose largest stage is not larger."""
    limit = largest * (1 + EQUAL)

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        return objective.stage_bound(stage, begins, ends) ** 2

    return space.restrict(lambda *stage: objective.stage_bound(*stage) <= limit).cheapest(squares, np.add)[1]


# ---- start with options ----------------------------------------------------------------------------------------------
# The candidate that a search with several options begins with: even cuts, with the fastest options that ranks have room
# for.


_TRIED = 6  # limits of what a stage may need


def even_start(
    space: CutSpace,
    sums: PrefixSums,
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
        fullest, _ = space.cheapest(bytes_needed, np.maximum)
        most = np.linspace(fullest * (1 + EQUAL), memory.limit, _TRIED).tolist()
    starts = []
    for limit in most:
        narrow = space.restrict(lambda *stage, limit=limit: bytes_needed(*stage) <= limit)
        cuts = narrow.cheapest(seconds, np.maximum)[1][: len(placement) - 1]
        starts.append(_fastest_options(cuts, sums, memory, allowed, np.array(placement)))
    candidates = np.unique(starts, axis=0)
    missing = (memory.values(candidates) - memory.limit).clip(min=0.0)
    best: Integers = candidates[np.lexsort((makespan.values(candidates), missing))[0]]
    return best


def _fastest_options(
    cuts: Integers, sums: PrefixSums, memory: MemoryNeed, allowed: Booleans, placement: Integers
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
