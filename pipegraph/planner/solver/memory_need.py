"""The memory that each rank needs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.cost import MemoryFactors
from pipegraph.planner.solver.prefix_sums import (
    ADDED,
    BUFFERS,
    OFFLOADED,
    OPTIMIZER,
    PARAMETERS,
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
from pipegraph.schedule.action_arrays import B, F, I, W
from pipegraph.schedule.lifetimes import offload_windows

_OF_STAGE, _CROSSES = slice(4), 4  # columns of `_moments_of_stages`


class MemoryParts(NamedTuple):
    """Bytes: (ranks, candidates) each.

    Attributes:
        parameters: with the copies that are kept of them.
        gradients: of parameters.
        optimizer: the state of the optimizer.
        model_buffers: buffers and constants.
        saved: what is kept for backwards, at the moment of its peak.
        buffers: to receive into.
        transient: what is on top of these at the moment of the peak, while F, I, W or B runs.
    """

    parameters: Floats
    gradients: Floats
    optimizer: Floats
    model_buffers: Floats
    saved: Floats
    buffers: Floats
    transient: Floats


class MemoryNeed:
    """An objective: bytes of the rank that needs the most.

    If ranks have different limits, each counts as if it had the largest limit and needed the difference in addition.

    A rank holds

    - its state: parameters, gradients and the optimizer's state, each times its factor, and buffers; without a
      backward, parameters and buffers;
    - what its stages keep between two actions: what F saved until I or B ends, and what W reads from the end of I to
      the end of W. The first stage's I has nothing to do, so all that F saved stays until W, with the gradient that
      arrived. What is offloaded counts while it is here (`pipegraph.schedule.lifetimes`);
    - while an action runs, its stage's `TransientBytes` in addition to the bytes held before the action, or after it;
      after W and B also the gradients of parameters that they made and have not yet added to the others;
    - receive buffers. A received value that a stage saves counts as saved. Its buffer counts from when its receive is
      posted, ``receives_ahead`` receives before the schedule reaches it, to the action that reads it;
    - the allowance of the factors, as a part of everything but the state.
    """

    def __init__(
        self,
        sums: PrefixSums,
        schedule: Schedule,
        factors: MemoryFactors,
        receives_ahead: int,
        limits: Sequence[float] = (),
    ) -> None:
        self.stages, self.ranks, self.limits = schedule.stages, schedule.ranks, tuple(limits)
        self.limit = max(limits, default=np.inf)
        self._spare = self.limit - np.array(limits) if limits else np.zeros(self.ranks)
        self._sums, self._placement = sums, np.array(schedule.placement)
        trained = factors if schedule.trains else factors._replace(gradients=0.0, optimizer=0.0)
        self._state_weights = {
            PARAMETERS: trained.parameters + trained.copies,
            TRAINED: trained.gradients,
            OPTIMIZER: trained.optimizer,
            BUFFERS: 1.0,
        }
        self._scale = 1 + factors.allowance
        self._holds = np.arange(self.ranks)[:, None] == self._placement  # (ranks, stages)
        self._moments = _moments(schedule, sums.offloads)
        self._moments_of_stages = _moments_of_stages(schedule, sums.offloads)
        self._first = np.searchsorted(self._moments.rank, np.arange(self.ranks))
        ends = np.arange(1, 4) * self.stages
        self._saved, self._weights, self._offloaded, self._gradients = np.split(
            self._scale * self._moments.counts, ends, axis=1
        )
        self._schedule, self._ahead = schedule, receives_ahead

    @cached_property
    def _buffers(self) -> Floats:
        return self._scale * _receive_buffers(self._schedule, self._ahead)

    @property
    def steps(self) -> int:
        return 2 * len(self._saved)

    def parts(self, cuts: Integers) -> MemoryParts:
        """Return what cuts (candidates, cuts) need, in its parts."""
        stages, crossing = self._sums.stages(cuts), self._sums.crossing_at(cuts)
        activations = self._activations(stages, crossing)
        saved = np.maximum.reduceat(self._moments.ends[:, None] * activations, self._first)
        most = np.maximum.reduceat(activations + self._added(stages, self._sums.transient_at(cuts)), self._first)
        parameters, trained, optimizer, buffers = (
            self._state_weights[quantity] * (self._holds @ stages[quantity])
            for quantity in (PARAMETERS, TRAINED, OPTIMIZER, BUFFERS)
        )
        receive_buffers = self._buffers @ crossing
        return MemoryParts(parameters, trained, optimizer, buffers, saved, receive_buffers, most - saved)

    def of_ranks(self, cuts: Integers) -> Floats:
        """Return what each rank needs: (ranks, candidates)."""
        stages, crossing = self._sums.stages(cuts), self._sums.crossing_at(cuts)
        load = self._activations(stages, crossing) + self._added(stages, self._sums.transient_at(cuts))
        figures: Floats = self._state(stages) + self._buffers @ crossing + np.maximum.reduceat(load, self._first)
        return figures

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
        load = self._activations(stages, crossing) + self._added(stages, self._sums.transient_at(cuts) @ mixture)
        return self._linear_bound(int((load + of_rank[self._moments.rank]).argmax()))

    def tightest_bounds(self, stages: Floats) -> list[LinearBound]:
        """Return for each rank the linear bound that is largest for stages (quantities, stages) between which nothing
        crosses, and which need nothing more while they run."""
        gradient_bytes = self._scale * self._moments.adds * stages[ADDED][self._moments.stage]
        load = self._activations(stages, np.zeros(self.stages - 1)) + gradient_bytes
        moments = (
            first + int(part.argmax()) for first, part in zip(self._first, np.split(load, self._first[1:]), strict=True)
        )
        return [self._linear_bound(int(moment), crosses=False) for moment in moments]

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        rank, crossing = self._placement[stage], self._sums.crossing
        crossing_bytes = np.full((len(ends), len(begins)), float(self._spare[rank]))
        if stage > 0:
            crossing_bytes += self._buffers[rank, stage - 1] * crossing[begins]
        if stage < self.stages - 1:
            crossing_bytes += (self._buffers[rank, stage] * crossing[ends])[:, None]
        options = zip(self._sums.by_option, self._sums.transient.of_windows(begins, ends), strict=True)
        return np.stack(
            [crossing_bytes + self._bytes_of_stage(sums, most, stage, begins, ends) for sums, most in options]
        )

    def _bytes_of_stage(self, sums: Floats, transient: Floats, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return what a stage needs, without receive buffers, with the option that has these sums and needs
        ``transient`` while it runs: (ends, begins)."""
        state = sum(weight * sums[quantity] for quantity, weight in self._state_weights.items())
        peak = np.zeros((len(ends), len(begins)))
        for kind, rows in self._moments_of_stages[stage]:
            rows = self._scale * rows
            figures = rows[:, _OF_STAGE] @ sums[[SAVED, WEIGHT_SAVED, OFFLOADED, ADDED]]
            end_figures = (figures + rows[:, _CROSSES, None] * self._sums.crossing)[:, ends]
            most = np.subtract.outer(end_figures[0], figures[0, begins])
            for end_row, begin_row in zip(end_figures[1:], figures[1:, begins], strict=True):
                np.maximum(most, np.subtract.outer(end_row, begin_row), out=most)
            if kind >= 0:
                most += self._scale * transient[kind]
            np.maximum(peak, most, out=peak)
        stage_bytes: Floats = state[ends][:, None] - state[begins] + peak
        return stage_bytes

    def allows(self, stage: int, begins: Integers, ends: Integers) -> Booleans:
        """Return whether a rank has room for the stage alone as the segments begin … end − 1, with each option:
        (options, ends, begins)."""
        return self.stage_bound(stage, begins, ends) <= self.limit

    def _state(self, stages: Floats) -> Floats:
        """Return the bytes of state (ranks, …) of stages (quantities, stages, …)."""
        state = sum(weight * stages[quantity] for quantity, weight in self._state_weights.items())
        figures: Floats = self._holds @ state
        return figures

    def _activations(self, stages: Floats, crossing: Floats) -> Floats:
        """Return the bytes kept at each moment (moments, …) by stages (quantities, stages, …)."""
        activations = self._saved @ stages[SAVED] + self._weights @ stages[WEIGHT_SAVED]
        if self._sums.offloads:
            activations += self._offloaded @ stages[OFFLOADED]
        figures: Floats = activations + self._gradients @ crossing
        return figures

    def _added(self, stages: Floats, transient: Floats) -> Floats:
        """Return what actions add at each moment (moments, …), of stages (quantities, stages, …) and what these need
        while they run (F I W B, stages, …)."""
        moments = self._moments
        runs = (moments.kind >= 0).reshape(-1, *[1] * (stages.ndim - 2))
        gradient_bytes = moments.adds.reshape(runs.shape) * stages[ADDED][moments.stage]
        figures: Floats = self._scale * (runs * transient[moments.kind, moments.stage] + gradient_bytes)
        return figures

    def _linear_bound(self, moment: int, crosses: bool = True) -> LinearBound:
        rank, stage, kind = (int(column[moment]) for column in self._moments[:3])
        weights = np.zeros((len(QUANTITIES), self.stages))
        weights[SAVED], weights[WEIGHT_SAVED] = self._saved[moment], self._weights[moment]
        weights[OFFLOADED] = self._offloaded[moment]
        for quantity, weight in self._state_weights.items():
            weights[quantity] = weight * self._holds[rank]
        weights[ADDED, stage] = self._scale * self._moments.adds[moment]
        least = self._scale * float(self._sums.least_transient[kind]) if kind >= 0 else 0.0
        crossing = self._buffers[rank] + self._gradients[moment] if crosses else np.zeros(self.stages - 1)
        return LinearBound(self._sums, weights, crossing, float(self._spare[rank]) + least)


