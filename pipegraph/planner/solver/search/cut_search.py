"""The search for the cuts that an objective is least for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, islice
from math import comb

import numpy as np

from pipegraph.planner.solver.objectives.objective import Objective
from pipegraph.planner.solver.prefix_sums import Floats, Integers, Sums
from pipegraph.planner.solver.search.branch_and_bound import Tree
from pipegraph.planner.solver.search.cut_space import Space
from pipegraph.planner.solver.search.incumbents import EQUAL, Pool
from pipegraph.planner.solver.search.local_search import climb, neighbours, spaced, wander

_EVERY = 10_000_000  # if it takes fewer steps to value all cuts that there are, they are valued
_STEPS = 120_000_000  # of any other search: a few seconds
_REST, _WANDER = 0.4, 0.7  # of these, until the tree rests, and until the wandering ends
_BATCH = 4096


def search(pool: Pool, space: Space, starts: Iterable[Integers], effort: float) -> float:
    """Fill the pool with the best cuts of a space, and return what none of them is below.

    Starts are improved by a climb. What no stage of better cuts can be then leaves the space, which leads to one more
    start: the cuts whose stages cost the least by themselves. If few cuts are left, all are valued. Otherwise a tree of
    relaxations bounds them, and tries those that are good for it; where that comes to no end soon, a random walk looks
    for better ones, with which more can be left out. Of equal cuts, the most even are the best.
    """
    objective, segments = pool.objective, space.last[-1]
    for start in starts:
        climb(pool, start, segments)
    near = space.where(lambda *stage: objective.of_stage(*stage) <= pool.best * (1 + EQUAL))
    left, bound = _better(pool, near), pool.best
    if not left.empty:
        narrow = left.best(objective.of_stage, np.maximum)
        bound = _most(objective, narrow, segments)
        climb(pool, _even(objective, left, narrow), segments)
        left = _better(pool, left)
    if left.empty:
        bound = pool.best
    elif comb(segments - 1, len(space.allowed) - 1) * objective.size <= _EVERY:
        _add_every(pool, space)
        bound = pool.best
    else:
        bound = _search_tree(pool, left, bound, effort)
    pool.add(neighbours(pool.first, segments))
    even = _even(objective, near, pool.first)
    if pool.fit(even[None])[0] and pool.add(even[None])[0] <= pool.best * (1 + EQUAL):
        pool.prefer(even)
    return bound


def _search_tree(pool: Pool, space: Space, bound: float, effort: float) -> float:
    steps = int(effort * _STEPS)
    tree = Tree(pool, space, pool.first, bound)
    tree.grow(int(_REST * steps))
    if tree.bound < pool.best:
        wander(pool, pool.first, space.last[-1], int(_WANDER * steps))
        tree.grow(steps)
    return tree.bound


def _add_every(pool: Pool, space: Space) -> None:
    segments, stages = space.last[-1], len(space.allowed)
    every = combinations(range(1, segments), stages - 1)
    while batch := list(islice(every, _BATCH)):
        cuts = np.array(batch, np.int64).reshape(len(batch), stages - 1)
        pool.add(cuts[space.holds(cuts)])


def _better(pool: Pool, space: Space) -> Space:
    """The part of a space without stages that no cuts better than the pool's best have."""
    return space.where(lambda *stage: pool.objective.of_stage(*stage) < pool.goal)


def _most(objective: Objective, cuts: Integers, segments: int) -> float:
    """The largest that a stage of cuts costs by itself."""
    edges = np.concatenate([[0], cuts, [segments]])
    return max(
        float(objective.of_stage(k, edges[k : k + 1], edges[k + 1 : k + 2])[0, 0]) for k in range(len(edges) - 1)
    )


def _even(objective: Objective, space: Space, cuts: Integers) -> Integers:
    """Of all cuts of which no stage costs more than the most of these, those with the least sum of squares."""
    most = _most(objective, cuts, space.last[-1]) * (1 + EQUAL)

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        return objective.of_stage(stage, begins, ends) ** 2

    return space.where(lambda *stage: objective.of_stage(*stage) <= most).best(squares, np.add)


def even_cuts(sums: Sums, stages: int, quantities: Sequence[int]) -> Integers:
    """Cuts that lie as near as they can to where each stage has an equal part of what these quantities add up to."""
    before = sums.before[list(quantities)].sum(axis=0)
    aims = before[-1] * np.arange(1, stages) / stages
    return spaced(np.abs(before - aims[:, None]).argmin(axis=1), sums.segments)
