"""Chains of which each stage has one of several options: the same segments, at other costs.

A candidate is a row of numbers: the positions of the cuts, then the option of each stage. Objectives take such rows in
the place of cuts: their sums are `OptionSums`, and their linear bounds `OptionBound`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.local_search import without_empty_stages
from pipegraph.planner.solver.makespan import Links, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import (
    QUANTITIES,
    TIMES,
    Booleans,
    Floats,
    Integers,
    LinearBound,
    PrefixSums,
    RangeMaxima,
    window,
)
from pipegraph.schedule import Schedule


class OptionSums(PrefixSums):
    """The costs of a chain, by option.

    Attributes:
        by_option: the sums of each option.
        prefix_sums: of each quantity the sum of the least that a segment has with any option: (quantities, positions).
        crossing: the bytes at each position, the same with all options.
    """

    def __init__(self, options: Sequence[Sequence[SegmentCost]], stages: int) -> None:
        self.by_option = tuple(PrefixSums(costs) for costs in options)
        self.segments, self.crossing, self._stages = self.by_option[0].segments, self.by_option[0].crossing, stages
        self._prefix_sums = np.stack([sums.prefix_sums for sums in self.by_option])  # (options, quantities, positions)
        self._transient = np.stack(
            [sums.transient.levels for sums in self.by_option]
        )  # (options, levels, kinds, segments)
        self.transient = RangeMaxima(self._transient[:, 0].min(axis=0))
        least = np.diff(self._prefix_sums, axis=2).min(axis=0)
        self.prefix_sums = np.pad(np.cumsum(least, axis=1), ((0, 0), (1, 0)))

    @property
    def options(self) -> int:
        """How many options there are."""
        return len(self.by_option)

    @property
    def offloads(self) -> bool:
        return any(sums.offloads for sums in self.by_option)

    def split(self, candidates: Integers) -> tuple[Integers, Integers]:
        """Return the cuts (candidates, cuts) and the options of stages (candidates, stages)."""
        return candidates[:, : self._stages - 1], candidates[:, self._stages - 1 :]

    def stages(self, cuts: Integers) -> Floats:
        places, options = self.split(cuts)
        edges = np.pad(places, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.segments)))
        figures = self._prefix_sums[options, :, edges[:, 1:]] - self._prefix_sums[options, :, edges[:, :-1]]
        return np.moveaxis(figures, (0, 1, 2), (2, 1, 0))

    def transient_at(self, cuts: Integers) -> Floats:
        places, options = self.split(cuts)
        edges = np.pad(places, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.segments)))
        begins, ends = edges[:, :-1].T, edges[:, 1:].T
        level, last = window(begins, ends)
        sides = (self._transient[options.T, level, :, positions] for positions in (begins, last))
        figures: Floats = np.moveaxis(np.maximum(*sides), -1, 0)
        return figures

    def crossing_at(self, cuts: Integers) -> Floats:
        crossing: Floats = self.crossing[self.split(cuts)[0].T]
        return crossing

    def linear_bound(self, weights: Floats, crossing: Floats, constant: float = 0.0) -> OptionBound:  # type: ignore[override]
        every = np.zeros((len(QUANTITIES), self._stages))
        every[: len(weights)] = weights
        return OptionBound(self, every, crossing, constant)

    def weighted(self, weights: Floats, begins: Integers, ends: Integers) -> Floats:
        """Return Σ ``weights`` × the quantities of a stage with each option: (options, ends, begins)."""
        sums = np.tensordot(self._prefix_sums, weights, (1, 0))  # (options, positions)
        figures: Floats = sums[:, ends][:, :, None] - sums[:, begins][:, None, :]
        return figures


@dataclass(frozen=True)
class OptionBound:
    """A lower bound that is linear in the costs of stages.

    Attributes:
        weights: of the quantities of stages: (quantities, stages).
        crossing: of the bytes at cuts: (cuts,).
    """

    sums: OptionSums
    weights: Floats
    crossing: Floats
    constant: float

    def at(self, cuts: Integers) -> Floats:
        """Return the bound (candidates,) of candidates."""
        of_stages = np.tensordot(self.weights, self.sums.stages(cuts), 2)
        figures: Floats = self.constant + of_stages + self.crossing @ self.sums.crossing_at(cuts)
        return figures

    @classmethod
    def largest(cls, bounds: Sequence[Self], cuts: Integers) -> Floats:
        """Return the largest of several bounds (candidates,) of candidates."""
        sums = bounds[0].sums
        weights = np.array([bound.weights for bound in bounds])
        crossing, constants = (
            np.array([getattr(bound, name) for bound in bounds]) for name in ("crossing", "constant")
        )
        of_stages = np.tensordot(weights, sums.stages(cuts), 2)  # what stages cost is looked up once for all bounds
        figures: Floats = (of_stages + crossing @ sums.crossing_at(cuts) + constants[:, None]).max(axis=0)
        return figures

    def times(self, factor: float) -> OptionBound:
        """Return ``factor`` × this."""
        return OptionBound(self.sums, factor * self.weights, factor * self.crossing, factor * self.constant)

    def plus(self, bound: OptionBound, factor: float, constant: float = 0.0) -> OptionBound:
        """Return this + ``factor`` × the other one + ``constant``."""
        return OptionBound(
            self.sums,
            self.weights + factor * bound.weights,
            self.crossing + factor * bound.crossing,
            self.constant + factor * bound.constant + constant,
        )

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return what a stage with each option, and the cut after it, add to the bound: (options, ends, begins)."""
        figures = self.sums.weighted(self.weights[:, stage], begins, ends)
        if stage < len(self.crossing):
            figures += (self.crossing[stage] * self.sums.crossing[ends])[:, None]
        return figures