class _Moments(NamedTuple):
    """Moments at which ranks may need the most: before and after each action, while it runs.

    Attributes:
        rank, stage: (moments,), sorted by rank.
        kind: F, I, W or B, which runs there, numbered as in `TransientBytes`; −1 for nothing.
        ends: whether the action has ended: nothing is being copied in for the backward after it.
        adds: whether the gradients of the stage's parameters have been made, and not yet been added to the others.
        counts: how many microbatches are kept: (moments, 3 · stages + boundaries). The columns are what F saved, per
            stage; what W reads, per stage; of what F saved, what is here if it is offloaded, per stage; a gradient
            that arrived over each boundary.
    """

    rank: Integers
    stage: Integers
    kind: Integers
    ends: Booleans
    adds: Booleans
    counts: Floats


@lru_cache(maxsize=32)
def _receive_buffers(schedule: Schedule, receives_ahead: int) -> Floats:
    """Return the number of receive buffers of each rank for each boundary: (ranks, boundaries)."""
    counts = np.zeros((schedule.ranks, schedule.stages - 1))
    for (sender, receiver), count in receive_buffers(lower(schedule), receives_ahead, saved=False).items():
        counts[schedule.placement[receiver], min(sender, receiver)] += count
    return counts


@lru_cache(maxsize=32)
def _moments(schedule: Schedule, offloads: bool) -> _Moments:
    """Return the moments of a schedule; of those that differ in what is kept alone, none keeps less in every column.

    Unless something ``offloads``, no offloaded microbatch is counted as here.
    """
    arrays, boundaries = schedule.arrays, schedule.stages - 1
    moments: list[tuple[int, int, int, bool, bool]] = []
    counts: list[Floats] = []
    for rank, (first, last) in enumerate(pairwise(arrays.bounds)):
        kinds, stages = arrays.kind[first:last], arrays.stage[first:last]
        rank_stages = np.unique(stages)  # a rank keeps nothing of the stages of others
        one_hot, has_first = stages[:, None] == rank_stages, 0 in rank_stages
        forwards, divided, done = (
            np.cumsum(np.isin(kinds, group)[:, None] & one_hot, axis=0) for group in ((F,), (I, B), (B, W))
        )
        if not schedule.trains:
            forwards = np.zeros_like(forwards)
        saved, weights = forwards - divided, divided - done
        gradients = np.zeros((len(kinds), int(has_first and boundaries > 0)), np.int64)
        if has_first:
            gradients[:, :1] = weights[:, :1]
            saved[:, 0] += weights[:, 0]
            weights[:, 0] = 0
        resident, began = (saved.copy(), _shifted(saved)) if offloads else (np.zeros_like(saved), np.zeros_like(saved))
        for window in offload_windows(schedule.actions[rank]) if offloads else ():
            column = int(np.searchsorted(rank_stages, window.stage))
            resident[window.departure : window.back, column] -= 1  # when those actions end
            began[window.departure + 1 : window.back, column] -= 1  # when they begin
        at_end = np.concatenate([saved, weights, resident, gradients], axis=1)
        at_start = np.concatenate([_shifted(saved), _shifted(weights), began, _shifted(gradients)], axis=1)
        columns = np.concatenate([part * schedule.stages + rank_stages for part in range(3)])
        columns = np.append(columns, 3 * schedule.stages + np.arange(gradients.shape[1]))
        for kind in np.unique(kinds).tolist():
            for stage in np.unique(stages[kinds == kind]).tolist():
                runs = (kinds == kind) & (stages == stage)
                # The first stage's I has nothing to do, and its W does all of the backward.
                place = {I: -1, W: B}.get(kind, kind) if stage == 0 else kind
                sides = [(at_end, kind in (B, W))] if kind == F else [(at_start, False), (at_end, kind in (B, W))]
                for rows, adds in sides:
                    most = _not_dominated(np.unique(rows[runs], axis=0))
                    moments += [(rank, stage, place, rows is at_end, adds)] * len(most)
                    counts.append(np.zeros((len(most), 3 * schedule.stages + boundaries)))
                    counts[-1][:, columns] = most
    rank_of, stage_of, kind_of, ends, adds_up = (np.array(column) for column in zip(*moments, strict=True))
    return _Moments(rank_of, stage_of, kind_of, ends, adds_up, np.concatenate(counts))


