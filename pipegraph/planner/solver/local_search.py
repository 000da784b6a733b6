"""The best cuts that a search has found so far, and better ones nearby: hill climbing, and iterated local search."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.objective import Objective
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound

EQUAL = 1e-9  # figures that differ by less than this part are equal
_BOUNDS = 16  # linear bounds that are remembered
_CALL_STEPS, _CANDIDATE_STEPS = 60_000, 40  # the overhead of a call, in steps and in candidates

_TRIED = 64  # neighbours valued at once
_REACH = 3  # segments by which a single cut moves, at most
_RANDOM_MOVES = 3


class Incumbents:
    """Values cuts by an objective, and keeps the best of those that fit; of equal ones, the first.

    Attributes:
        fit: whether cuts (candidates, cuts) fit into the memory: (candidates,).
        spent: about how many steps the search has taken so far. Effort is measured in steps because the number of steps
            is the same on every machine.
    """

    def __init__(self, objective: Objective, fit: Callable[[Integers], Booleans], capacity: int) -> None:
        self.objective = objective
        self.spent = 0
        self.fit, self._capacity = fit, capacity
        self._values: dict[tuple[int, ...], float] = {}
        self._bounds: deque[LinearBound] = deque(maxlen=_BOUNDS)

    def add(self, cuts: Integers) -> Floats:
        """Return the values of cuts (candidates, cuts), and keep the best."""
        if not len(cuts):
            return np.zeros(0)
        self.spent += self._steps(len(cuts))
        values = self.objective.values(cuts)
        fitting = np.flatnonzero(self.fit(cuts))
        for number in fitting[np.argsort(values[fitting], kind="stable")[: self._capacity]]:
            self._values.setdefault(tuple(cuts[number].tolist()), float(values[number]))
        self._values = dict(self.ranked[: self._capacity])
        return values

    def prefer(self, cuts: Integers) -> None:
        """Put these cuts, which have been added, first among equal ones."""
        chosen = tuple(cuts.tolist())
        other_values = {candidate: value for candidate, value in self._values.items() if candidate != chosen}
        self._values = {chosen: self.best_value, **other_values}

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        """Return the linear bound of the objective that is largest for a mixture of cuts."""
        self.spent += self._steps(1)
        return self.objective.tightest_bound(cuts, mixture)

    def remember_bound(self, cuts: Integers) -> None:
        """Remember the linear bound that shows the value of these cuts (cuts,)."""
        self._bounds.append(self.tightest_bound(cuts[None], np.ones(1)))

    def lower_bounds(self, cuts: Integers) -> Floats:
        """Return what the remembered bounds say about the values of cuts (candidates, cuts)."""
        self.spent += cuts.size
        bounds: Floats = type(self._bounds[0]).largest(self._bounds, cuts)
        return bounds

    @property
    def ranked(self) -> list[tuple[tuple[int, ...], float]]:
        """(cuts, value), the best first."""
        return sorted(self._values.items(), key=lambda entry: entry[1])

    @property
    def best_cuts(self) -> Integers:
        return np.array(min(self._values, key=self._values.__getitem__), np.int64)

    @property
    def best_value(self) -> float:
        """The least value; infinite if no cuts have been found that fit."""
        return min(self._values.values(), default=np.inf)

    @property
    def target(self) -> float:
        """Cuts with this value or more are no better than the best."""
        return self.best_value * (1 - EQUAL)

    def _steps(self, candidates: int) -> int:
        return _CALL_STEPS + (_CANDIDATE_STEPS + candidates) * self.objective.steps


class Moves(NamedTuple):
    """What a search tries: the neighbours (candidates, cuts) of cuts (cuts,), and cuts some random moves away."""

    near: Callable[[Integers, int], Integers]
    at_random: Callable[[Random, Integers, int], Integers]


def hill_climb(
    incumbents: Incumbents, cuts: Integers, segments: int, moves: Moves | None = None, until: float = np.inf
) -> tuple[Integers, float]:
    """Move from cuts (cuts,) to better neighbours as long as one exists, or until ``until`` steps are spent.
    Returns the last cuts and their value.

    Neighbours are left out if the remembered linear bounds show that they are not better. The most promising of the
    others come first.
    """
    neighbours_of = neighbours if moves is None else moves.near
    value = float(incumbents.add(cuts[None])[0])
    near = neighbours_of(cuts, segments)
    incumbents.remember_bound(cuts)
    while incumbents.spent < until:
        bounds = incumbents.lower_bounds(near)
        near = near[np.argsort(bounds, kind="stable")[: int((bounds < value * (1 - EQUAL)).sum())]]
        if not len(near):
            return cuts, value
        values = incumbents.add(near[:_TRIED])
        best = int(values.argmin())
        incumbents.remember_bound(near[best])
        if values[best] < value * (1 - EQUAL):
            cuts, value = near[best], float(values[best])
            near = neighbours_of(cuts, segments)
        else:
            near = near[_TRIED:]
    return cuts, value


def iterated_local_search(
    incumbents: Incumbents, cuts: Integers, segments: int, until: int, moves: Moves | None = None
) -> None:
    """Repeat hill climbing from the best cuts after random moves, until ``until`` steps are spent.

    Source: Lourenço, Martin and Stützle, 2003.
    """
    random = Random(0)
    at_random = moved_at_random if moves is None else moves.at_random
    cuts, value = hill_climb(incumbents, cuts, segments, moves, until)
    while incumbents.spent < until:
        other_cuts, other_value = hill_climb(incumbents, at_random(random, cuts, segments), segments, moves)
        if other_value <= value:
            cuts, value = other_cuts, other_value


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


def moved_at_random(random: Random, cuts: Integers, segments: int) -> Integers:
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