class OptionFits:
    """Which options of which stages a rank has room for, if it holds nothing else."""

    def __init__(self, memories: Sequence[MemoryNeed], allowed: Booleans, space: CutSpace) -> None:
        """``memories`` are of the options, and ``allowed`` says which options stages may have: (stages, options)."""
        self._first, self.options = space.first, len(memories)
        self._fits = [
            np.array(
                [
                    memory.allows(stage, space.windows[stage], space.windows[stage + 1]) & may
                    for memory, may in zip(memories, allowed[stage], strict=True)
                ]
            )
            for stage in range(len(space.allowed))
        ]

    def restrict(self, stage: int, low: int, high: int) -> OptionFits:
        """Return the same with the options from ``low`` to ``high`` for a stage."""
        restricted = copy(self)
        restricted._fits = [*self._fits]
        chosen = np.arange(self.options)
        restricted._fits[stage] = self._fits[stage] & ((low <= chosen) & (chosen <= high))[:, None, None]
        return restricted

    def any(self, stage: int, begins: Integers, ends: Integers) -> Booleans:
        """Return for positions in a row whether any option of a stage fits: (ends, begins)."""
        return np.asarray(self.at(stage, begins, ends).any(axis=0))

    def at(self, stage: int, begins: Integers, ends: Integers) -> Booleans:
        """Return for positions in a row whether each option of a stage fits: (options, ends, begins)."""
        begin, end = int(begins[0]) - self._first[stage], int(ends[0]) - self._first[stage + 1]
        fits: Booleans = self._fits[stage][:, end : end + len(ends), begin : begin + len(begins)]
        return fits


