"""The cuts among which a search still has to choose, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np

from pipegraph.planner.solver.local_search import without_empty_stages
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound

StageFilter = Callable[[int, Integers, Integers], Booleans]
"""(stage, begins, ends) → whether the stage may be the segments begin … end − 1: (ends, begins)"""
StageCosts = Callable[[int, Integers, Integers], Floats]
"""(stage, begins, ends) → what the stage costs as the segments begin … end − 1: (ends, begins)"""


@dataclass(frozen=True)
class CutSpace:
    """A set of cuts.

    Edge 0 and edge ``stages`` are the ends of the chain, and the edges between them are cuts. Stage k lies between
    edges k and k + 1.

    Attributes:
        first, last: edge k has a position from ``first[k]`` to ``last[k]``.
        allowed: for each stage, whether it may lie between these positions: (positions of end, positions of begin).
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    allowed: tuple[Booleans, ...]

    @classmethod
    def all_cuts(cls, segments: int, stages: int) -> Self:
        """Return all cuts that leave each stage a segment or more."""
        first = (*range(stages), segments)
        last = (0, *range(segments - stages + 1, segments + 1))
        ranges = [np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]
        return cls(first, last, tuple(end[:, None] > begin for begin, end in pairwise(ranges)))

    @property
    def steps(self) -> int:
        """About how many steps `minimum` takes beyond what a call takes in any case."""
        return 0

    @property
    def windows(self) -> list[Integers]:
        return [np.arange(low, high + 1) for low, high in zip(self.first, self.last, strict=True)]

    @property
    def empty(self) -> bool:
        return any(low > high for low, high in zip(self.first, self.last, strict=True))

    def restrict(self, stage_filter: StageFilter) -> Self:
        """Return the cuts of which the filter allows every stage."""
        masks = [
            mask & stage_filter(stage, *edges)
            for stage, (mask, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True))
        ]
        return self._subspace(self.first, self.last, tuple(masks))._trimmed()

    def restrict_edge(self, edge: int, first: int, last: int) -> Self:
        """Return the cuts of which this edge lies from ``first`` to ``last``."""
        positions = slice(first - self.first[edge], last + 1 - self.first[edge])
        allowed = list(self.allowed)
        allowed[edge - 1], allowed[edge] = allowed[edge - 1][positions], allowed[edge][:, positions]
        firsts, lasts = list(self.first), list(self.last)
        firsts[edge], lasts[edge] = first, last
        return self._subspace(tuple(firsts), tuple(lasts), tuple(allowed))._trimmed()

    def nearest(self, mean: Floats) -> Integers:
        """Return the cuts nearest to these positions (cuts,), of all cuts of the chain."""
        return without_empty_stages(np.rint(mean).astype(np.int64), self.last[-1])

    def contains(self, cuts: Integers) -> Booleans:
        """Return for cuts (candidates, cuts) whether they are in the space: (candidates,)."""
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.last[-1])))
        inside: Booleans = np.all((edges >= self.first) & (edges <= self.last), axis=1)
        at = np.where(inside[:, None], edges - self.first, 0)
        for stage, mask in enumerate(self.allowed):
            inside &= mask[at[:, stage + 1], at[:, stage]]
        return inside

    def cheapest(self, costs: StageCosts, total: np.ufunc) -> Integers:
        """Return the cuts with the least sum (``total`` is np.add) or maximum (np.maximum) of the stages' costs.

        By dynamic programming over stages.
        """
        best, choices = np.zeros(1), []
        for stage, (mask, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True)):
            totals = np.where(mask, total(costs(stage, *edges), best), np.inf)
            choices.append(totals.argmin(axis=1))
            best = totals.min(axis=1)
        return self._backtrack(choices)

    def with_one_place(self, mean: Floats, spread: Floats, tried: Integers) -> Sequence[Self]:
        """Return what is left of a space in which each cut has one place.

        Args:
            mean, spread: of a relaxation's candidates: (cuts,).
            tried: candidates that were valued: (candidates, cuts).
        """
        return [] if (tried == np.array(self.first[1:-1])).all(axis=1).any() else [self]

    def minimum(self, linear: LinearBound) -> tuple[float, Integers]:
        """Return the least bound of all cuts, and cuts that have it."""
        best, choices = np.zeros(1), []
        for stage, mask in enumerate(self.allowed):
            totals = np.where(mask, best, np.inf)
            choices.append(totals.argmin(axis=1))
            best = totals[np.arange(len(totals)), choices[-1]] + self._row(linear, stage)
        return float(best[0]) + linear.constant, self._backtrack(choices)

    def restrict_below(self, linear: LinearBound, limit: float) -> Self:
        """Return the space without stages that occur only in cuts whose bound is ``limit`` or more."""
        prefix_bounds = [np.zeros(1)]  # for each edge and position, the least sum of what comes before it
        for stage, mask in enumerate(self.allowed):
            prefix_bounds.append(np.where(mask, prefix_bounds[-1], np.inf).min(axis=1) + self._row(linear, stage))
        suffix_bounds = np.full(1, linear.constant)
        allowed = []
        for stage in reversed(range(len(self.allowed))):
            onward = suffix_bounds + self._row(linear, stage)
            allowed.append(self.allowed[stage] & (prefix_bounds[stage] + onward[:, None] < limit))
            suffix_bounds = np.where(self.allowed[stage], onward[:, None], np.inf).min(axis=0)
        return self._subspace(self.first, self.last, tuple(allowed[::-1]))._trimmed()

    def _subspace(self, first: tuple[int, ...], last: tuple[int, ...], allowed: tuple[Booleans, ...]) -> Self:
        return type(self)(first, last, allowed)

    def _backtrack(self, choices: Sequence[Integers]) -> Integers:
        """Follow the choices from the last stage: for each position of a stage's end, the best one of its begin."""
        cuts, at = [], 0
        for choice, first in zip(choices[:0:-1], self.first[-2:0:-1], strict=True):
            at = int(choice[at])
            cuts.append(first + at)
        return np.array(cuts[::-1], np.int64)

    def _row(self, linear: LinearBound, stage: int) -> Floats | float:
        """Return the linear bound's figures for the positions of the cut after a stage."""
        if stage == len(self.allowed) - 1:
            return 0.0
        row: Floats = linear.table[stage, self.first[stage + 1] : self.last[stage + 1] + 1]
        return row

    def _trimmed(self) -> Self:
        """Return the same cuts without positions at both ends of windows that no cuts use."""
        reached = [np.ones(1, bool)]
        for mask in self.allowed:
            reached.append(np.any(mask & reached[-1], axis=1))
        alive = [reached[-1]]
        for mask, reachable in zip(reversed(self.allowed), reached[-2::-1], strict=True):
            alive.append(np.any(mask & alive[-1][:, None], axis=0) & reachable)
        alive.reverse()
        if not all(edge.any() for edge in alive):
            return self._subspace((0,), (-1,), ())
        rims = [np.flatnonzero(edge)[[0, -1]] for edge in alive]
        allowed = tuple(
            (stage_mask & begin & end[:, None])[low_end : high_end + 1, low : high + 1]
            for stage_mask, (begin, end), ((low, high), (low_end, high_end)) in zip(
                self.allowed, pairwise(alive), pairwise(rims), strict=True
            )
        )
        first = tuple(start + int(low) for start, (low, _) in zip(self.first, rims, strict=True))
        last = tuple(start + int(high) for start, (_, high) in zip(self.first, rims, strict=True))
        return self._subspace(first, last, allowed)


class StageFigures:
    """The costs of all stages in a space of cuts: computed once, and looked up for parts of the space."""

    def __init__(self, costs: StageCosts, space: CutSpace) -> None:
        self._first = space.first
        self._figures = [costs(stage, *edges) for stage, edges in enumerate(pairwise(space.windows))]

    def __call__(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return the figures for positions in a row: (ends, begins)."""
        begin, end = int(begins[0]) - self._first[stage], int(ends[0]) - self._first[stage + 1]
        return self._figures[stage][end : end + len(ends), begin : begin + len(begins)]
