"""Which cuts are still in question, and the cheapest of them by a linear figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pipegraph.planner.solver.prefix_sums import Allowed, Floats, Integers, Piece

Stages = Callable[[int, Integers, Integers], Allowed]
"""Of (stage, begins, ends): whether the stage may be the segments begin … end − 1, by (ends, begins)."""
StageCosts = Callable[[int, Integers, Integers], Floats]
"""Likewise, what the stage costs then."""


@dataclass(frozen=True)
class Space:
    """Edge k, which for 0 < k < stages is a cut, lies in ``first[k]`` … ``last[k]``; the outer two are the ends of the
    chain. ``allowed`` says of each stage, by the positions of its (end, begin), whether it may lie so."""

    first: tuple[int, ...]
    last: tuple[int, ...]
    allowed: tuple[Allowed, ...]

    @classmethod
    def every(cls, segments: int, stages: int) -> Space:
        """All cuts, where each stage has a segment or more."""
        first = (*range(stages), segments)
        last = (0, *range(segments - stages + 1, segments + 1))
        ranges = [np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]
        return cls(first, last, tuple(end[:, None] > begin for begin, end in pairwise(ranges)))

    @property
    def windows(self) -> list[Integers]:
        return [np.arange(low, high + 1) for low, high in zip(self.first, self.last, strict=True)]

    @property
    def empty(self) -> bool:
        return any(low > high for low, high in zip(self.first, self.last, strict=True))

    def where(self, stages: Stages) -> Space:
        """The part in which every stage is allowed."""
        both = [
            kept & stages(stage, *edges)
            for stage, (kept, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True))
        ]
        return Space(self.first, self.last, tuple(both))._trimmed()

    def between(self, edge: int, first: int, last: int) -> Space:
        """The part in which one of the edges lies from ``first`` to ``last``."""
        kept = slice(first - self.first[edge], last + 1 - self.first[edge])
        allowed = list(self.allowed)
        allowed[edge - 1], allowed[edge] = allowed[edge - 1][kept], allowed[edge][:, kept]
        firsts, lasts = list(self.first), list(self.last)
        firsts[edge], lasts[edge] = first, last
        return Space(tuple(firsts), tuple(lasts), tuple(allowed))._trimmed()

    def holds(self, cuts: Integers) -> Allowed:
        """Of each of the cuts (candidates, cuts), whether it lies in the space."""
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.last[-1])))
        inside: Allowed = np.all((edges >= self.first) & (edges <= self.last), axis=1)
        at = np.where(inside[:, None], edges - self.first, 0)
        for stage, kept in enumerate(self.allowed):
            inside &= kept[at[:, stage + 1], at[:, stage]]
        return inside

    def best(self, costs: StageCosts, joined: np.ufunc) -> Integers:
        """The cuts whose stages cost the least in sum (``joined`` is np.add), or at most (np.maximum)."""
        best, ways = np.zeros(1), []
        for stage, (kept, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True)):
            found = np.where(kept, joined(costs(stage, *edges), best), np.inf)
            ways.append(found.argmin(axis=1))
            best = found.min(axis=1)
        return self._traced(ways)

    def cheapest(self, piece: Piece) -> tuple[float, Integers]:
        """The least figure of all cuts, and cuts that have it."""
        best, ways = np.zeros(1), []
        for stage, kept in enumerate(self.allowed):
            costs = np.where(kept, best, np.inf)
            ways.append(costs.argmin(axis=1))
            best = costs[np.arange(len(costs)), ways[-1]] + self._row(piece, stage)
        return float(best[0]) + piece.constant, self._traced(ways)

    def below(self, piece: Piece, limit: float) -> Space:
        """The part without stages that no cuts with a figure below the limit have."""
        until = [np.zeros(1)]  # of each edge and position, the least of all before it
        for stage, kept in enumerate(self.allowed):
            until.append(np.where(kept, until[-1], np.inf).min(axis=1) + self._row(piece, stage))
        onward = np.full(1, piece.constant)
        parts = []
        for stage in reversed(range(len(self.allowed))):
            behind = onward + self._row(piece, stage)
            parts.append(self.allowed[stage] & (until[stage] + behind[:, None] < limit))
            onward = np.where(self.allowed[stage], behind[:, None], np.inf).min(axis=0)
        return Space(self.first, self.last, tuple(parts[::-1]))._trimmed()

    def _traced(self, ways: Sequence[Integers]) -> Integers:
        """The cuts that lie where ``ways`` lead: of each stage and position of its end, the number of its begin's."""
        cuts, at = [], 0
        for way, first in zip(ways[:0:-1], self.first[-2:0:-1], strict=True):
            at = int(way[at])
            cuts.append(first + at)
        return np.array(cuts[::-1], np.int64)

    def _row(self, piece: Piece, stage: int) -> Floats | float:
        """Of the cut behind a stage, the figure by position."""
        if stage == len(self.allowed) - 1:
            return 0.0
        row: Floats = piece.table[stage, self.first[stage + 1] : self.last[stage + 1] + 1]
        return row

    def _trimmed(self) -> Space:
        """The same without positions at the rims of windows that belong to no whole cuts."""
        reached = [np.ones(1, bool)]
        for kept in self.allowed:
            reached.append(np.any(kept & reached[-1], axis=1))
        alive = [reached[-1]]
        for kept, before in zip(reversed(self.allowed), reached[-2::-1], strict=True):
            alive.append(np.any(kept & alive[-1][:, None], axis=0) & before)
        alive.reverse()
        if not all(edge.any() for edge in alive):
            return Space((0,), (-1,), ())
        rims = [np.flatnonzero(edge)[[0, -1]] for edge in alive]
        allowed = tuple(
            (kept & begin & end[:, None])[low_end : high_end + 1, low : high + 1]
            for kept, (begin, end), ((low, high), (low_end, high_end)) in zip(
                self.allowed, pairwise(alive), pairwise(rims), strict=True
            )
        )
        first = tuple(own + int(low) for own, (low, _) in zip(self.first, rims, strict=True))
        last = tuple(own + int(high) for own, (_, high) in zip(self.first, rims, strict=True))
        return Space(first, last, allowed)
