"""The time and the memory of a step with given stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipegraph.cost import SegmentCost
from pipegraph.planner.solver.objectives.makespan import Links, Makespan
from pipegraph.planner.solver.objectives.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import PrefixSums
from pipegraph.planner.solver.search.incumbents import Incumbents
from pipegraph.planner.solver.search.local_search import hill_climb
from pipegraph.schedule import Schedule, Times


def stage_times(stages: Sequence[SegmentCost], schedule: Schedule, link: Links | None = None) -> Times:
    """Return the times of stages and boundaries, for `simulate`. Without a link, boundaries take no time."""
    return Makespan(PrefixSums(stages), schedule, link).times_of(np.arange(1, len(stages)))


def step_seconds(stages: Sequence[SegmentCost], schedule: Schedule, link: Links | None = None) -> float:
    """Return the seconds of a step, as `simulate` computes them."""
    cuts = np.arange(1, len(stages))
    return float(Makespan(PrefixSums(stages), schedule, link).values(cuts[None])[0])


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank needs between actions.

    Attributes:
        state: parameters, their gradients and the optimizer's state; buffers and constants.
        saved: what is kept for backwards, at the moment of its peak.
        buffers: to receive into.
    """

    state: int
    saved: int
    buffers: int

    @property
    def total(self) -> int:
        return self.state + self.saved + self.buffers


def rank_memory(
    stages: Sequence[SegmentCost], schedule: Schedule, state_factor: float = 4.0, receives_ahead: int = 4
) -> tuple[RankMemory, ...]:
    """Return what each rank needs, as `solve` counts it."""
    cuts = np.arange(1, len(stages))
    parts = MemoryNeed(PrefixSums(stages), schedule, state_factor, receives_ahead).parts(cuts[None])
    ranks = zip(*(np.ceil(part[:, 0]).astype(int).tolist() for part in parts), strict=True)
    return tuple(RankMemory(*rank) for rank in ranks)


def improve_cuts(
    segments: Sequence[SegmentCost], cuts: Sequence[int], schedule: Schedule, link: Links | None = None
) -> tuple[int, ...]:
    """Return cuts near these from which no small move makes a step shorter, whatever memory they need."""
    makespan = Makespan(PrefixSums(segments), schedule, link)
    incumbents = Incumbents(makespan, lambda cuts: np.ones(len(cuts), bool), kept=1)
    improved, _ = hill_climb(incumbents, np.array(cuts, np.int64), len(segments))
    return tuple(improved.tolist())
