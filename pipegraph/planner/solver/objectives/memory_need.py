"""The memory that each rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import (
    HELD,
    QUANTITIES,
    SAVED,
    TRAINED,
    WEIGHT_SAVED,
    Allowed,
    Floats,
    Integers,
    Piece,
    Sums,
)
from pipegraph.planner.solver.stage_schedule import once_for_each
from pipegraph.schedule import Schedule, lower, receive_buffers
from pipegraph.schedule.action_arrays import B, F, I, W


class Parts(NamedTuple):
    """Bytes, by (ranks, candidates)."""

    state: Floats
    """parameters, their gradients, and what the optimizer holds of them; buffers and constants"""
    saved: Floats
    """what is kept for backwards, at the moment when it is the most"""
    buffers: Floats
    """to receive into"""


class Memory:
    """Bytes of the rank that needs the most; where the ranks have different ``limits``, as if each had the largest one
    and needed so much more.

    A rank holds its parameters that have a gradient ``state_factor`` times, and everything else once, as without a
    backward it does all; what its stages keep, as the schedule goes; and the buffers that it receives into. Between two
    actions, a stage keeps what F saved, until its I or B has run, and what W reads, from the end of I to that of W. The
    first stage's I has nothing to do: all that F saved stays until W, with the gradient that came. What an action needs
    for itself while it runs is not counted.

    A received value that a stage saves counts as saved: its buffer counts from when its receive is posted,
    ``receives_ahead`` receives before the schedule reaches it, to the action that reads it.
    """

    def __init__(
        self,
        sums: Sums,
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
        moments = _moments(schedule)
        held = np.concatenate(moments)  # (moments of all ranks, …)
        self._saved, self._weights, self._gradients = np.split(held, [self.stages, 2 * self.stages], axis=1)
        counts = [len(rows) for rows in moments]
        self._rank, self._first = np.repeat(np.arange(self.ranks), counts), np.cumsum([0, *counts[:-1]])
        self._buffers = _buffers(schedule, receives_ahead)

    @property
    def size(self) -> int:
        return len(self._saved)

    def parts(self, cuts: Integers) -> Parts:
        """What cuts (candidates, cuts) need."""
        stages, crossing = self._sums.stages(cuts), self._sums.crossing[cuts.T]
        return Parts(
            self._state(stages),
            np.maximum.reduceat(self._kept(stages, crossing), self._first),
            self._buffers @ crossing,
        )

    def of_ranks(self, cuts: Integers) -> Floats:
        """(ranks, candidates)"""
        state, saved, buffers = self.parts(cuts)
        return state + saved + buffers

    def fullest(self, cuts: Integers) -> int:
        """The rank that needs the most, compared with what it has, for one candidate (cuts)."""
        return int((self.of_ranks(cuts[None])[:, 0] + self._spare).argmax())

    def fits(self, cuts: Integers) -> Allowed:
        """Of each of the cuts (candidates, cuts), whether every rank has room."""
        return self.values(cuts) <= self.limit

    def values(self, cuts: Integers) -> Floats:
        values: Floats = (self.of_ranks(cuts) + self._spare[:, None]).max(axis=0)
        return values

    def pieces(self) -> list[Piece]:
        return [self._piece(moment) for moment in self._first.tolist()]

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        stages, crossing = self._sums.stages(cuts) @ mixture, self._sums.crossing[cuts.T] @ mixture
        of_rank = self._state(stages) + self._buffers @ crossing + self._spare
        return self._piece(int((self._kept(stages, crossing) + of_rank[self._rank]).argmax()))

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        rank, before, crossing = self._placement[stage], self._sums.before, self._sums.crossing
        state = before[HELD] + (self._factor - 1) * before[TRAINED]
        rest: Floats = state[ends][:, None] - state[begins] + self._spare[rank]
        if stage > 0:
            rest += self._buffers[rank, stage - 1] * crossing[begins]
        if stage < self.stages - 1:
            rest += (self._buffers[rank, stage] * crossing[ends])[:, None]
        kept = np.zeros_like(rest)
        for saved, weights, gradients in self._moments_of(stage):
            figures = saved * before[SAVED] + weights * before[WEIGHT_SAVED]
            np.maximum(kept, (figures + gradients * crossing)[ends][:, None] - figures[begins], out=kept)
        return rest + kept

    def allows(self, stage: int, begins: Integers, ends: Integers) -> Allowed:
        """Whether the stage by itself has room, if it is the segments begin … end − 1, by (ends, begins)."""
        return self.of_stage(stage, begins, ends) <= self.limit

    def _state(self, stages: Floats) -> Floats:
        """(ranks, …), of quantities (quantities, stages, …)"""
        figures: Floats = self._holds @ (stages[HELD] + (self._factor - 1) * stages[TRAINED])
        return figures

    def _kept(self, stages: Floats, crossing: Floats) -> Floats:
        """(moments, …)"""
        kept = self._saved @ stages[SAVED] + self._weights @ stages[WEIGHT_SAVED]
        figures: Floats = kept + self._gradients @ crossing
        return figures

    def _moments_of(self, stage: int) -> Floats:
        """What one stage keeps, (moments, 3): how often saved_bytes, what W reads, and what crosses behind it."""
        gradients = self._gradients[:, stage] if stage < self.stages - 1 else np.zeros(self.size)
        return _largest(np.unique(np.stack([self._saved[:, stage], self._weights[:, stage], gradients], 1), axis=0))

    def _piece(self, moment: int) -> Piece:
        rank = self._rank[moment]
        weights = np.zeros((len(QUANTITIES), self.stages))
        weights[SAVED], weights[WEIGHT_SAVED] = self._saved[moment], self._weights[moment]
        weights[HELD], weights[TRAINED] = self._holds[rank], (self._factor - 1) * self._holds[rank]
        return self._sums.piece(weights, self._buffers[rank] + self._gradients[moment], float(self._spare[rank]))


@once_for_each
def _buffers(schedule: Schedule, receives_ahead: int) -> Floats:
    """Of each rank, the buffers that it has for each boundary: (ranks, boundaries)."""
    counts = np.zeros((schedule.ranks, schedule.stages - 1))
    for (sender, receiver), count in receive_buffers(lower(schedule), receives_ahead, saved=False).items():
        counts[schedule.placement[receiver], min(sender, receiver)] += count
    return counts


@once_for_each
def _moments(schedule: Schedule) -> list[Floats]:
    """Of each rank, of how many microbatches its stages keep something between two actions, at the moments when no
    other has as many of each: (moments, stages with what F saved, stages with what W reads, boundaries behind which a
    gradient is kept)."""
    arrays = schedule.arrays
    rows = []
    for first, last in pairwise(arrays.bounds):
        kind, stage = arrays.kind[first:last, None], arrays.stage[first:last, None] == np.arange(schedule.stages)
        forwards, parted, done = (np.cumsum(np.isin(kind, kinds) & stage, axis=0) for kinds in ((F,), (I, B), (B, W)))
        if not schedule.trains:
            forwards = np.zeros_like(forwards)
        saved, weights = forwards - parted, parted - done
        gradients = np.zeros((len(kind), schedule.stages - 1), np.int64)
        gradients[:, :1] = weights[:, :1]
        saved[:, 0] += weights[:, 0]
        weights[:, 0] = 0
        rows.append(_largest(np.unique(np.concatenate([saved, weights, gradients], axis=1), axis=0)))
    return rows


def _largest(rows: Integers) -> Floats:
    """Those rows that are not in every column below another. No row may stand twice."""
    kept: list[Integers] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.float64)