@dataclass(frozen=True)
class OptionSpace(CutSpace):
    """Cuts, with all options of the stages that fit. Which are the best follows from a linear bound."""

    fits: OptionFits

    @property
    def steps(self) -> int:
        return self.fits.options * sum(mask.size for mask in self.allowed)

    def _subspace(self, first: tuple[int, ...], last: tuple[int, ...], allowed: tuple[Booleans, ...]) -> OptionSpace:
        return OptionSpace(first, last, allowed, self.fits)

    def nearest(self, mean: Floats) -> Integers:
        cuts = len(self.allowed) - 1
        places = without_empty_stages(np.rint(mean[:cuts]).astype(np.int64), self.last[-1])
        return np.append(places, np.rint(mean[cuts:]).astype(np.int64))

    def with_one_place(self, mean: Floats, spread: Floats, tried: Integers) -> Sequence[OptionSpace]:
        """Divide the space by the option that varies the most in the relaxation."""
        cuts = len(self.allowed) - 1
        choices = [np.flatnonzero(self.fits.at(stage, *self.windows[stage : stage + 2])) for stage in range(cuts + 1)]
        if any(not len(options) for options in choices):
            return []
        several = [len(options) > 1 for options in choices]
        if not any(several):
            only = [*self.first[1:-1], *(options[0] for options in choices)]
            return [] if (tried == np.array(only)).all(axis=1).any() else [self]
        stage = int(np.where(several, spread[cuts:], -1.0).argmax())
        at = int(np.clip(np.floor(mean[cuts + stage]), choices[stage][0], choices[stage][-1] - 1))
        sides = (self.fits.restrict(stage, 0, at), self.fits.restrict(stage, at + 1, self.fits.options - 1))
        return [OptionSpace(self.first, self.last, self.allowed, fits) for fits in sides]

    def contains(self, cuts: Integers) -> Booleans:
        number = len(self.allowed) - 1
        inside = super().contains(cuts[:, :number])
        edges = np.pad(cuts[:, :number], ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.last[-1])))
        for row in np.flatnonzero(inside):
            inside[row] = all(
                self.fits.at(stage, edges[row, stage : stage + 1], edges[row, stage + 1 : stage + 2])[option, 0, 0]
                for stage, option in enumerate(cuts[row, number:].tolist())
            )
        return inside

    def minimum(self, linear: LinearBound | OptionBound) -> tuple[float, Integers]:
        assert isinstance(linear, OptionBound)
        best, choices, options = np.zeros(1), [], []
        for stage in range(len(self.allowed)):
            figures, option = self._least(linear, stage)
            totals = figures + best
            choices.append(totals.argmin(axis=1))
            options.append(option)
            best = totals.min(axis=1)
        cuts = self._backtrack(choices)
        edges = np.concatenate([[0], cuts, [self.last[-1]]])
        best_options = [
            option[edges[stage + 1] - self.first[stage + 1], edges[stage] - self.first[stage]]
            for stage, option in enumerate(options)
        ]
        return float(best[0]) + linear.constant, np.append(cuts, np.array(best_options, np.int64))

    def restrict_below(self, linear: LinearBound | OptionBound, limit: float) -> OptionSpace:
        assert isinstance(linear, OptionBound)
        figures = [self._least(linear, stage)[0] for stage in range(len(self.allowed))]
        prefix_bounds = [np.zeros(1)]
        for stage_figures in figures:
            prefix_bounds.append((stage_figures + prefix_bounds[-1]).min(axis=1))
        suffix_bounds = np.full(1, linear.constant)
        allowed = []
        for stage in reversed(range(len(self.allowed))):
            onward = figures[stage] + suffix_bounds[:, None]
            allowed.append(self.allowed[stage] & (prefix_bounds[stage] + onward < limit))
            suffix_bounds = onward.min(axis=0)
        return self._subspace(self.first, self.last, tuple(allowed[::-1]))._trimmed()

    def _least(self, linear: OptionBound, stage: int) -> tuple[Floats, Integers]:
        """Return what a stage adds at least, infinite where not allowed, and with which option: (ends, begins)."""
        begins, ends = self.windows[stage : stage + 2]
        figures = np.where(self.fits.at(stage, begins, ends), linear.of_stage(stage, begins, ends), np.inf)
        least = np.where(self.allowed[stage], figures.min(axis=0), np.inf)
        return least, figures.argmin(axis=0)


class OptionMakespan(Makespan):
    """The makespan of candidates with options."""

    def __init__(
        self, sums: OptionSums, schedule: Schedule, link: Links | None, fits: Callable[[], OptionFits]
    ) -> None:
        """``fits`` is asked for bounds of stages alone: it takes long to find."""
        super().__init__(sums, schedule, link)
        self._options, self._fits = sums, fits

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Infinite for a stage that fits with no option."""
        least = np.full((len(ends), len(begins)), np.inf)
        for sums, fits in zip(self._options.by_option, self._fits().at(stage, begins, ends), strict=True):
            if fits.any():
                prefix_sums = sums.prefix_sums[: len(TIMES)]
                times = prefix_sums[:, ends][:, :, None] - prefix_sums[:, begins][:, None, :]
                np.minimum(least, np.where(fits, self.bound_with(times, stage, begins, ends), np.inf), out=least)
        return least
