"""The costs of segments as running sums, so that what a stage costs is a difference of two of them.

A candidate is a row of numbers: the positions of the cuts and, if stages have several options to choose from, the
option of each stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipegraph.cost import SegmentCost
from pipegraph.schedule import Kind

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

(
    FORWARD, INPUT_GRAD, WEIGHT_GRAD, SAVED, WEIGHT_SAVED, BUFFERS, PARAMETERS, TRAINED, OPTIMIZER, OFFLOADED, ADDED,
) = QUANTITIES = range(11)  # fmt: skip
"""What adds up over the segments of a stage. ``BUFFERS`` is the bytes of buffers and constants, ``OPTIMIZER`` those of
the optimizer's state; ``SAVED`` those that stay on their rank from F to the backward, ``OFFLOADED`` those that do not;
``ADDED`` those of parameters whose gradients are made before they are added."""
TIMES = FORWARD, INPUT_GRAD, WEIGHT_GRAD
PARTS = {Kind.F: (FORWARD,), Kind.I: (INPUT_GRAD,), Kind.W: (WEIGHT_GRAD,), Kind.B: (INPUT_GRAD, WEIGHT_GRAD)}
"""kind of action → the quantities that its time is the sum of"""

_TABLE = 256  # positions of which the largest figures between any two are kept: two megabytes


class RangeMaxima:
    """The largest of figures in a row, from the largest of each 1, 2, 4, … of them."""

    def __init__(self, figures: Floats) -> None:
        """``figures`` are (options, rows, positions)."""
        levels, step = [figures], 1
        while 2 * step <= figures.shape[-1]:
            shifted_level = np.pad(levels[-1][..., step:], ((0, 0), (0, 0), (0, step)))
            levels.append(np.maximum(levels[-1], shifted_level))
            step *= 2
        # (levels, options, rows, positions); at level n the largest of the 2ⁿ figures from each position on.
        self._levels: Floats = np.stack(levels)

    def between(self, options: Integers, begins: Integers, ends: Integers) -> Floats:
        """Return the largest figures of options from ``begins`` to before ``ends``, which have one shape:
        (rows, *shape)."""
        level, last = _windows(begins, ends)
        sides = (self._levels[level, options, :, positions] for positions in (begins, last))
        figures: Floats = np.moveaxis(np.maximum(*sides), -1, 0)
        return figures

    def of_windows(self, begins: Integers, ends: Integers) -> Floats:
        """Return the largest figures from each of ``begins`` to before each of ``ends``, which are positions in a row:
        (options, rows, ends, begins)."""
        if self._levels.shape[-1] <= _TABLE:
            return self._table[:, :, ends[0] : ends[-1] + 1, begins[0] : begins[-1] + 1]
        begins, ends = np.broadcast_arrays(begins, ends[:, None])
        options = range(self._levels.shape[1])
        return np.stack([self.between(np.array(option), begins, ends) for option in options])

    @cached_property
    def _table(self) -> Floats:
        figures = self._levels[0]
        options, rows, positions = figures.shape
        table = np.zeros((options, rows, positions + 1, positions))
        for end in range(1, positions + 1):
            np.maximum(table[:, :, end - 1, :end], figures[:, :, end - 1 : end], out=table[:, :, end, :end])
        return table


def _windows(begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Return the level of `RangeMaxima` of which two windows cover a range, and where the second one begins."""
    length = np.maximum(ends - begins, 1)
    level = np.frexp(length)[1].astype(np.int64) - 1
    return level, np.maximum(ends - (1 << level), 0)


class PrefixSums:
    """The costs of a chain of segments, with each of the options that a stage may have.

    A cut at position p has p segments before it, 1 … segments − 1.

    Attributes:
        options: how many options there are.
        by_option: the sum over all segments before each position: (options, quantities, positions).
        prefix_sums: the same of the least that a segment has with any option: (quantities, positions).
        crossing: the bytes that cross at each position, the same with all options: (positions,).
        transient: the most of what F, I, W and B need while they run, over segments in a row, with each option.
        least_transient: the least that a segment needs with any option while F, I, W or B runs.
    """

    def __init__(self, *options: Sequence[SegmentCost]) -> None:
        """``options`` are the costs of the segments with each option."""
        figures = np.array([[quantities_of(cost) for cost in costs] for costs in options], np.float64).swapaxes(1, 2)
        self.options, self.segments = len(options), len(options[0])
        self.by_option = _sums_before(figures)
        self.prefix_sums = _sums_before(figures.min(axis=0))
        self.crossing: Floats = np.array([0, *(cost.boundary_bytes for cost in options[0][:-1]), 0], np.float64)
        transient = np.array([[cost.transient_bytes for cost in costs] for costs in options], np.float64)
        self.transient = RangeMaxima(transient.swapaxes(1, 2))
        self.least_transient: Floats = transient.min(axis=(0, 1))

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self.by_option[:, OFFLOADED, -1].any())

    def stages(self, candidates: Integers) -> Floats:
        """Return the quantities of the stages of candidates: (quantities, stages, candidates)."""
        cuts, options = split(candidates, self.options)
        edges = edges_of(cuts, self.segments)
        if self.options == 1:  # each edge is looked up once
            return np.diff(self.prefix_sums[:, edges], axis=2).swapaxes(1, 2)
        figures = self.by_option[options, :, edges[:, 1:]] - self.by_option[options, :, edges[:, :-1]]
        return np.moveaxis(figures, (0, 1, 2), (2, 1, 0))

    def crossing_at(self, candidates: Integers) -> Floats:
        """Return the bytes that cross at the cuts of candidates: (cuts, candidates)."""
        crossing: Floats = self.crossing[split(candidates, self.options)[0].T]
        return crossing

    def transient_at(self, candidates: Integers) -> Floats:
        """Return what the stages of candidates need while they run: (F I W B, stages, candidates)."""
        cuts, options = split(candidates, self.options)
        edges = edges_of(cuts, self.segments)
        return self.transient.between(options.T, edges[:, :-1].T, edges[:, 1:].T)


