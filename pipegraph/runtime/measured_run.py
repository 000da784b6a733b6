"""What the steps of a run took, of all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipegraph.schedule import Kind

COMPUTING = Kind.F, Kind.I, Kind.W, Kind.B


@dataclass(frozen=True)
class MeasuredRun:
    """What a run took.

    Attributes:
        steps: how many of them the times are of: all but the first, which compiles.
        times: medians, in seconds, by stage and kind; empty after a single step.
        step: of a whole step, the median; None after a single one.
        bubble: the part of a step in which even its busiest rank computed nothing, the median over steps; None after a
            single one.
        state: bytes of each rank: parameters, buffers, gradients, and what the optimizer holds.
        saved: bytes of each rank that were kept for backwards, at the most; None where autograd keeps them.
        allocated: of each process with a GPU, the most bytes that torch had allocated on it; else empty.
        processes: that ran it: one for each rank, or one for all.
        kernels: that were run.
    """

    steps: int
    times: Mapping[tuple[int, Kind], float]
    step: float | None
    state: tuple[int, ...]
    saved: tuple[int | None, ...]
    allocated: tuple[int, ...]
    processes: int
    kernels: str
    bubble: float | None = None