@lru_cache(maxsize=32)
def _moments_of_stages(schedule: Schedule, offloads: bool) -> list[list[tuple[int, Floats]]]:
    """Return for each stage the moments of its rank by what of the stage runs there (−1 for nothing): how often the
    stage keeps what F saved, what W reads and what is offloaded, whether the gradients of its parameters are there, and
    how often it keeps what crosses after it: (moments, 5)."""
    moments = _moments(schedule, offloads)
    *parts, gradients = np.split(moments.counts, np.arange(1, 4) * schedule.stages, axis=1)
    stage_moments = []
    for stage, rank in enumerate(schedule.placement):
        of_rank = moments.rank == rank
        of_stage = (moments.stage == stage)[of_rank]
        crosses = gradients[of_rank, stage] if stage < schedule.stages - 1 else np.zeros(len(of_stage))
        columns = (part[of_rank, stage] for part in parts)
        rows = np.stack([*columns, of_stage & moments.adds[of_rank], crosses], axis=1)
        kinds = np.where(of_stage, moments.kind[of_rank], -1)
        groups = ((kind, rows[kinds == kind]) for kind in np.unique(kinds).tolist())
        stage_moments.append([(kind, _not_dominated(np.unique(group, axis=0))) for kind, group in groups])
    return stage_moments


def _shifted(counts: Integers) -> Integers:
    """Return the counts before each action, of those after it."""
    shifted: Integers = np.pad(counts, ((1, 0), (0, 0)))[:-1]
    return shifted


def _not_dominated(rows: Integers) -> Floats:
    """Return the rows that no other row reaches in every column. No row may occur twice."""
    front: list[Integers] = []
    candidates = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    while len(candidates):
        front.append(candidates[0])
        candidates = candidates[(candidates > candidates[0]).any(axis=1)]
    return np.array(front, np.float64)
