"""From cuts to better ones nearby."""

from __future__ import annotations

from random import Random

import numpy as np

from pipegraph.planner.solver.prefix_sums import Allowed, Integers
from pipegraph.planner.solver.search.incumbents import EQUAL, Pool

_TRIED = 64  # neighbours at once
_REACH = 3  # segments that a single cut moves by, at most
_KICKS = 3  # moves at random


def climb(pool: Pool, cuts: Integers, segments: int) -> tuple[Integers, float]:
    """Move from cuts to better neighbours for as long as there is one. Returns the last cuts and their value.

    Neighbours that the linear figures learned on the way show to be no better are not tried, and of the others the most
    promising come first.
    """
    value = float(pool.add(cuts[None])[0])
    near = neighbours(cuts, segments)
    pool.learn(cuts)
    while True:
        floor = pool.floor(near)
        near = near[np.argsort(floor, kind="stable")[: int((floor < value * (1 - EQUAL)).sum())]]
        if not len(near):
            return cuts, value
        values = pool.add(near[:_TRIED])
        best = int(values.argmin())
        pool.learn(near[best])
        if values[best] < value * (1 - EQUAL):
            cuts, value = near[best], float(values[best])
            near = neighbours(cuts, segments)
        else:
            near = near[_TRIED:]


def wander(pool: Pool, cuts: Integers, segments: int, until: int) -> None:
    """Climb again and again from cuts moved at random, staying at the best, until the pool has spent so much (iterated
    local search: Lourenço, Martin and Stützle, 2003)."""
    random = Random(0)
    cuts, value = climb(pool, cuts, segments)
    while pool.spent < until:
        found, its = climb(pool, _kicked(random, cuts, segments), segments)
        if its <= value:
            cuts, value = found, its


def neighbours(cuts: Integers, segments: int) -> Integers:
    """Cuts of which one is moved by up to three segments, or several in a row by one, so that every stage keeps a
    segment: (candidates, cuts). A row of cuts moves when a stage gives a segment to one that is not beside it."""
    count = len(cuts)
    number = np.arange(count)
    low, high = (ends[:, None] for ends in np.triu_indices(count))
    rows = ((low <= number) & (number <= high)).astype(np.int64)
    single = np.eye(count, dtype=np.int64)
    steps = [rows, -rows, *(sign * step * single for step in range(2, _REACH + 1) for sign in (1, -1))]
    moved: Integers = cuts + np.concatenate(steps)
    return moved[apart(moved, segments)]


def _kicked(random: Random, cuts: Integers, segments: int) -> Integers:
    """The cuts after some moves of rows of them, by one or two segments; those that leave a stage none are left out."""
    for _ in range(_KICKS):
        low, high = sorted(random.choices(range(len(cuts)), k=2))
        moved = cuts.copy()
        moved[low : high + 1] += random.choice((-2, -1, 1, 2))
        if apart(moved[None], segments)[0]:
            cuts = moved
    return cuts


def spaced(cuts: Integers, segments: int) -> Integers:
    """The cuts (cuts), moved as little as it takes for every stage to have a segment."""
    number = np.arange(1, len(cuts) + 1)
    low = np.maximum.accumulate(cuts.clip(min=1) - number) + number
    return np.minimum(low, segments - len(cuts) - 1 + number)


def apart(cuts: Integers, segments: int) -> Allowed:
    """Of each of the cuts (candidates, cuts), whether every stage has a segment."""
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, segments)))
    apart: Allowed = np.all(np.diff(edges, axis=1) > 0, axis=1)
    return apart
