"""The candidates among which a search still has to choose, and the cheapest of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipegraph.planner.solver.local_search import without_empty_stages
from pipegraph.planner.solver.prefix_sums import Booleans, Floats, Integers, LinearBound, edges_of, split

StageFilter = Callable[[int, Integers, Integers], Booleans]
"""(stage, begins, ends) → whether the stage may be the segments begin … end − 1, with each option: (options, ends,
begins), or with any: (ends, begins)"""
StageCosts = Callable[[int, Integers, Integers], Floats]
"""(stage, begins, ends) → what the stage costs as the segments begin … end − 1, with each option: (options, ends,
begins)"""


@dataclass(frozen=True)
class CutSpace:
    """A set of cuts, with the options of stages.

    Edge 0 and edge ``stages`` are the ends of the chain, and the edges between them are cuts. Stage k lies between
    edges k and k + 1.

    Attributes:
        first, last: edge k has a position from ``first[k]`` to ``last[k]``.
        allowed: for each stage, whether it may have an option and lie between these positions: (options, positions of
            end, positions of begin).
    """

    first: tuple[int, ...]
    last: tuple[int, ...]
    allowed: tuple[Booleans, ...]

    @classmethod
    def all_cuts(cls, segments: int, stages: int, allowed: Booleans | None = None) -> CutSpace:
        """Return all cuts that leave each stage a segment or more, with the options that stages may have: (stages,
        options). By default there is one."""
        allowed = np.ones((stages, 1), bool) if allowed is None else allowed
        first = (*range(stages), segments)
        last = (0, *range(segments - stages + 1, segments + 1))
        ranges = [np.arange(low, high + 1) for low, high in zip(first, last, strict=True)]
        masks = (end[:, None] > begin for begin, end in pairwise(ranges))
        return cls(first, last, tuple(may[:, None, None] & mask for may, mask in zip(allowed, masks, strict=True)))

    @property
    def steps(self) -> int:
        """About how many steps `minimum` takes beyond what a call takes in any case: with one option, next to none."""
        return sum(mask.size for mask in self.allowed) if self.options > 1 else 0

    @property
    def options(self) -> int:
        """How many options there are."""
        return len(self.allowed[0]) if self.allowed else 0

    @property
    def windows(self) -> list[Integers]:
        return [np.arange(low, high + 1) for low, high in zip(self.first, self.last, strict=True)]

    @property
    def empty(self) -> bool:
        return any(low > high for low, high in zip(self.first, self.last, strict=True))

    def restrict(self, stage_filter: StageFilter) -> CutSpace:
        """Return the candidates of which the filter allows every stage."""
        masks = [
            mask & stage_filter(stage, *edges)
            for stage, (mask, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True))
        ]
        return replace(self, allowed=tuple(masks))._trimmed()

    def restrict_edge(self, edge: int, first: int, last: int) -> CutSpace:
        """Return the candidates of which this edge lies from ``first`` to ``last``."""
        positions = slice(first - self.first[edge], last + 1 - self.first[edge])
        allowed = list(self.allowed)
        allowed[edge - 1], allowed[edge] = allowed[edge - 1][:, positions], allowed[edge][..., positions]
        firsts, lasts = list(self.first), list(self.last)
        firsts[edge], lasts[edge] = first, last
        return CutSpace(tuple(firsts), tuple(lasts), tuple(allowed))._trimmed()

    def without_options(self) -> CutSpace:
        """Return the cuts alone: a stage may lie where it may with some option."""
        return replace(self, allowed=tuple(np.any(mask, axis=0, keepdims=True) for mask in self.allowed))

    def nearest(self, mean: Floats) -> Integers:
        """Return the cuts nearest to these numbers, of all of the chain, with options that stages have somewhere."""
        cuts = len(self.allowed) - 1
        places = without_empty_stages(np.rint(mean[:cuts]).astype(np.int64), self.last[-1])
        choices = [np.flatnonzero(mask.any(axis=(1, 2))) for mask in self.allowed]
        options = [
            choice[np.abs(choice - number).argmin()] for choice, number in zip(choices, mean[cuts:], strict=False)
        ]
        return np.array([*places, *options], np.int64)

    def contains(self, candidates: Integers) -> Booleans:
        """Return which candidates are in the space: (candidates,)."""
        cuts, options = split(candidates, self.options)
        edges = edges_of(cuts, self.last[-1])
        inside: Booleans = np.all((edges >= self.first) & (edges <= self.last), axis=1)
        at = np.where(inside[:, None], edges - self.first, 0)
        for stage, mask in enumerate(self.allowed):
            inside &= mask[options[:, stage], at[:, stage + 1], at[:, stage]]
        return inside

    def cheapest(self, costs: StageCosts, total: np.ufunc) -> tuple[float, Integers]:
        """Return the least sum (``total`` is np.add) or maximum (np.maximum) of the stages' costs, and a candidate with
        it.

        By dynamic programming over stages.
        """
        best, begins, options = np.zeros(1), [], []
        for stage, (mask, edges) in enumerate(zip(self.allowed, pairwise(self.windows), strict=True)):
            figures = np.where(mask, costs(stage, *edges), np.inf)
            totals = total(figures.min(axis=0), best)
            begin = totals.argmin(axis=1)
            ends = np.arange(len(begin))
            begins.append(begin)
            options.append(figures[:, ends, begin].argmin(axis=0))
            best = totals[ends, begin]
        return float(best[0]), self._backtrack(begins, options)

    def with_one_place(self, mean: Floats, spread: Floats, tried: Integers) -> Sequence[CutSpace]:
        """Return what is left of a space in which each cut has one place, divided by the option that varies the most in
        a relaxation.

        Args:
            mean, spread: of the relaxation's candidates: (numbers,).
            tried: candidates that were valued: (candidates, numbers).
        """
        cuts = len(self.allowed) - 1
        choices = [np.flatnonzero(mask) for mask in self.allowed]
        several = [len(options) > 1 for options in choices]
        if not any(several):
            only = [*self.first[1:-1], *(options[0] for options in choices if self.options > 1)]
            return [] if (tried == np.array(only)).all(axis=1).any() else [self]
        stage = int(np.where(several, spread[cuts:], -1.0).argmax())
        at = int(np.clip(np.floor(mean[cuts + stage]), choices[stage][0], choices[stage][-1] - 1))
        is_low = (np.arange(self.options) <= at)[:, None, None]
        halves = (self.allowed[stage] & is_low, self.allowed[stage] & ~is_low)
        return [
            replace(self, allowed=(*self.allowed[:stage], half, *self.allowed[stage + 1 :]))._trimmed()
            for half in halves
        ]

    def minimum(self, linear: LinearBound) -> tuple[float, Integers]:
        """Return the least bound of all candidates, and a candidate that has it."""
        best, begins, options = np.zeros(1), [], []
        for stage in range(len(self.allowed)):
            best, begin, option = self._extend(linear, stage, best)
            begins.append(begin)
            options.append(option)
        return float(best[0]) + linear.constant, self._backtrack(begins, options)

    def restrict_below(self, linear: LinearBound, limit: float) -> CutSpace:
        """Return the space without stages that occur only in candidates whose bound is ``limit`` or more."""
        prefix_bounds = [np.zeros(1)]  # for each edge and position, the least sum of what comes before it
        for stage in range(len(self.allowed)):
            prefix_bounds.append(self._extend(linear, stage, prefix_bounds[-1])[0])
        suffix_bounds, allowed = np.full(1, linear.constant), []
        for stage in reversed(range(len(self.allowed))):
            mask, (begins, ends) = self.allowed[stage], self._stage_parts(linear, stage)
            onward = suffix_bounds + ends
            allowed.append(mask & ((prefix_bounds[stage] + begins)[:, None] < (limit - onward)[..., None]))
            suffix_bounds = (np.where(mask, onward[..., None], np.inf).min(axis=1) + begins).min(axis=0)
        return replace(self, allowed=tuple(allowed[::-1]))._trimmed()

    def _extend(self, linear: LinearBound, stage: int, begin_bounds: Floats) -> tuple[Floats, Integers, Integers]:
        """Return the least bound of what comes before each end of a stage, where ``begin_bounds`` are those of each
        begin, and the position of the begin and the option that have it: (ends,)."""
        begins, ends = self._stage_parts(linear, stage)
        totals = np.where(self.allowed[stage], (begin_bounds + begins)[:, None], np.inf)
        begin = totals.argmin(axis=2)  # (options, ends)
        positions = np.arange(begin.shape[1])
        least = totals[np.arange(len(totals))[:, None], positions, begin] + ends
        option = least.argmin(axis=0)
        return least[option, positions], begin[option, positions], option

    def _stage_parts(self, linear: LinearBound, stage: int) -> tuple[Floats, Floats]:
        """Return what the begin and the end of a stage add to a bound: (options, begins) and (options, ends)."""
        begins, ends = (slice(self.first[edge], self.last[edge] + 1) for edge in (stage, stage + 1))
        up_to = linear.up_to[stage]
        return -up_to[:, begins], (up_to + linear.cut_after(stage))[:, ends]

    def _backtrack(self, begins: Sequence[Integers], options: Sequence[Integers]) -> Integers:
        """Follow the choices from the last stage: for each position of a stage's end, the best one of its begin, and
        the best option."""
        edges, chosen, at = list[int](), list[int](), 0
        for begin, option, first in zip(begins[::-1], options[::-1], self.first[-2::-1], strict=True):
            chosen.append(int(option[at]))
            at = int(begin[at])
            edges.append(first + at)
        return np.array([*edges[-2::-1], *(chosen[::-1] if self.options > 1 else ())], np.int64)

    def _trimmed(self) -> CutSpace:
        """Return the same candidates without positions at both ends of windows that none uses."""
        masks = [mask.any(axis=0) for mask in self.allowed]
        reached = [np.ones(1, bool)]
        for mask in masks:
            reached.append(np.any(mask & reached[-1], axis=1))
        alive = [reached[-1]]
        for mask, reachable in zip(reversed(masks), reached[-2::-1], strict=True):
            alive.append(np.any(mask & alive[-1][:, None], axis=0) & reachable)
        alive.reverse()
        if not all(edge.any() for edge in alive):
            return CutSpace((0,), (-1,), ())
        rims = [np.flatnonzero(edge)[[0, -1]] for edge in alive]
        allowed = tuple(
            (stage_mask & begin & end[:, None])[:, low_end : high_end + 1, low : high + 1]
            for stage_mask, (begin, end), ((low, high), (low_end, high_end)) in zip(
                self.allowed, pairwise(alive), pairwise(rims), strict=True
            )
        )
        first = tuple(start + int(low) for start, (low, _) in zip(self.first, rims, strict=True))
        last = tuple(start + int(high) for start, (_, high) in zip(self.first, rims, strict=True))
        return CutSpace(first, last, allowed)


class StageFigures:
    """The costs of all stages in a space, with the best option that it allows: computed once, and looked up for parts
    of the space."""

    def __init__(self, costs: StageCosts, space: CutSpace) -> None:
        self._first = space.first
        self._figures = [
            np.where(mask, costs(stage, *edges), np.inf).min(axis=0, keepdims=True)
            for stage, (mask, edges) in enumerate(zip(space.allowed, pairwise(space.windows), strict=True))
        ]

    def __call__(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return the figures for positions in a row: (1, ends, begins)."""
        begin, end = int(begins[0]) - self._first[stage], int(ends[0]) - self._first[stage + 1]
        return self._figures[stage][:, end : end + len(ends), begin : begin + len(begins)]
