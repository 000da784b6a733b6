"""What given stages take, without a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.objectives.boundary_times import Crossings, Link, LinkOf
from pipegraph.planner.solver.objectives.makespan import Makespan
from pipegraph.planner.solver.objectives.memory_need import Memory
from pipegraph.planner.solver.prefix_sums import Sums
from pipegraph.planner.solver.search.incumbents import Pool
from pipegraph.planner.solver.search.local_search import climb
from pipegraph.schedule import Schedule, Times


def times_of(stages: Sequence[SegmentCost], schedule: Schedule, link: Link | LinkOf | None = None) -> Times:
    """Seconds of stages and boundaries, for `simulate`. Without a link crossing takes no time."""
    cuts = np.arange(1, len(stages))
    return Makespan(Sums(stages), schedule, Crossings.of(link, schedule.placement)).simulated(cuts)


def seconds_of(stages: Sequence[SegmentCost], schedule: Schedule, link: Link | LinkOf | None = None) -> float:
    """Of a step, as `simulate` has it."""
    cuts = np.arange(1, len(stages))
    return float(Makespan(Sums(stages), schedule, Crossings.of(link, schedule.placement)).values(cuts[None])[0])


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank needs.

    Attributes:
        state: parameters, their gradients, and what the optimizer holds of them; buffers and constants.
        saved: what is kept for backwards between two actions, when it is the most.
        buffers: to receive into.
    """

    state: int
    saved: int
    buffers: int


def memory_of(
    stages: Sequence[SegmentCost], schedule: Schedule, state_factor: float = 4.0, receives_ahead: int = 4
) -> tuple[int, ...]:
    """Bytes that each rank needs, as `solve` counts them."""
    parts = memory_parts_of(stages, schedule, state_factor, receives_ahead)
    return tuple(rank.state + rank.saved + rank.buffers for rank in parts)


def memory_parts_of(
    stages: Sequence[SegmentCost], schedule: Schedule, state_factor: float = 4.0, receives_ahead: int = 4
) -> tuple[RankMemory, ...]:
    """The same in its parts."""
    cuts = np.arange(1, len(stages))
    parts = Memory(Sums(stages), schedule, state_factor, receives_ahead).parts(cuts[None])
    ranks = zip(*(np.ceil(part[:, 0]).astype(int).tolist() for part in parts), strict=True)
    return tuple(RankMemory(*rank) for rank in ranks)


def improve(
    segments: Sequence[SegmentCost], cuts: Sequence[int], schedule: Schedule, link: Link | LinkOf | None = None
) -> tuple[int, ...]:
    """Cuts near these from which no small move makes a step shorter; memory is not looked at."""
    sums = Sums(segments)
    makespan = Makespan(sums, schedule, Crossings.of(link, schedule.placement))
    pool = Pool(makespan, lambda cuts: np.ones(len(cuts), bool), kept=1)
    found, _ = climb(pool, np.array(cuts, np.int64), sums.segments)
    return tuple(found.tolist())
