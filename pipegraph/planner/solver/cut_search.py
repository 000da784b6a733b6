"""The search for the candidates with the least value of an objective, and for the most even ones."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.cut_space import CutSpace, StageCosts, StageFigures
from pipegraph.planner.solver.linear_program import MatrixGame
from pipegraph.planner.solver.local_search import (
    EQUAL,
    Incumbents,
    Moves,
    hill_climb,
    iterated_local_search,
    without_empty_stages,
)
from pipegraph.planner.solver.makespan import Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import Objective
from pipegraph.planner.solver.prefix_sums import (
    TIMES,
    Booleans,
    Floats,
    Integers,
    LinearBound,
    PrefixSums,
    edges_of,
    split,
)

# ---- branch and bound ------------------------------------------------------------------------------------------------


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


# ---- search ----------------------------------------------------------------------------------------------------------


_FLOPS_SHARE = 1e-9  # how much evenness in operations counts, compared with evenness in weight

_ALL_STEPS = 10_000_000  # if valuing all cuts takes fewer steps, all are valued
_STEPS = 120_000_000  # of any other search with an effort of 1 and one option
_BRANCHED, _SEARCHED = 0.4, 0.7  # the parts of these steps after which branch and bound, then local search, stop
_RELAXED = 10  # times the effort that branch and bound may take for a relaxation of all; what is left is smaller


def equal_parts(sums: PrefixSums, stages: int, quantities: Sequence[int]) -> Integers:
    """Return the cuts nearest to equal parts of the sum of these quantities."""
    prefix_sums = sums.prefix_sums[list(quantities)].sum(axis=0)
    targets = prefix_sums[-1] * np.arange(1, stages) / stages
    return without_empty_stages(np.abs(prefix_sums - targets[:, None]).argmin(axis=1), sums.segments)


def most_even_cuts(costs: Sequence[SegmentCost], stages: int, largest: float) -> tuple[int, ...]:
    """Return the most even of all cuts of which no stage weighs more than ``largest``; there must be such cuts.

    The most even cuts have the least sum of squares of weights (a stage's F + I + W); of equal ones, of operations.
    """
    weights = [cost.forward + cost.input_grad + cost.weight_grad for cost in costs]
    weight, limit = _shares_before(weights), largest / (sum(weights) or 1.0) * (1 + EQUAL)
    work = _shares_before([float(cost.flops) for cost in costs])

    def is_light(stage: int, begins: Integers, ends: Integers) -> Booleans:
        allowed: Booleans = weight[ends][:, None] - weight[begins] <= limit
        return allowed

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        unevenness: Floats = (weight[ends][:, None] - weight[begins]) ** 2
        return unevenness + _FLOPS_SHARE * (work[ends][:, None] - work[begins]) ** 2

    return tuple(CutSpace.all_cuts(len(costs), stages).restrict(is_light).cheapest(squares, np.add)[1].tolist())


def _shares_before(figures: Sequence[float]) -> Floats:
    """Return the sum before each edge, as a part of the whole."""
    sums: Floats = np.concatenate([[0.0], np.cumsum(figures)])
    return sums / (sums[-1] or 1.0)


def search(
    incumbents: Incumbents,
    moves: Moves,
    space: CutSpace,
    starts: Iterable[Integers],
    effort: float,
    outer_bound: Callable[[float], float] = lambda enough: 0.0,
) -> float:
    """Find the best candidates of a space, and return a lower bound of their value.

    1. Climb from each start. Remove stages from the space that no better candidates have. Climb once more from the
       candidate whose largest stage is the smallest.
    2. If few candidates are left, value all. Otherwise bound them by branch and bound, look for better ones by local
       search, and continue with branch and bound. Where the effort is not enough for one relaxation, only local search
       is left.
    3. Of equally good candidates, prefer the most even one.

    ``outer_bound`` returns a value that no candidate goes below; it is not made tighter than its argument.
    """
    objective = incumbents.objective
    for start in starts:
        hill_climb(incumbents, moves, start)
    steps = int(effort * search_steps(moves.options))
    are_few = moves.count * objective.steps <= _ALL_STEPS
    if moves.options > 1 and moves.relaxation_steps > _RELAXED * steps and not are_few:
        bound = outer_bound(incumbents.target)
        if bound < incumbents.target:
            iterated_local_search(incumbents, moves, int(_SEARCHED * steps))
        return min(bound, incumbents.best_value)
    figures = StageFigures(objective.stage_bound, space)
    near = space.restrict(lambda *stage: figures(*stage) <= incumbents.best_value * (1 + EQUAL))
    subspace, bound = near.restrict(lambda *stage: figures(*stage) < incumbents.target), incumbents.best_value
    if not subspace.empty:
        bound, _ = subspace.without_options().cheapest(figures, np.maximum)
        hill_climb(incumbents, moves, _most_even(objective, figures, subspace, bound))
        subspace = subspace.restrict(lambda *stage: figures(*stage) < incumbents.target)
    if subspace.empty:
        bound = incumbents.best_value
    elif are_few:
        for batch in moves.all_candidates():
            incumbents.add(batch[space.contains(batch)])
        bound = incumbents.best_value
    else:
        tree = BranchAndBound(
            incumbents, subspace, incumbents.best_cuts, max(bound, outer_bound(incumbents.target)), moves
        )
        if tree.bound < incumbents.best_value:
            tree.run(int(_BRANCHED * steps))
        if tree.bound < incumbents.best_value:
            iterated_local_search(incumbents, moves, int(_SEARCHED * steps))
            tree.run(steps)
        bound = tree.bound
    incumbents.add(moves.near(incumbents.best_cuts))
    even = _most_even(objective, figures, near, _largest_stage(objective, incumbents.best_cuts, near))
    if incumbents.fit(even[None])[0] and incumbents.add(even[None])[0] <= incumbents.best_value * (1 + EQUAL):
        incumbents.prefer(even)
    return bound


def search_steps(options: int) -> int:
    """Return the steps of a search with an effort of 1: a few seconds, or about ten with several options."""
    return _STEPS * min(options, 2)


def _largest_stage(objective: Objective, candidate: Integers, space: CutSpace) -> float:
    """Return the largest bound of a single stage of a candidate (numbers,) of the space."""
    cuts, options = split(candidate[None], space.options)
    edges = edges_of(cuts, space.last[-1])[0]
    return max(
        float(objective.stage_bound(stage, edges[stage : stage + 1], edges[stage + 1 : stage + 2])[option, 0, 0])
        for stage, option in enumerate(options[0])
    )


def _most_even(objective: Objective, figures: StageFigures, space: CutSpace, largest: float) -> Integers:
    """Return the candidate with the least sum of squares of stages, among those whose largest stage is not larger."""
    limit = largest * (1 + EQUAL)

    def squares(stage: int, begins: Integers, ends: Integers) -> Floats:
        return objective.stage_bound(stage, begins, ends) ** 2

    return space.restrict(lambda *stage: figures(*stage) <= limit).cheapest(squares, np.add)[1]


# ---- start with options ----------------------------------------------------------------------------------------------
# The candidate that a search with several options begins with: even cuts, with the fastest options that ranks have room
# for.


_TRIED = 6  # limits of what a stage may need


def even_start(
    space: CutSpace,
    sums: PrefixSums,
    makespan: Makespan,
    seconds: StageCosts,
    memory: MemoryNeed,
    allowed: Booleans,
    placement: Sequence[int],
) -> Integers:
    """Return even cuts, with the fastest options that ranks have room for: a candidate that fits, if one was found.

    Even cuts are those of which the slowest stage is the fastest. They may leave a rank with stages that need much
    memory, and so with slow options or none. So stages that need more than a part of the memory are left out, of which
    several are tried.

    Args:
        space: the cuts, without options, of which each stage fits its rank with some option, if the rank holds nothing
            else.
        seconds: of a step at least, by what a stage is.
        allowed: the options that stages may have: (stages, options).
        placement: the rank of each stage.
    """
    bytes_needed = StageFigures(memory.stage_bound, space)
    most = [memory.limit]
    if memory.limits:
        fullest, _ = space.cheapest(bytes_needed, np.maximum)
        most = np.linspace(fullest * (1 + EQUAL), memory.limit, _TRIED).tolist()
    starts = []
    for limit in most:
        narrow = space.restrict(lambda *stage, limit=limit: bytes_needed(*stage) <= limit)
        cuts = narrow.cheapest(seconds, np.maximum)[1]
        starts.append(_fastest_options(cuts, sums, memory, allowed, np.array(placement)))
    candidates = np.unique(starts, axis=0)
    missing = (memory.values(candidates) - memory.limit).clip(min=0.0)
    best: Integers = candidates[np.lexsort((makespan.values(candidates), missing))[0]]
    return best


def _fastest_options(
    cuts: Integers, sums: PrefixSums, memory: MemoryNeed, allowed: Booleans, placement: Integers
) -> Integers:
    """Return these cuts with the options with which each rank computes for the shortest time, of those that fit into
    its memory; those that need the least on a rank where none fit.

    What a rank needs depends on its own stages alone, so all ranks try options at once. A rank's first stages have one
    option and the others another, since those that come first keep the most microbatches.
    """
    ranks, stages = memory.ranks, len(placement)
    passed: Counter[int] = Counter()
    place = np.zeros(stages, np.int64)  # among the stages of its rank
    for stage, rank in enumerate(placement.tolist()):
        place[stage] = passed[rank]
        passed[rank] += 1
    first, then, change = (
        grid.reshape(-1, 1) for grid in np.indices((sums.options, sums.options, max(passed.values())))
    )
    tried = np.unique(np.where(place <= change, first, then), axis=0)  # (candidates, stages)
    candidates = np.column_stack([np.tile(cuts, (len(tried), 1)), tried])
    holds = np.arange(ranks)[:, None] == placement
    seconds = holds @ sums.stages(candidates)[list(TIMES)].sum(axis=0)  # (ranks, candidates)
    required_bytes = memory.of_ranks(candidates)
    forbidden = holds @ ~allowed[np.arange(stages), tried].T
    seconds[forbidden | (required_bytes > np.array(memory.limits or [np.inf])[:, None])] = np.inf
    required_bytes[forbidden] = np.inf
    chosen = np.where(np.isfinite(seconds).any(axis=1), seconds.argmin(axis=1), required_bytes.argmin(axis=1))
    return np.append(cuts, tried[chosen[placement], np.arange(stages)])
