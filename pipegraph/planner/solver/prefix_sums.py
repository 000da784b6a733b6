"""The costs of segments as running sums, so that what a stage costs is a difference of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipegraph.cost import SegmentCost
from pipegraph.schedule import Kind

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]

FORWARD, INPUT_GRAD, WEIGHT_GRAD, SAVED, WEIGHT_SAVED, STATE, TRAINED, OFFLOADED, ADDED = QUANTITIES = range(9)
"""What adds up over the segments of a stage. ``STATE`` is the bytes of parameters, buffers and constants; ``SAVED``
those that stay on their rank from F to the backward, ``OFFLOADED`` those that do not; ``ADDED`` those of parameters
whose gradients are made before they are added."""
TIMES = FORWARD, INPUT_GRAD, WEIGHT_GRAD
PARTS = {Kind.F: (FORWARD,), Kind.I: (INPUT_GRAD,), Kind.W: (WEIGHT_GRAD,), Kind.B: (INPUT_GRAD, WEIGHT_GRAD)}
"""kind of action → the quantities that its time is the sum of"""

_TABLE = 256  # positions of which the largest figures between any two are kept: two megabytes


class LinearBound(NamedTuple):
    """A lower bound of an objective that is linear in the costs of stages: ``constant`` + Σ ``table[k, cuts[k]]``."""

    table: Floats
    """(cuts, positions)"""
    constant: float

    def at(self, cuts: Integers) -> Floats:
        """Return the bound (candidates,) of cuts (candidates, cuts)."""
        return self.constant + self.table[np.arange(cuts.shape[1]), cuts].sum(axis=1)

    @classmethod
    def largest(cls, bounds: Sequence[Self], cuts: Integers) -> Floats:
        """Return the largest of several bounds (candidates,) of cuts (candidates, cuts)."""
        figures: Floats = np.max([bound.at(cuts) for bound in bounds], axis=0)
        return figures

    def times(self, factor: float) -> LinearBound:
        """Return ``factor`` × this."""
        return LinearBound(factor * self.table, factor * self.constant)

    def plus(self, bound: LinearBound, factor: float, constant: float = 0.0) -> LinearBound:
        """Return this + ``factor`` × the other one + ``constant``."""
        return LinearBound(self.table + factor * bound.table, self.constant + factor * bound.constant + constant)


class RangeMaxima:
    """The largest of figures in a row, from the largest of each 1, 2, 4, … of them.

    Attributes:
        levels: (levels, rows, positions); at level n the largest of the 2ⁿ figures from each position on.
    """

    def __init__(self, figures: Floats) -> None:
        """``figures`` are (rows, positions)."""
        levels, step = [figures], 1
        while 2 * step <= figures.shape[1]:
            shifted_level = np.pad(levels[-1][:, step:], ((0, 0), (0, step)))
            levels.append(np.maximum(levels[-1], shifted_level))
            step *= 2
        self.levels: Floats = np.stack(levels)

    def between(self, begins: Integers, ends: Integers) -> Floats:
        """Return the largest figures from ``begins`` to before ``ends``, which have one shape: (rows, *shape)."""
        level, last = window(begins, ends)
        figures: Floats = np.moveaxis(np.maximum(self.levels[level, :, begins], self.levels[level, :, last]), -1, 0)
        return figures

    def of_windows(self, begins: Integers, ends: Integers) -> Floats:
        """Return the largest figures from each of ``begins`` to before each of ``ends``: (rows, ends, begins). Both are
        positions in a row."""
        if self.levels.shape[2] > _TABLE:
            return self.between(*np.broadcast_arrays(begins, ends[:, None]))
        return self._table[:, ends[0] : ends[-1] + 1, begins[0] : begins[-1] + 1]

    @cached_property
    def _table(self) -> Floats:
        figures, positions = self.levels[0], self.levels.shape[2]
        table = np.zeros((len(figures), positions + 1, positions))
        for end in range(1, positions + 1):
            np.maximum(table[:, end - 1, :end], figures[:, end - 1 : end], out=table[:, end, :end])
        return table


def window(begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """Return the level of `RangeMaxima` of which two windows cover a range, and where the second one begins."""
    length = np.maximum(ends - begins, 1)
    level = np.frexp(length)[1].astype(np.int64) - 1
    return level, np.maximum(ends - (1 << level), 0)


class PrefixSums:
    """The costs of a chain of segments.

    A cut at position p has p segments before it, 1 … segments − 1.

    Attributes:
        prefix_sums: (quantities, positions), the sum over all segments before each position.
        crossing: (positions,), the bytes that cross there.
        transient: the most of what F, I, W and B need while they run, over segments in a row.
    """

    def __init__(self, costs: Sequence[SegmentCost]) -> None:
        figures = np.array([quantities_of(cost) for cost in costs], np.float64).T
        self.segments = len(costs)
        self.prefix_sums: Floats = np.pad(np.cumsum(figures, axis=1), ((0, 0), (1, 0)))
        self.crossing: Floats = np.array([0, *(cost.boundary_bytes for cost in costs[:-1]), 0], np.float64)
        self.transient = RangeMaxima(np.array([cost.transient_bytes for cost in costs], np.float64).T)

    @property
    def offloads(self) -> bool:
        """Whether anything is offloaded."""
        return bool(self.prefix_sums[OFFLOADED, -1])

    def seconds(self, begin: int, end: int) -> float:
        """Return what the segments begin … end − 1 take for one microbatch."""
        return float((self.prefix_sums[list(TIMES), end] - self.prefix_sums[list(TIMES), begin]).sum())

    def stages(self, cuts: Integers) -> Floats:
        """Return the quantities of the stages that cuts (candidates, cuts) make: (quantities, stages, candidates)."""
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.segments)))
        return np.diff(self.prefix_sums[:, edges], axis=2).swapaxes(1, 2)

    def crossing_at(self, cuts: Integers) -> Floats:
        """Return the bytes that cross at cuts (candidates, cuts): (cuts, candidates)."""
        crossing: Floats = self.crossing[cuts.T]
        return crossing

    def transient_at(self, cuts: Integers) -> Floats:
        """Return what stages need while they run, of cuts (candidates, cuts): (F I W B, stages, candidates)."""
        edges = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, self.segments)))
        return self.transient.between(edges[:, :-1].T, edges[:, 1:].T)

    def linear_bound(self, weights: Floats, crossing: Floats, constant: float = 0.0) -> LinearBound:
        """Return Σ ``weights`` × the quantities of stages + Σ ``crossing`` × the bytes at cuts + ``constant``.

        Args:
            weights: (quantities, stages)
            crossing: (cuts,)
        """
        up_to = weights.T @ self.prefix_sums[: len(weights)]  # (stages, positions): for segments before each position
        table = up_to[:-1] - up_to[1:] + crossing[:, None] * self.crossing
        return LinearBound(table, constant + float(up_to[-1, -1]))


def quantities_of(cost: SegmentCost) -> tuple[float, ...]:
    """Return the figures of a segment in the order of `QUANTITIES`."""
    return (
        cost.forward,
        cost.input_grad,
        cost.weight_grad,
        cost.saved_bytes - cost.offloaded_bytes,
        cost.weight_saved,
        cost.parameter_bytes + cost.buffer_bytes,
        cost.trained,
        cost.offloaded_bytes,
        cost.added,
    )
