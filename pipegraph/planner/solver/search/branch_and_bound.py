"""Branch and bound over the positions of cuts."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import Integers, LinearBound
from pipegraph.planner.solver.search.cut_space import CutSpace
from pipegraph.planner.solver.search.incumbents import Incumbents
from pipegraph.planner.solver.search.local_search import hill_climb, without_empty_stages
from pipegraph.planner.solver.search.relaxation import Relaxation, relax


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

    def __init__(self, incumbents: Incumbents, space: CutSpace, start: Integers, bound: float) -> None:
        """Begin with some cuts of the space, and a lower bound of all."""
        self._incumbents, self._segments = incumbents, space.last[-1]
        self._branches = [_Branch(bound, 0, space, incumbents.objective.initial_bounds(), start[None])]
        self._made = 0

    @property
    def bound(self) -> float:
        """No cuts have a smaller value; the best value if that is proved."""
        least = self._branches[0].bound if self._branches else np.inf
        return self._incumbents.best_value if least >= self._incumbents.target else least

    def run(self, until: int) -> None:
        """Relax the branch with the least bound, try the cuts of the relaxation, and divide the branch in two.

        This goes on until no branch can hold better cuts, or until so many steps are spent. The whole space is relaxed
        in any case, and a climb starts from the middle of its relaxation.
        """
        incumbents, segments = self._incumbents, self._segments
        while self._branches and self._branches[0].bound < incumbents.target:
            if self._made and incumbents.spent >= until:
                break
            branch = heapq.heappop(self._branches)
            relaxed = relax(incumbents, branch.space, branch.linear_bounds, branch.cuts, incumbents.target)
            if not self._made:
                middle = np.rint(relaxed.mean).astype(np.int64)
                hill_climb(incumbents, without_empty_stages(middle, segments), segments)
            best = incumbents.best_value
            incumbents.add(relaxed.tried)
            if incumbents.best_value < best:
                hill_climb(incumbents, incumbents.best_cuts, segments)
            if relaxed.bound < incumbents.target:
                for half in _halves(branch.space.restrict_below(relaxed.linear, incumbents.target), relaxed):
                    self._add(half, max(branch.bound, relaxed.bound), relaxed)
            self._made += 1

    def _add(self, space: CutSpace, bound: float, relaxed: Relaxation) -> None:
        least, cheapest = space.minimum(relaxed.linear)
        known = relaxed.cuts[space.contains(relaxed.cuts)]
        cuts = known if (known == cheapest).all(axis=1).any() else np.vstack([known, cheapest])
        self._made += 1
        heapq.heappush(self._branches, _Branch(max(bound, least), -self._made, space, relaxed.linear_bounds, cuts))


def _halves(space: CutSpace, relaxed: Relaxation) -> list[CutSpace]:
    """Divide the space at the mean position of the cut that varies the most in the relaxation."""
    mean = relaxed.mean
    spread = relaxed.shares @ (relaxed.cuts - mean) ** 2
    first, last = np.array(space.first[1:-1]), np.array(space.last[1:-1])
    if space.empty or not (last > first).any():
        return [] if space.empty or (relaxed.tried == first).all(axis=1).any() else [space]
    cut = int(np.where(last > first, spread, -1.0).argmax())
    at = int(np.clip(np.floor(mean[cut]), first[cut], last[cut] - 1))
    halves = (
        space.restrict_edge(cut + 1, space.first[cut + 1], at),
        space.restrict_edge(cut + 1, at + 1, space.last[cut + 1]),
    )
    return [half for half in halves if not half.empty]
