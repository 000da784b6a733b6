"""Branch and bound over the positions of cuts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.linear_program import MatrixGame
from pipegraph.planner.solver.local_search import EQUAL, Incumbents, Moves, hill_climb
from pipegraph.planner.solver.prefix_sums import Floats, Integers, LinearBound

_PRECISION = 0.02  # part of the distance from the bound to its target
_ROUNDS = 500  # several times as many as 64 stages need
_GAME_STEPS = 100_000  # as which solving a matrix game counts


@dataclass(frozen=True)
class Relaxation:
    """The result of `_relax`.

    Attributes:
        bound: no cuts of the space have a smaller value.
        linear: the mixture of linear bounds that shows it.
        linear_bounds: those in the last mixture.
        cuts, shares: the last mixture of cuts: (candidates, cuts) and (candidates,).
        tried: all cuts that came up: (candidates, cuts).
    """

    bound: float
    linear: LinearBound
    linear_bounds: tuple[LinearBound, ...]
    cuts: Integers
    shares: Floats
    tried: Integers

    @property
    def mean(self) -> Floats:
        """The mean position of each cut in the last mixture."""
        return self.shares @ self.cuts


def _relax(
    incumbents: Incumbents, space: CutSpace, linear_bounds: Sequence[LinearBound], cuts: Integers, target: float
) -> Relaxation:
    """Bound the values of the cuts of a space from below.

    An objective is the largest of many linear bounds, so it is at least any mixture of them, whose minimum over all
    cuts dynamic programming finds. The best mixture comes from a matrix game between linear bounds and cuts, to which
    both players add their best answer until there is no better one (double oracle: McMahan, Gordon and Blum, 2003). The
    bound is then the optimum over mixtures of cuts; how far single cuts are above it depends on the size of segments.

    Args:
        incumbents: what evaluates the objective.
        space: the cuts.
        linear_bounds, cuts: some to begin with; cuts (candidates, cuts).
        target: the bound that is enough.
    """
    pool = list(linear_bounds)
    game = MatrixGame(LinearBound.values(pool, cuts))  # (linear bounds, cuts)
    bound, mixed, least = -np.inf, pool[0], np.inf
    for _ in range(_ROUNDS):
        of_bounds, of_cuts = game.equilibrium()
        incumbents.spent += _GAME_STEPS + space.steps
        latest = _mixture(pool, of_bounds)
        lowest, answer = space.minimum(latest)
        if lowest > bound:
            bound, mixed = lowest, latest
        if bound >= target:
            break
        linear = incumbents.tightest_bound(cuts, of_cuts)
        figures = linear.at(cuts)
        least = min(least, float(figures @ of_cuts))
        if least <= bound + _PRECISION * (target - bound):
            break
        adds_bound = figures @ of_cuts > latest.at(cuts) @ of_cuts * (1 + EQUAL)
        adds_cuts = not (answer == cuts).all(axis=1).any()
        if adds_bound:
            pool.append(linear)
            game.add_row(figures)
        if adds_cuts:
            cuts = np.vstack([cuts, answer])
            game.add_column(LinearBound.values(pool, answer[None])[:, 0])
        if not adds_bound and not adds_cuts:
            break
    used = [pool[number] for number in np.flatnonzero(of_bounds)]
    mixture = np.flatnonzero(of_cuts)
    return Relaxation(bound, mixed, tuple(used), cuts[mixture], of_cuts[mixture], cuts)


def _mixture(bounds: Sequence[LinearBound], shares: Floats) -> LinearBound:
    """Return the mixture of the bounds that have a share."""
    used = np.flatnonzero(shares)
    return LinearBound.mixture([bounds[number] for number in used.tolist()], shares[used])


class _Branch(NamedTuple):
    """A part of the space that is left, with the linear bounds and cuts (candidates, cuts) to begin its relaxation."""

    bound: float
    number: int
    """negative, so that of equal bounds the latest branch comes first"""
    space: CutSpace
    linear_bounds: Sequence[LinearBound]
    cuts: Integers


class BranchAndBound:
    """Proves how much better than the incumbents the cuts of a space can be, and finds better ones on the way."""

    def __init__(
        self,
        incumbents: Incumbents,
        space: CutSpace,
        start: Integers,
        bound: float,
        moves: Moves,
    ) -> None:
        """Begin with some cuts of the space, and a lower bound of all. ``moves`` lead to better ones nearby."""
        self._incumbents, self._moves = incumbents, moves
        self._branches = [_Branch(bound, 0, space, incumbents.objective.initial_bounds(), start[None])]
        self._counter = 0

    @property
    def bound(self) -> float:
        """No cuts have a smaller value; the best value if that is proved."""
        least = self._branches[0].bound if self._branches else np.inf
        return self._incumbents.best_value if least >= self._incumbents.target else least

    def run(self, until: int) -> None:
        """Relax the branch with the least bound, try the cuts of the relaxation, and divide the branch in two.

        This continues until no branch can hold better cuts, or the steps are spent. The whole space is relaxed
        in any case, and a climb starts from the middle of its relaxation.
        """
        incumbents, moves = self._incumbents, self._moves
        while self._branches and self._branches[0].bound < incumbents.target:
            if self._counter and incumbents.spent >= until:
                break
            branch = heapq.heappop(self._branches)
            relaxed = _relax(incumbents, branch.space, branch.linear_bounds, branch.cuts, incumbents.target)
            if not self._counter:
                hill_climb(incumbents, moves, branch.space.nearest(relaxed.mean))
            best = incumbents.best_value
            incumbents.add(relaxed.tried)
            if incumbents.best_value < best:
                hill_climb(incumbents, moves, incumbents.best_cuts)
            if relaxed.bound < incumbents.target:
                for half in _halves(branch.space.restrict_below(relaxed.linear, incumbents.target), relaxed):
                    self._add(half, max(branch.bound, relaxed.bound), relaxed)
            self._counter += 1

    def _add(self, space: CutSpace, bound: float, relaxed: Relaxation) -> None:
        least, cheapest = space.minimum(relaxed.linear)
        candidates = relaxed.cuts[space.contains(relaxed.cuts)]
        cuts = candidates if (candidates == cheapest).all(axis=1).any() else np.vstack([candidates, cheapest])
        self._counter += 1
        heapq.heappush(self._branches, _Branch(max(bound, least), -self._counter, space, relaxed.linear_bounds, cuts))


def _halves(space: CutSpace, relaxed: Relaxation) -> list[CutSpace]:
    """Divide the space at the mean position of the cut that varies the most in the relaxation."""
    first, last = np.array(space.first[1:-1]), np.array(space.last[1:-1])
    mean = relaxed.mean
    spread = relaxed.shares @ (relaxed.cuts - mean) ** 2
    if space.empty:
        return []
    if not (last > first).any():
        return list(space.with_one_place(mean, spread, relaxed.tried))
    cut = int(np.where(last > first, spread[: len(first)], -1.0).argmax())
    at = int(np.clip(np.floor(mean[cut]), first[cut], last[cut] - 1))
    halves = (
        space.restrict_edge(cut + 1, space.first[cut + 1], at),
        space.restrict_edge(cut + 1, at + 1, space.last[cut + 1]),
    )
    return [half for half in halves if not half.empty]
