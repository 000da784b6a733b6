"""The best cuts that a search has found so far, and better ones nearby: hill climbing, and iterated local search."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import combinations, islice, product
from math import comb, prod
from random import Random

import numpy as np

from pipegraph.planner.solver.objective import Objective
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound, edges_of

EQUAL = 1e-9  # figures that differ by less than this part are equal
_BOUNDS = 16  # linear bounds that are remembered
_CALL_STEPS, _CANDIDATE_STEPS = 60_000, 40  # the overhead of a call, in steps and in candidates

_TRIED = 64  # neighbours valued at once
_REACH = 3  # segments by which a single cut moves, at most
_RANDOM_MOVES = 3
_CLOSE = 3  # options next to a stage's, in order of what they keep, that are tried together with a moved cut
_BATCH = 4096


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
        bounds: Floats = LinearBound.values(self._bounds, cuts).max(axis=0)
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


class Moves:
    """What a search tries: moves of cuts, of the options of single stages, and of a cut with the options of a stage
    next to it."""

    def __init__(self, segments: int, allowed: Booleans) -> None:
        """``allowed`` says which options each stage may have: (stages, options)."""
        self._segments, self._allowed = segments, allowed
        self._stages, self.options = allowed.shape

    def near(self, candidate: Integers) -> Integers:
        """Return the neighbours (candidates, numbers) of a candidate (numbers,)."""
        if self.options == 1:
            return neighbours(candidate, self._segments)
        boundaries = self._stages - 1
        cuts, chosen = candidate[:boundaries], candidate[boundaries:]
        moved = neighbours(cuts, self._segments)
        rows = [np.column_stack([moved, np.tile(chosen, (len(moved), 1))])]
        stage, option = np.nonzero(self._allowed)
        changed = np.tile(candidate, (len(stage), 1))
        changed[np.arange(len(stage)), boundaries + stage] = option
        rows.append(changed[option != chosen[stage]])
        close = np.abs(option - chosen[stage]) <= _CLOSE
        for side in (0, 1):  # the cut before the stage, and the one after it
            cut = stage - 1 + side
            inside = close & (cut >= 0) & (cut < boundaries) & (option != chosen[stage])
            for step in (-1, 1):
                candidates = changed[inside].copy()
                candidates[np.arange(len(candidates)), cut[inside]] += step
                rows.append(candidates[has_no_empty_stage(candidates[:, :boundaries], self._segments)])
        every: Integers = np.concatenate(rows)
        return every

    def at_random(self, random: Random, candidate: Integers) -> Integers:
        """Return a candidate some random moves away."""
        boundaries, moved = self._stages - 1, candidate.copy()
        if boundaries:
            moved[:boundaries] = _moved_at_random(random, candidate[:boundaries], self._segments)
        if self.options > 1:
            stage = random.randrange(self._stages)
            moved[boundaries + stage] = random.choice(np.flatnonzero(self._allowed[stage]).tolist())
        return moved

    @property
    def count(self) -> int:
        """How many candidates there are."""
        return comb(self._segments - 1, self._stages - 1) * prod(self._allowed.sum(axis=1).tolist())

    @property
    def relaxation_steps(self) -> int:
        """About how many steps a relaxation of all of them takes."""
        positions = self._segments - self._stages + 1  # of each cut
        return self.options * self._stages * (max(0, self._stages - 2) * positions**2 + 2 * positions)

    def all_candidates(self) -> Iterator[Integers]:
        """Yield all candidates, in batches (candidates, numbers)."""
        choices = product(*(np.flatnonzero(row).tolist() for row in self._allowed)) if self.options > 1 else [()]
        rows = (
            (*cuts, *chosen) for chosen in choices for cuts in combinations(range(1, self._segments), self._stages - 1)
        )
        while batch := list(islice(rows, _BATCH)):
            yield np.array(batch, np.int64).reshape(len(batch), -1)


def hill_climb(incumbents: Incumbents, moves: Moves, cuts: Integers, until: float = np.inf) -> tuple[Integers, float]:
    """Move from a candidate (numbers,) to better neighbours as long as one exists, or until ``until`` steps are spent.
    Returns the last candidate and its value.

    Neighbours are left out if the remembered linear bounds show that they are not better. The most promising of the
    others come first.
    """
    value = float(incumbents.add(cuts[None])[0])
    near = moves.near(cuts)
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
            near = moves.near(cuts)
        else:
            near = near[_TRIED:]
    return cuts, value


def iterated_local_search(incumbents: Incumbents, moves: Moves, until: int) -> None:
    """Repeat hill climbing from the best candidate after random moves, until ``until`` steps are spent.

    Source: Lourenço, Martin and Stützle, 2003.
    """
    random = Random(0)
    cuts, value = hill_climb(incumbents, moves, incumbents.best_cuts, until)
    while incumbents.spent < until:
        other_cuts, other_value = hill_climb(incumbents, moves, moves.at_random(random, cuts))
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
    valid: Booleans = np.all(np.diff(edges_of(cuts, segments), axis=1) > 0, axis=1)
    return valid
