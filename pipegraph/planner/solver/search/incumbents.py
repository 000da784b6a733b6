"""The best cuts that came up, and what was learned on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from pipegraph.planner.solver.objectives.objective import Objective
from pipegraph.planner.solver.prefix_sums import Allowed, Floats, Integers, Piece

EQUAL = 1e-9  # figures that differ by less than this part are equal
_PIECES = 16
_CALL, _PER_CALL = 60_000, 40  # a call takes as long as so many steps, and as so many candidates


class Pool:
    """Values cuts by an objective, and keeps the best of those that ``fit``: of equal ones, those that came first.

    ``spent`` counts about how many steps that took so far: the measure of effort, which is the same on every machine.
    """

    def __init__(self, objective: Objective, fit: Callable[[Integers], Allowed], kept: int) -> None:
        self.objective = objective
        self.spent = 0
        self.fit, self._kept = fit, kept
        self._found: dict[tuple[int, ...], float] = {}
        self._known: deque[Piece] = deque(maxlen=_PIECES)

    def add(self, cuts: Integers) -> Floats:
        """The values of cuts (candidates, cuts)."""
        if not len(cuts):
            return np.zeros(0)
        self._spend(len(cuts))
        values = self.objective.values(cuts)
        fitting = np.flatnonzero(self.fit(cuts))
        for number in fitting[np.argsort(values[fitting], kind="stable")[: self._kept]]:
            self._found.setdefault(tuple(cuts[number].tolist()), float(values[number]))
        self._found = dict(self.ranked[: self._kept])
        return values

    def prefer(self, cuts: Integers) -> None:
        """Let these cuts, which are in the pool, come first among equal ones."""
        chosen = tuple(cuts.tolist())
        self._found = {chosen: self.best, **{other: value for other, value in self._found.items() if other != chosen}}

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        """The linear figure of the objective that is largest for a mixture of cuts."""
        self._spend(1)
        return self.objective.largest(cuts, mixture)

    def learn(self, cuts: Integers) -> None:
        """Keep in mind why these cuts have the value that they have."""
        self._known.append(self.largest(cuts[None], np.ones(1)))

    def floor(self, cuts: Integers) -> Floats:
        """What the values of cuts (candidates, cuts) are not below, by what was learned."""
        floor: Floats = np.max([piece.at(cuts) for piece in self._known], axis=0)
        return floor

    @property
    def ranked(self) -> list[tuple[tuple[int, ...], float]]:
        """(cuts, value) by value."""
        return sorted(self._found.items(), key=lambda found: found[1])

    @property
    def first(self) -> Integers:
        """The best cuts."""
        return np.array(min(self._found, key=self._found.__getitem__), np.int64)

    @property
    def best(self) -> float:
        """The least value; infinite where nothing has come up that fits."""
        return min(self._found.values(), default=np.inf)

    @property
    def goal(self) -> float:
        """Cuts with this value or more are no better than the best."""
        return self.best * (1 - EQUAL)

    def _spend(self, candidates: int) -> None:
        self.spent += _CALL + (_PER_CALL + candidates) * self.objective.size
