"""What crossing a boundary takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from pipegraph.errors import PlanError
from pipegraph.planner.solver.prefix_sums import Floats


class HasLatency(Protocol):
    """A link between two ranks, such as one of a hardware profile."""

    @property
    def latency(self) -> float:
        """Seconds."""
        ...

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        ...


Link = tuple[float, float] | HasLatency
"""(latency in seconds, bandwidth in bytes per second)"""
LinkOf = Callable[[int, int], Link]
"""Of (rank, other rank)."""


@dataclass(frozen=True)
class Crossings:
    """Of each boundary, what crossing it takes: seconds, and seconds per byte; 0 where both stages are on one rank."""

    latency: Floats
    per_byte: Floats

    @classmethod
    def of(cls, link: Link | LinkOf | None, placement: Sequence[int]) -> Crossings:
        """Without a link, crossing takes no time. Raises PlanError for figures that are none."""
        found = [_figures(link, rank, other) for rank, other in pairwise(placement)]
        latency, per_byte = np.array(found, np.float64).reshape(-1, 2).T
        return cls(latency, per_byte)


def _figures(link: Link | LinkOf | None, rank: int, other: int) -> tuple[float, float]:
    if link is None or rank == other:
        return 0.0, 0.0
    one = link(rank, other) if callable(link) else link
    latency, bandwidth = one if isinstance(one, tuple) else (one.latency, one.bandwidth)
    if not (0 <= latency < math.inf and bandwidth > 0):
        raise PlanError(
            f"A link has a latency in seconds from 0 on and a bandwidth in bytes per second above 0, and that between "
            f"the ranks {rank} and {other} has {latency!r} and {bandwidth!r}. Try: link=(1e-5, 25e9)."
        )
    return float(latency), 1 / bandwidth
