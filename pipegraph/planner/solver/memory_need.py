"""The memory that each rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import (
    HELD,
    OFFLOADED,
    QUANTITIES,
    SAVED,
    TRAINED,
    WEIGHT_SAVED,
    Booleans,
    Floats,
    Integers,
    LinearBound,
    PrefixSums,
)
from pipegraph.schedule import Schedule, lower, receive_buffers
from pipegraph.schedule.absences import absences
from pipegraph.schedule.action_arrays import B, F, I, W


class MemoryParts(NamedTuple):
    """Bytes: (ranks, candidates) each.

    Attributes:
        state: parameters, their gradients and the optimizer's state; buffers and constants.
        saved: what is kept for backwards, at the moment of its peak.
        buffers: to receive into.
    """

    state: Floats
    saved: Floats
    buffers: Floats


class MemoryNeed:
    """An objective: bytes of the rank that needs the most.

    If ranks have different limits, each counts as if it had the largest limit and needed the difference in addition.

    A rank holds

    - its state: parameters that have a gradient ``state_factor`` times, everything else once; without a backward, all
      once;
    - what its stages keep between two actions: what F saved until I or B ends, and what W reads from the end of I to
      the end of W. The first stage's I has nothing to do, so all that F saved stays until W, with the gradient that
      arrived. What is offloaded counts while it is here (`pipegraph.schedule.absences`). What an action needs only
      while it runs is not counted;
    - receive buffers. A received value that a stage saves counts as saved. Its buffer counts from when its receive is
      posted, ``receives_ahead`` receives before the schedule reaches it, to the action that reads it.
    """

    def __init__(
        self,
        sums: PrefixSums,
        schedule: Schedule,
        state_factor: float,
        receives_ahead: int,
        limits: Sequence[float] = (),
    ) -> None:
        self.stages, self.ranks, self.limits = schedule.stages, schedule.ranks, tuple(limits)
        self.limit = max(limits, default=np.inf)
        self._spare = self.limit - np.array(limits) if limits else np.zeros(self.ranks)
        self._sums, self._placement = sums, np.array(schedule.placement)
        self._factor = state_factor if schedule.trains else 1.0
        self._holds = np.arange(self.ranks)[:, None] == self._placement  # (ranks, stages)
        moments = _moments(schedule, sums.offloads)
        microbatches = np.concatenate(moments)  # (moments of all ranks, …)
        ends = np.arange(1, 4) * self.stages
        self._saved, self._weights, self._here, self._gradients = np.split(microbatches, ends, axis=1)
        counts = [len(rows) for rows in moments]
        self._rank, self._first = np.repeat(np.arange(self.ranks), counts), np.cumsum([0, *counts[:-1]])
        self._buffers = _receive_buffers(schedule, receives_ahead)

    @property
    def steps(self) -> int:
        return len(self._saved)

    def parts(self, cuts: Integers) -> MemoryParts:
        """Return what cuts (candidates, cuts) need, in its parts."""
        stages, crossing = self._sums.stages(cuts), self._sums.crossing_at(cuts)
        return MemoryParts(
            self._state(stages),
            np.maximum.reduceat(self._kept(stages, crossing), self._first),
            self._buffers @ crossing,
        )

    def of_ranks(self, cuts: Integers) -> Floats:
        """Return what each rank needs: (ranks, candidates)."""
        state, saved, buffers = self.parts(cuts)
        return state + saved + buffers

    def fullest(self, cuts: Integers) -> int:
        """Return the rank that exceeds its limit the most, or comes closest to it, for cuts (cuts,)."""
        return int((self.of_ranks(cuts[None])[:, 0] + self._spare).argmax())

    def fits(self, cuts: Integers) -> Booleans:
        """Return for cuts (candidates, cuts) whether every rank has enough memory: (candidates,)."""
        return self.values(cuts) <= self.limit

    def values(self, cuts: Integers) -> Floats:
        values: Floats = (self.of_ranks(cuts) + self._spare[:, None]).max(axis=0)
        return values

    def initial_bounds(self) -> list[LinearBound]:
        return [self._linear_bound(moment) for moment in self._first.tolist()]

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        stages, crossing = self._sums.stages(cuts) @ mixture, self._sums.crossing_at(cuts) @ mixture
        of_rank = self._state(stages) + self._buffers @ crossing + self._spare
        return self._linear_bound(int((self._kept(stages, crossing) + of_rank[self._rank]).argmax()))

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        rank, before, crossing = self._placement[stage], self._sums.before, self._sums.crossing
        state = before[HELD] + (self._factor - 1) * before[TRAINED]
        rest: Floats = state[ends][:, None] - state[begins] + self._spare[rank]
        if stage > 0:
            rest += self._buffers[rank, stage - 1] * crossing[begins]
        if stage < self.stages - 1:
            rest += (self._buffers[rank, stage] * crossing[ends])[:, None]
        kept = np.zeros_like(rest)
        for saved, weights, here, gradients in self._moments_of(stage):
            figures = saved * before[SAVED] + weights * before[WEIGHT_SAVED] + here * before[OFFLOADED]
            np.maximum(kept, (figures + gradients * crossing)[ends][:, None] - figures[begins], out=kept)
        return rest + kept

    def allows(self, stage: int, begins: Integers, ends: Integers) -> Booleans:
        """Return whether a rank has room for the stage alone as the segments begin … end − 1: (ends, begins)."""
        return self.stage_bound(stage, begins, ends) <= self.limit

    def _state(self, stages: Floats) -> Floats:
        """Return the bytes of state (ranks, …) of stages (quantities, stages, …)."""
        figures: Floats = self._holds @ (stages[HELD] + (self._factor - 1) * stages[TRAINED])
        return figures

    def _kept(self, stages: Floats, crossing: Floats) -> Floats:
        """Return the bytes kept at each moment (moments, …) by stages (quantities, stages, …)."""
        kept = self._saved @ stages[SAVED] + self._weights @ stages[WEIGHT_SAVED]
        if self._sums.offloads:
            kept += self._here @ stages[OFFLOADED]
        figures: Floats = kept + self._gradients @ crossing
        return figures

    def _moments_of(self, stage: int) -> Floats:
        """Return how often a stage keeps what F saved, what W reads, what is offloaded and what crosses after it:
        (moments, 4)."""
        gradients = self._gradients[:, stage] if stage < self.stages - 1 else np.zeros(self.steps)
        return _not_dominated(
            np.unique(
                np.stack([self._saved[:, stage], self._weights[:, stage], self._here[:, stage], gradients], 1), axis=0
            )
        )

    def _linear_bound(self, moment: int) -> LinearBound:
        rank = self._rank[moment]
        weights = np.zeros((len(QUANTITIES), self.stages))
        weights[SAVED], weights[WEIGHT_SAVED] = self._saved[moment], self._weights[moment]
        weights[OFFLOADED] = self._here[moment]
        weights[HELD], weights[TRAINED] = self._holds[rank], (self._factor - 1) * self._holds[rank]
        return self._sums.linear_bound(weights, self._buffers[rank] + self._gradients[moment], float(self._spare[rank]))


@lru_cache(maxsize=32)
def _receive_buffers(schedule: Schedule, receives_ahead: int) -> Floats:
    """Return the number of receive buffers of each rank for each boundary: (ranks, boundaries)."""
    counts = np.zeros((schedule.ranks, schedule.stages - 1))
    for (sender, receiver), count in receive_buffers(lower(schedule), receives_ahead, saved=False).items():
        counts[schedule.placement[receiver], min(sender, receiver)] += count
    return counts


@lru_cache(maxsize=32)
def _moments(schedule: Schedule, offloads: bool) -> list[Floats]:
    """Return for each rank how many microbatches are kept between two actions: (moments, 3 · stages + boundaries).

    The columns are: what F saved, per stage; what W reads, per stage; of what F saved, what is here if it is offloaded,
    per stage; a gradient that arrived over each boundary. Only moments are listed at which no other moment keeps as
    many in every column. Unless something ``offloads``, the third is 0.
    """
    arrays = schedule.arrays
    rows = []
    for (first, last), actions in zip(pairwise(arrays.bounds), schedule.actions, strict=True):
        kind, stage = arrays.kind[first:last, None], arrays.stage[first:last, None] == np.arange(schedule.stages)
        forwards, divided, done = (np.cumsum(np.isin(kind, kinds) & stage, axis=0) for kinds in ((F,), (I, B), (B, W)))
        if not schedule.trains:
            forwards = np.zeros_like(forwards)
        saved, weights = forwards - divided, divided - done
        gradients = np.zeros((len(kind), schedule.stages - 1), np.int64)
        gradients[:, :1] = weights[:, :1]
        saved[:, 0] += weights[:, 0]
        weights[:, 0] = 0
        here = saved.copy() if offloads else np.zeros_like(saved)
        for each in absences(actions) if offloads else ():
            here[each.left : each.back, each.stage] -= 1
        rows.append(_not_dominated(np.unique(np.concatenate([saved, weights, here, gradients], axis=1), axis=0)))
    return rows


def _not_dominated(rows: Integers) -> Floats:
    """Return the rows that no other row reaches in every column. No row may occur twice."""
    kept: list[Integers] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.float64)
