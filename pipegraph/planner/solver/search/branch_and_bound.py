"""Branch and bound over where the cuts lie: what no cuts of a space are below, and spaces that are divided in two.

The bound of a space is the value of a game between its cuts and the linear figures of an objective.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import Floats, Integers, Piece
from pipegraph.planner.solver.search.cut_space import Space
from pipegraph.planner.solver.search.incumbents import EQUAL, Pool
from pipegraph.planner.solver.search.local_search import climb, spaced
from pipegraph.planner.solver.search.matrix_game import Game

_PRECISION = 0.02  # of what the bound lies below its target
_ROUNDS = 500  # several times as many as are needed for 64 stages
_SHARE = 0.5  # of the latest mixtures in those that are answered


@dataclass(frozen=True)
class Relaxation:
    """What a relaxation of a space gives.

    Attributes:
        bound: no cuts of the space have less.
        piece: a mixture of linear figures, which shows the bound.
        pieces: those in the last mixture.
        cuts, mixture: the cuts (candidates, cuts) in the last mixture, and the share of each.
        tried: all cuts that came up.
    """

    bound: float
    piece: Piece
    pieces: tuple[Piece, ...]
    cuts: Integers
    mixture: Floats
    tried: Integers

    @property
    def middle(self) -> Integers:
        """The cuts nearest to the mean of the mixture."""
        middle: Integers = np.rint(self.mixture @ self.cuts).astype(np.int64)
        return middle


def relax(pool: Pool, space: Space, pieces: Sequence[Piece], cuts: Integers, target: float) -> Relaxation:
    """Bound the cuts of a space from below, with pieces and cuts that are known to begin with.

    An objective is the largest of many linear figures, so it is nowhere less than a mixture of some of them, whose
    least over all cuts dynamic programming finds. The best mixture is found as in a game (double oracle: McMahan,
    Gordon and Blum, 2003). Of the figures and cuts known, there are the best mixtures of both; for the mixture of cuts
    there is a figure that is largest, and for that of figures there are cuts for which it is least. Both are added,
    until they are no news, or the bound reaches ``target``. To take fewer rounds, what is answered are not the latest
    mixtures, but their means with the best so far (Wentges, 1997), as long as that gives news.

    The bound is then the optimum of cuts that may be mixed. How far cuts that may not lie above it depends on how large
    the segments are.
    """
    known = list(pieces)
    game = Game(np.array([piece.at(cuts) for piece in known]))
    of_pieces, of_cuts = game.mixtures()
    best, center, share = _mixed(known, of_pieces), of_cuts, 1.0
    bound, least = -np.inf, np.inf
    for _ in range(_ROUNDS):
        latest = _mixed(known, of_pieces)
        mixed = _between(best, latest, share)
        lowest, answer = space.cheapest(mixed)
        if lowest > bound:
            bound, best = lowest, mixed
        if bound >= target:
            break
        center = np.pad(center, (0, len(cuts) - len(center)))
        middle = (1 - share) * center + share * of_cuts
        piece = pool.largest(cuts, middle)
        if (highest := float(piece.at(cuts) @ middle)) < least:
            least, center = highest, middle
        if least <= bound + _PRECISION * (target - bound):
            break
        larger = piece.at(cuts) @ of_cuts > latest.at(cuts) @ of_cuts * (1 + EQUAL)
        if larger:
            known.append(piece)
            game.add_row(piece.at(cuts))
        other = not (answer == cuts).all(axis=1).any()
        if other:
            cuts = np.vstack([cuts, answer])
            game.add_column(np.concatenate([piece.at(answer[None]) for piece in known]))
        if not larger and not other and share == 1.0:
            break
        share = _SHARE if larger or other else 1.0
        of_pieces, of_cuts = game.mixtures()
    used, mixture = np.flatnonzero(of_pieces).tolist(), of_cuts[of_cuts > 0]
    return Relaxation(bound, best, tuple(known[one] for one in used), cuts[: len(of_cuts)][of_cuts > 0], mixture, cuts)


def _mixed(pieces: Sequence[Piece], mixture: Floats) -> Piece:
    used = [(pieces[number], mixture[number]) for number in np.flatnonzero(mixture).tolist()]
    table = np.sum([share * piece.table for piece, share in used], axis=0)
    return Piece(table, float(sum(share * piece.constant for piece, share in used)))


def _between(one: Piece, other: Piece, share: float) -> Piece:
    """The mean of two pieces, with this share of the other."""
    return Piece((1 - share) * one.table + share * other.table, (1 - share) * one.constant + share * other.constant)


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
