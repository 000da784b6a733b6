"""Branch and bound over where the cuts lie."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.bound import Relaxation, relax
from pipegraph.planner.solver.climb import climb, spaced
from pipegraph.planner.solver.pool import Pool
from pipegraph.planner.solver.space import Space
from pipegraph.planner.solver.sums import Integers, Piece


class _Part(NamedTuple):
    bound: float
    number: int
    """of two with one bound, the one made later, which is smaller, comes first"""
    space: Space
    pieces: Sequence[Piece]
    cuts: Integers


class Tree:
    """What is left of a space of cuts when the pool's best is known, in parts with a bound each.

    It begins with some cuts, and a ``bound`` that none of the space is below.
    """

    def __init__(self, pool: Pool, space: Space, start: Integers, bound: float) -> None:
        self._pool, self._segments = pool, space.last[-1]
        self._parts = [_Part(bound, 0, space, pool.objective.pieces(), start[None])]
        self._made = 0

    @property
    def bound(self) -> float:
        """No cuts have less; the value of the pool's best where that is proved."""
        least = self._parts[0].bound if self._parts else np.inf
        return self._pool.best if least >= self._pool.goal else least

    def grow(self, until: int) -> None:
        """Relax the part with the least bound, try the cuts that this gives, and divide what is left of the part in
        two; until nothing is left that can be better than the pool's best, or the pool has spent so much. The whole is
        relaxed in any case, and the middle of its relaxation is one more start for a climb."""
        pool, segments = self._pool, self._segments
        while self._parts and self._parts[0].bound < pool.goal and (pool.spent < until or not self._made):
            part = heapq.heappop(self._parts)
            relaxed = relax(pool, part.space, part.pieces, part.cuts, pool.goal)
            if not self._made:
                climb(pool, spaced(relaxed.middle, segments), segments)
            best = pool.best
            pool.add(relaxed.tried)
            if pool.best < best:
                climb(pool, pool.first, segments)
            if relaxed.bound < pool.goal:
                for half in _halves(part.space.below(relaxed.piece, pool.goal), relaxed):
                    self._add(half, max(part.bound, relaxed.bound), relaxed)
            self._made += 1

    def _add(self, space: Space, bound: float, relaxed: Relaxation) -> None:
        least, cheapest = space.cheapest(relaxed.piece)
        known = relaxed.cuts[space.holds(relaxed.cuts)]
        cuts = known if (known == cheapest).all(axis=1).any() else np.vstack([known, cheapest])
        self._made += 1
        heapq.heappush(self._parts, _Part(max(bound, least), -self._made, space, relaxed.pieces, cuts))


def _halves(space: Space, relaxed: Relaxation) -> list[Space]:
    """The space cut in two where the mixture of a relaxation is widest, in the middle of it."""
    mean = relaxed.mixture @ relaxed.cuts
    spread = relaxed.mixture @ (relaxed.cuts - mean) ** 2
    first, last = np.array(space.first[1:-1]), np.array(space.last[1:-1])
    if space.empty or not (last > first).any():
        return [] if space.empty or (relaxed.tried == first).all(axis=1).any() else [space]
    cut = int(np.where(last > first, spread, -1.0).argmax())
    at = int(np.clip(np.floor(mean[cut]), first[cut], last[cut] - 1))
    halves = space.between(cut + 1, space.first[cut + 1], at), space.between(cut + 1, at + 1, space.last[cut + 1])
    return [half for half in halves if not half.empty]
