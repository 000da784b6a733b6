"""From cuts to better ones nearby: hill climbing, and iterated local search."""

from __future__ import annotations

from random import Random

import numpy as np

from pipegraph.planner.solver.prefix_sums import Booleans, Integers
from pipegraph.planner.solver.search.incumbents import EQUAL, Incumbents

_TRIED = 64  # neighbours valued at once
_REACH = 3  # segments by which a single cut moves, at most
_RANDOM_MOVES = 3


def hill_climb(incumbents: Incumbents, cuts: Integers, segments: int) -> tuple[Integers, float]:
    """Move from cuts (cuts,) to better neighbours for as long as there is one. Returns the last cuts and their value.

    Neighbours that remembered linear bounds show to be no better are left out. Of the others, the most promising ones
    come first.
    """
    value = float(incumbents.add(cuts[None])[0])
    near = neighbours(cuts, segments)
    incumbents.remember_bound(cuts)
    while True:
        bounds = incumbents.lower_bounds(near)
        near = near[np.argsort(bounds, kind="stable")[: int((bounds < value * (1 - EQUAL)).sum())]]
        if not len(near):
            return cuts, value
        values = incumbents.add(near[:_TRIED])
        best = int(values.argmin())
        incumbents.remember_bound(near[best])
        if values[best] < value * (1 - EQUAL):
            cuts, value = near[best], float(values[best])
            near = neighbours(cuts, segments)
        else:
            near = near[_TRIED:]


def iterated_local_search(incumbents: Incumbents, cuts: Integers, segments: int, until: int) -> None:
    """Climb again and again from the best cuts after random moves, until so many steps are spent.

    Source: Lourenço, Martin and Stützle, 2003.
    """
    random = Random(0)
    cuts, value = hill_climb(incumbents, cuts, segments)
    while incumbents.spent < until:
        other, other_value = hill_climb(incumbents, _moved_at_random(random, cuts, segments), segments)
        if other_value <= value:
            cuts, value = other, other_value


def neighbours(cuts: Integers, segments: int) -> Integers:
    """Return cuts (candidates, cuts) of which one moves by up to three segments, or several in a row by one.

    Every stage keeps a segment. A row of cuts moves if a stage gives a segment to one that is not next to it.
    """
    count = len(cuts)
    number = np.arange(count)
    low, high = (ends[:, None] for ends in np.triu_indices(count))
    rows = ((low <= number) & (number <= high)).astype(np.int64)
    single = np.eye(count, dtype=np.int64)
    steps = [rows, -rows, *(sign * step * single for step in range(2, _REACH + 1) for sign in (1, -1))]
    moved: Integers = cuts + np.concatenate(steps)
    return moved[has_no_empty_stage(moved, segments)]


def _moved_at_random(random: Random, cuts: Integers, segments: int) -> Integers:
    """Move rows of cuts by one or two segments. Moves that empty a stage are left out."""
    for _ in range(_RANDOM_MOVES):
        low, high = sorted(random.choices(range(len(cuts)), k=2))
        moved = cuts.copy()
        moved[low : high + 1] += random.choice((-2, -1, 1, 2))
        if has_no_empty_stage(moved[None], segments)[0]:
            cuts = moved
    return cuts


def without_empty_stages(cuts: Integers, segments: int) -> Integers:
    """Move cuts (cuts,) as little as possible so that every stage has a segment."""
    number = np.arange(1, len(cuts) + 1)
    low = np.maximum.accumulate(cuts.clip(min=1) - number) + number
    return np.minimum(low, segments - len(cuts) - 1 + number)


def has_no_empty_stage(cuts: Integers, segments: int) -> Booleans:
    """Return for cuts (candidates, cuts) whether every stage has a segment: (candidates,)."""
    edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, segments)))
    valid: Booleans = np.all(np.diff(edges, axis=1) > 0, axis=1)
    return valid
