"""The search for the cuts with the least value of an objective, and for the most even ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import comb

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.branch_and_bound import BranchAndBound
from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.local_search import (
    EQUAL,
    Incumbents,
    hill_climb,
    iterated_local_search,
    neighbours,
    without_empty_stages,
)
from pipegraph.planner.solver.objective import Objective
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, PrefixSums

_FLOPS_SHARE = 1e-9  # how much evenness in operations counts, compared with evenness in weight

_ALL_STEPS = 10_000_000  # if valuing all cuts takes fewer steps, all are valued
_STEPS = 120_000_000  # of any other search with an effort of 1: a few seconds
_BRANCHED, _SEARCHED = 0.4, 0.7  # the parts of these steps after which branch and bound, then local search, stop
_BATCH = 4096


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

    return tuple(CutSpace.all_cuts(len(costs), stages).restrict(is_light).cheapest(squares, np.add).tolist())


def _shares_before(figures: Sequence[float]) -> Floats:
    """Return the sum before each edge, as a part of the whole."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures)])
    return sums / (sums[-1] or 1.0)


def search_cuts(incumbents: Incumbents, space: CutSpace, starts: Iterable[Integers], effort: float) -> float:
    """Find the best cuts of a space, and return a lower bound of their value.

    1. Climb from each start. Remove stages from the space that no better cuts have. Climb once more from the cuts whose
       largest stage is the smallest.
    2. If few cuts are left, value all. Otherwise bound them by branch and bound, look for better ones by local search,
       and continue with branch and bound.
    3. Of equally good cuts, prefer the most even ones.
    """
    objective, segments = incumbents.objective, space.last[-1]
    for start in starts:
        hill_climb(incumbents, start, segments)
    near = space.restrict(lambda *stage: objective.stage_bound(*stage) <= incumbents.best_value * (1 + EQUAL))
    subspace, bound = _better(incumbents, near), incumbents.best_value
    if not subspace.empty:
        balanced = subspace.cheapest(objective.stage_bound, np.maximum)
        bound = largest_stage(objective, balanced, segments)
        hill_climb(incumbents, _most_even(objective, subspace, balanced), segments)
        subspace = _better(incumbents, subspace)
    if subspace.empty:
        bound = incumbents.best_value
    elif comb(segments - 1, len(space.allowed) - 1) * objective.steps <= _ALL_STEPS:
        _add_all(incumbents, space)
        bound = incumbents.best_value
    else:
        steps = int(effort * _STEPS)
        tree = BranchAndBound(incumbents, subspace, incumbents.best_cuts, bound)
        tree.run(int(_BRANCHED * steps))
        if tree.bound < incumbents.best_value:
            iterated_local_search(incumbents, incumbents.best_cuts, segments, int(_SEARCHED * steps))
            tree.run(steps)
        bound = tree.bound
    incumbents.add(neighbours(incumbents.best_cuts, segments))
    even = _most_even(objective, near, incumbents.best_cuts)
    if incumbents.fit(even[None])[0] and incumbents.add(even[None])[0] <= incumbents.best_value * (1 + EQUAL):
        incumbents.prefer(even)
    return bound


def _add_all(incumbents: Incumbents, space: CutSpace) -> None:
    segments, stages = space.last[-1], len(space.allowed)
    every = combinations(range(1, segments), stages - 1)
    while batch := list(islice(every, _BATCH)):
        cuts = np.array(batch, np.int64).reshape(len(batch), stages - 1)
        incumbents.add(cuts[space.contains(cuts)])


def _better(incumbents: Incumbents, space: CutSpace) -> CutSpace:
    """Return the space without stages that no cuts better than the best ones have."""
    return space.restrict(lambda *stage: incumbents.objective.stage_bound(*stage) < incumbents.target)


def largest_stage(objective: Objective, cuts: Integers, segments: int) -> float:
    """Return the largest bound of a single stage of these cuts."""
    edges = np.concatenate([[0], cuts, [segments]])
    return max(
        float(objective.stage_bound(stage, edges[stage : stage + 1], edges[stage + 1 : stage + 2])[0, 0])
        for stage in range(len(edges) - 1)
    )


def _most_even(objective: Objective, space: CutSpace, cuts: Integers) -> Integers:
    """Return the cuts with the least sum of squares of stages, among those whose largest stage is not larger."""
    largest = largest_stage(objective, cuts, space.last[-1]) * (1 + EQUAL)

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        return objective.stage_bound(stage, begins, ends) ** 2

    return space.restrict(lambda *stage: objective.stage_bound(*stage) <= largest).cheapest(squares, np.add)
