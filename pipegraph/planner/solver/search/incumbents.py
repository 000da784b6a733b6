"""The best cuts that a search has found so far."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from pipegraph.planner.solver.objectives.objective import Objective
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound

EQUAL = 1e-9  # figures that differ by less than this part are equal
_BOUNDS = 16  # linear bounds that are remembered
_CALL_STEPS, _CANDIDATE_STEPS = 60_000, 40  # a call takes as long as so many steps, and as so many candidates


class Incumbents:
    """Values cuts by an objective, and keeps the best of those that fit; of equal ones, the first.

    Attributes:
        fit: whether cuts (candidates, cuts) fit into the memory: (candidates,).
        spent: about how many steps the search has taken so far. Effort is measured in steps because the number of steps
            is the same on every machine.
    """

    def __init__(self, objective: Objective, fit: Callable[[Integers], Booleans], kept: int) -> None:
        self.objective = objective
        self.spent = 0
        self.fit, self._kept = fit, kept
        self._values: dict[tuple[int, ...], float] = {}
        self._bounds: deque[LinearBound] = deque(maxlen=_BOUNDS)

    def add(self, cuts: Integers) -> Floats:
        """Return the values of cuts (candidates, cuts), and keep the best."""
        if not len(cuts):
            return np.zeros(0)
        self.spent += self._steps(len(cuts))
        values = self.objective.values(cuts)
        fitting = np.flatnonzero(self.fit(cuts))
        for number in fitting[np.argsort(values[fitting], kind="stable")[: self._kept]]:
            self._values.setdefault(tuple(cuts[number].tolist()), float(values[number]))
        self._values = dict(self.ranked[: self._kept])
        return values

    def prefer(self, cuts: Integers) -> None:
        """Put these cuts, which have been added, first among equal ones."""
        chosen = tuple(cuts.tolist())
        others = {other: value for other, value in self._values.items() if other != chosen}
        self._values = {chosen: self.best_value, **others}

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        """Return the linear bound of the objective that is largest for a mixture of cuts."""
        self.spent += self._steps(1)
        return self.objective.tightest_bound(cuts, mixture)

    def remember_bound(self, cuts: Integers) -> None:
        """Remember the linear bound that shows the value of these cuts (cuts,)."""
        self._bounds.append(self.tightest_bound(cuts[None], np.ones(1)))

    def lower_bounds(self, cuts: Integers) -> Floats:
        """Return what the remembered bounds say about the values of cuts (candidates, cuts)."""
        bounds: Floats = np.max([linear.at(cuts) for linear in self._bounds], axis=0)
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
