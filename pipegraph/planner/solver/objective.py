"""The figures that a planner minimises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.prefix_sums import QUANTITIES, Floats, Integers, LinearBound, PrefixSums

_PENALTY = 25.0  # what missing memory adds to a value: this × the missing part × the size of values


class Objective(Protocol):
    """A figure of cuts: the largest of many linear bounds, none of which is negative."""

    @property
    def steps(self) -> int:
        """About how many steps one evaluation takes."""
        ...

    def values(self, cuts: Integers) -> Floats:
        """Return the values (candidates,) of cuts (candidates, cuts)."""
        ...

    def initial_bounds(self) -> Sequence[LinearBound]:
        """Return some of the linear bounds, with which a relaxation begins."""
        ...

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        """Return the linear bound that is largest for a mixture of cuts.

        Args:
            cuts: (candidates, cuts)
            mixture: the share of each candidate. A stage costs the mean of what it costs in each.
        """
        ...

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return a lower bound of the value if the stage is the segments begin … end − 1, with each option: (options,
        ends, begins)."""
        ...


class SlowestStage:
    """Seconds that the slowest stage computes for one microbatch."""

    def __init__(self, sums: PrefixSums, stages: int, trains: bool) -> None:
        self._sums, self._stages = sums, stages
        self._quantities = 3 if trains else 1

    @property
    def steps(self) -> int:
        return self._stages

    def values(self, cuts: Integers) -> Floats:
        seconds: Floats = self._seconds(cuts).max(axis=0)
        return seconds

    def initial_bounds(self) -> list[LinearBound]:
        return [self._linear_bound(stage) for stage in range(self._stages)]

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        return self._linear_bound(int((self._seconds(cuts) @ mixture).argmax()))

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        sums = self._sums.by_option[:, : self._quantities].sum(axis=1)
        seconds: Floats = sums[:, ends, None] - sums[:, None, begins]
        return seconds

    def _seconds(self, cuts: Integers) -> Floats:
        """(stages, candidates)"""
        seconds: Floats = self._sums.stages(cuts)[: self._quantities].sum(axis=0)
        return seconds

    def _linear_bound(self, stage: int) -> LinearBound:
        weights = np.zeros((len(QUANTITIES), self._stages))
        weights[: self._quantities, stage] = 1.0
        return LinearBound(self._sums, weights, np.zeros(self._stages - 1))


class MemoryLimited:
    """An objective with a penalty for cuts that do not fit into the memory.

    Cuts that fit have the values of the objective, and its bounds hold for them. ``scale`` is the size of its values.
    """

    def __init__(self, objective: Objective, memory: MemoryNeed, scale: float) -> None:
        self._objective, self._memory = objective, memory
        self._slope = _PENALTY * scale / max(memory.limit, 1.0)
        self.steps = objective.steps + memory.steps
        self.initial_bounds, self.stage_bound = objective.initial_bounds, objective.stage_bound

    def values(self, cuts: Integers) -> Floats:
        missing = (self._memory.values(cuts) - self._memory.limit).clip(min=0.0)
        return self._objective.values(cuts) + self._slope * missing

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        linear, memory_bound = self._objective.tightest_bound(cuts, mixture), self._memory.tightest_bound(cuts, mixture)
        if memory_bound.at(cuts) @ mixture <= self._memory.limit:
            return linear
        missing = replace(memory_bound, constant=memory_bound.constant - self._memory.limit)
        return LinearBound.mixture([linear, missing], np.array([1.0, self._slope]))
