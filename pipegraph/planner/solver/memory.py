"""The memory that each rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.arrange import once_for_each
from pipegraph.planner.solver.sums import PARAMETERS, QUANTITIES, SAVED, Allowed, Floats, Integers, Piece, Sums
from pipegraph.schedule import Schedule, lower, receive_buffers
from pipegraph.schedule.arrays import B, F, W


class Parts(NamedTuple):
    """Bytes, by (ranks, candidates)."""

    state: Floats
    """parameters, their gradients, and what the optimizer holds of them"""
    saved: Floats
    """activations, at the moment when they are the most"""
    buffers: Floats
    """to receive into"""


class Memory:
    """Bytes of the rank that needs the most; where the ranks have different ``limits``, as if each had the largest one
    and needed so much more.

    A rank holds its parameters ``state_factor`` times (without a backward, once); what its stages have saved, as the
    schedule goes: each stage's own, from F to the end of its W or B; and the buffers that it receives into. A received
    value that a stage saves counts as saved: its buffer counts from when its receive is posted, ``receives_ahead``
    receives before the schedule reaches it, to the action that reads it.
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
        self._factor = state_factor if schedule.has_backward else 1.0
        self._holds = np.arange(self.ranks)[:, None] == self._placement  # (ranks, stages)
        moments = _moments(schedule)
        self._held = np.concatenate(moments)  # (moments of all ranks, stages)
        counts = [len(rows) for rows in moments]
        self._rank, self._first = np.repeat(np.arange(self.ranks), counts), np.cumsum([0, *counts[:-1]])
        self._buffers = _buffers(schedule, receives_ahead)

    @property
    def size(self) -> int:
        return len(self._held)

    def parts(self, cuts: Integers) -> Parts:
        """What cuts (candidates, cuts) need."""
        stages = self._sums.stages(cuts)
        return Parts(
            self._factor * (self._holds @ stages[PARAMETERS]),
            np.maximum.reduceat(self._held @ stages[SAVED], self._first),
            self._buffers @ self._sums.crossing[cuts.T],
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
        stages = self._sums.stages(cuts) @ mixture
        of_rank = self._factor * (self._holds @ stages[PARAMETERS]) + self._spare
        of_rank += self._buffers @ (self._sums.crossing[cuts.T] @ mixture)
        return self._piece(int((self._held @ stages[SAVED] + of_rank[self._rank]).argmax()))

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        rank, before = self._placement[stage], self._sums.before
        figures = self._factor * before[PARAMETERS] + self._held[:, stage].max() * before[SAVED]
        needed: Floats = figures[ends][:, None] - figures[begins] + self._spare[rank]
        if stage > 0:
            needed += self._buffers[rank, stage - 1] * self._sums.crossing[begins]
        if stage < self.stages - 1:
            needed += (self._buffers[rank, stage] * self._sums.crossing[ends])[:, None]
        return needed

    def allows(self, stage: int, begins: Integers, ends: Integers) -> Allowed:
        """Whether the stage by itself has room, if it is the segments begin … end − 1, by (ends, begins)."""
        return self.of_stage(stage, begins, ends) <= self.limit

    def _piece(self, moment: int) -> Piece:
        rank = self._rank[moment]
        weights = np.zeros((len(QUANTITIES), self.stages))
        weights[SAVED] = self._held[moment]
        weights[PARAMETERS] = self._factor * self._holds[rank]
        return self._sums.piece(weights, self._buffers[rank], float(self._spare[rank]))


@once_for_each
def _buffers(schedule: Schedule, receives_ahead: int) -> Floats:
    """Of each rank, the buffers that it has for each boundary: (ranks, boundaries)."""
    counts = np.zeros((schedule.ranks, schedule.stages - 1))
    for (sender, receiver), count in receive_buffers(lower(schedule), receives_ahead, saved=False).items():
        counts[schedule.placement[receiver], min(sender, receiver)] += count
    return counts


@once_for_each
def _moments(schedule: Schedule) -> list[Floats]:
    """Of each rank, how many microbatches each stage has saved, (moments, stages), at the moments when no other has as
    many of each."""
    arrays = schedule.arrays
    rows = []
    for first, last in pairwise(arrays.bounds):
        kind, stage = arrays.kind[first:last, None], arrays.stage[first:last, None] == np.arange(schedule.stages)
        saved = np.cumsum((kind == F) & stage & schedule.has_backward, axis=0)
        freed = ((kind == W) | (kind == B)) & stage
        rows.append(_largest(np.unique(saved - np.cumsum(freed, axis=0) + freed, axis=0)))
    return rows


def _largest(rows: Integers) -> Floats:
    """Those rows that are not in every column below another. No row may stand twice."""
    kept: list[Integers] = []
    for row in rows[np.argsort(-rows.sum(axis=1), kind="stable")]:
        if not any((other >= row).all() for other in kept):
            kept.append(row)
    return np.array(kept, np.float64)