def split(candidates: Integers, options: int) -> tuple[Integers, Integers]:
    """Return the cuts (candidates, cuts) and the options of stages (candidates, stages) of candidates."""
    if options == 1:
        return candidates, np.zeros((len(candidates), candidates.shape[1] + 1), np.int64)
    cuts = candidates.shape[1] // 2
    return candidates[:, :cuts], candidates[:, cuts:]


def edges_of(cuts: Integers, segments: int) -> Integers:
    """Return where stages begin, and the last one ends: (candidates, cuts + 2), of cuts (candidates, cuts)."""
    edges = np.zeros((len(cuts), cuts.shape[1] + 2), np.int64)  # np.pad takes ten times as long
    edges[:, 1:-1], edges[:, -1] = cuts, segments
    return edges


def _sums_before(figures: Floats) -> Floats:
    """Return the sums of what comes before each position, along the last dimension."""
    return np.pad(np.cumsum(figures, axis=-1), [(0, 0)] * (figures.ndim - 1) + [(1, 0)])


@dataclass(frozen=True)
class LinearBound:
    """A lower bound of an objective that is linear in the costs of stages.

    Attributes:
        sums: the costs.
        weights: of the quantities of stages: (quantities, stages).
        crossing: of the bytes at cuts: (cuts,).
    """

    sums: PrefixSums
    weights: Floats
    crossing: Floats
    constant: float = 0.0

    def at(self, candidates: Integers) -> Floats:
        """Return the bound (candidates,) of candidates."""
        return self.values([self], candidates)[0]

    @staticmethod
    def values(bounds: Sequence[LinearBound], candidates: Integers) -> Floats:
        """Return several bounds of candidates: (bounds, candidates). What stages cost is looked up once for all."""
        sums = bounds[0].sums
        weights = np.array([bound.weights for bound in bounds])
        crossing = np.array([bound.crossing for bound in bounds])
        constants = np.array([bound.constant for bound in bounds])
        figures: Floats = np.tensordot(weights, sums.stages(candidates), 2) + crossing @ sums.crossing_at(candidates)
        return figures + constants[:, None]

    @staticmethod
    def mixture(bounds: Sequence[LinearBound], shares: Floats) -> LinearBound:
        """Return the sum of bounds, each times its share."""
        weights = np.tensordot(shares, np.array([bound.weights for bound in bounds]), 1)
        crossing = shares @ np.array([bound.crossing for bound in bounds])
        return LinearBound(bounds[0].sums, weights, crossing, float(shares @ [bound.constant for bound in bounds]))

    @cached_property
    def up_to(self) -> Floats:
        """What the segments before each position would add as each stage: (stages, options, positions)."""
        options, quantities, positions = self.sums.by_option.shape
        sums = self.sums.by_option.swapaxes(0, 1).reshape(quantities, options * positions)
        return np.stack([weights @ sums for weights in self.weights.T]).reshape(-1, options, positions)

    def cut_after(self, stage: int) -> Floats | float:
        """Return what a cut at each position after a stage adds: (positions,); 0 after the last stage."""
        return self.crossing[stage] * self.sums.crossing if stage < len(self.crossing) else 0.0


def quantities_of(cost: SegmentCost) -> tuple[float, ...]:
    """Return the figures of a segment in the order of `QUANTITIES`."""
    return (
        cost.forward,
        cost.input_grad,
        cost.weight_grad,
        cost.saved_bytes - cost.offloaded_bytes,
        cost.weight_saved,
        cost.buffer_bytes,
        cost.parameter_bytes,
        cost.trained,
        cost.optimizer,
        cost.offloaded_bytes,
        cost.added,
    )
