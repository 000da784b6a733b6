"""What a planner minimises."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pipegraph.planner.solver.objectives.memory_need import Memory
from pipegraph.planner.solver.prefix_sums import FORWARD, Floats, Integers, Piece, Sums

_STEEP = 25.0


class Objective(Protocol):
    """A figure of cuts: the largest of many that are linear in what the stages cost. None of these is negative."""

    @property
    def size(self) -> int:
        """About how many steps it takes to value cuts."""
        ...

    def values(self, cuts: Integers) -> Floats:
        """For cuts of shape (candidates, cuts)."""
        ...

    def pieces(self) -> Sequence[Piece]:
        """Some of the linear figures, to begin with."""
        ...

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        """That of the linear figures that is largest for a mixture of cuts, where stages have the mean of what they
        have in each."""
        ...

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """The least that the value is if the stage is the segments begin … end − 1, by (ends, begins)."""
        ...


class SlowestStage:
    """Seconds that the slowest stage computes for one microbatch."""

    def __init__(self, sums: Sums, stages: int, trains: bool) -> None:
        self._sums, self._stages = sums, stages
        self._kinds = 3 if trains else 1

    @property
    def size(self) -> int:
        return self._stages

    def values(self, cuts: Integers) -> Floats:
        seconds: Floats = self._seconds(cuts).max(axis=0)
        return seconds

    def pieces(self) -> list[Piece]:
        return [self._piece(stage) for stage in range(self._stages)]

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        return self._piece(int((self._seconds(cuts) @ mixture).argmax()))

    def of_stage(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        before = self._sums.before[: self._kinds].sum(axis=0)
        seconds: Floats = before[ends][:, None] - before[begins]
        return seconds

    def _seconds(self, cuts: Integers) -> Floats:
        """(stages, candidates)"""
        seconds: Floats = self._sums.stages(cuts)[: self._kinds].sum(axis=0)
        return seconds

    def _piece(self, stage: int) -> Piece:
        weights = np.zeros((FORWARD + self._kinds, self._stages))
        weights[:, stage] = 1.0
        return self._sums.piece(weights, np.zeros(self._stages - 1))


class Limited:
    """An objective of cuts that should fit into memory: where they do not, so much is added that they had better.

    Cuts that fit have the values of the objective, and the bounds of these hold for them. The first percent of memory
    that is missing adds as much as the ``scale`` of the objective's values.
    """

    def __init__(self, objective: Objective, memory: Memory, scale: float) -> None:
        self._objective, self._memory = objective, memory
        self._slope = _STEEP * scale / max(memory.limit, 1.0)
        self.size = objective.size + memory.size
        self.pieces, self.of_stage = objective.pieces, objective.of_stage

    def values(self, cuts: Integers) -> Floats:
        missing = (self._memory.values(cuts) - self._memory.limit).clip(min=0.0)
        return self._objective.values(cuts) + self._slope * missing

    def largest(self, cuts: Integers, mixture: Floats) -> Piece:
        piece, needed = self._objective.largest(cuts, mixture), self._memory.largest(cuts, mixture)
        if needed.at(cuts) @ mixture <= self._memory.limit:
            return piece
        missing = self._slope * (needed.constant - self._memory.limit)
        return Piece(piece.table + self._slope * needed.table, piece.constant + missing)
