"""How long it takes to cross a boundary."""

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
"""(rank, other rank) → the link between them"""


@dataclass(frozen=True)
class BoundaryTimes:
    """How long it takes to cross each boundary: 0 if both stages are on one rank.

    Attributes:
        latency: (boundaries,) seconds.
        per_byte: (boundaries,) seconds per byte.
    """

    latency: Floats
    per_byte: Floats

    @classmethod
    def of(cls, link: Link | LinkOf | None, placement: Sequence[int]) -> BoundaryTimes:
        """Return the times of a chain of stages. Without a link they are 0. Raises PlanError for impossible figures."""
        figures = [_figures(link, rank, other) for rank, other in pairwise(placement)]
        latency, per_byte = np.array(figures, np.float64).reshape(-1, 2).T
        return cls(latency, per_byte)


def _figures(link: Link | LinkOf | None, rank: int, other: int) -> tuple[float, float]:
    if link is None or rank == other:
        return 0.0, 0.0
    one = link(rank, other) if callable(link) else link
    latency, bandwidth = one if isinstance(one, tuple) else (one.latency, one.bandwidth)
    if not (0 <= latency < math.inf and bandwidth > 0):
        raise PlanError(
            f"The link between ranks {rank} and {other} has a latency of {latency!r} and a bandwidth of {bandwidth!r}. "
            "A latency is in seconds, from 0 on; a bandwidth in bytes per second, above 0.\nTry: link=(1e-5, 25e9)."
        )
    return float(latency), 1 / bandwidth
