"""Segments as running sums, so that what a stage costs is a difference of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipegraph.cost import SegmentCost

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Allowed = NDArray[np.bool_]

FORWARD, INPUT_GRAD, WEIGHT_GRAD, SAVED, WEIGHT_SAVED, HELD, TRAINED = QUANTITIES = range(7)
"""What adds up over the segments of a stage; ``HELD`` are the bytes of parameters, buffers and constants."""
TIMES = FORWARD, INPUT_GRAD, WEIGHT_GRAD


class Piece(NamedTuple):
    """A figure that is linear in what the stages cost: ``constant`` + Σ ``table[k, cuts[k]]`` over the cuts."""

    table: Floats
    """(cuts, positions)"""
    constant: float

    def at(self, cuts: Integers) -> Floats:
        """For cuts of shape (candidates, cuts), the figure of each candidate."""
        return self.constant + self.table[np.arange(cuts.shape[1]), cuts].sum(axis=1)


class Sums:
    """The costs of a chain of segments.

    A cut has the position p where it stands behind p segments, 1 … segments − 1. ``before[q, p]`` is quantity q of all
    segments before position p, and ``crossing[p]`` the bytes that cross there.
    """

    def __init__(self, costs: Sequence[SegmentCost]) -> None:
        figures = np.array([_quantities(cost) for cost in costs], np.float64).T
        self.segments = len(costs)
        self.before: Floats = np.pad(np.cumsum(figures, axis=1), ((0, 0), (1, 0)))
        self.crossing: Floats = np.array([0, *(cost.boundary_bytes for cost in costs[:-1]), 0], np.float64)

    def edges(self, cuts: Integers) -> Integers:
        """The cuts with the two ends of the chain: (candidates, stages + 1)."""
        ends = np.zeros((len(cuts), 1), np.int64)
        return np.concatenate([ends, cuts, ends + self.segments], axis=1)

    def stages(self, cuts: Integers) -> Floats:
        """Quantities by stage: (quantities, stages, candidates)."""
        return np.diff(self.before[:, self.edges(cuts)], axis=2).swapaxes(1, 2)

    def piece(self, weights: Floats, crossing: Floats, constant: float = 0.0) -> Piece:
        """Σ over quantities and stages of ``weights`` (quantities, stages) × what the stage has, plus Σ over cuts of
        ``crossing`` × the bytes there, plus a constant."""
        behind = weights.T @ self.before[: len(weights)]  # what a stage would have that reached up to each position
        table = behind[:-1] - behind[1:] + crossing[:, None] * self.crossing
        return Piece(table, constant + float(behind[-1, -1]))


def _quantities(cost: SegmentCost) -> tuple[float, ...]:
    """In the order of `QUANTITIES`."""
    return (
        cost.forward,
        cost.input_grad,
        cost.weight_grad,
        cost.saved_bytes,
        cost.saved_bytes if cost.weight_saved_bytes is None else cost.weight_saved_bytes,
        cost.parameter_bytes + cost.buffer_bytes,
        cost.parameter_bytes if cost.trained_bytes is None else cost.trained_bytes,
    )
