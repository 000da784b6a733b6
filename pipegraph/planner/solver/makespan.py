"""The makespan of a schedule, for many cuts at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.arguments import require_type
from pipegraph.cost.hardware import Link
from pipegraph.errors import PlanError
from pipegraph.planner.solver.action_graph import ActionGraph
from pipegraph.planner.solver.prefix_sums import (
    FORWARD,
    INPUT_GRAD,
    PARTS,
    TIMES,
    WEIGHT_GRAD,
    Floats,
    Integers,
    LinearBound,
    PrefixSums,
)
from pipegraph.schedule import Kind, Schedule, Times
from pipegraph.schedule.action_arrays import CODES

Order = Sequence[tuple[Kind, int]]
"""(kind, microbatch) of the actions of one stage"""

LinkFigures = tuple[float, float] | Link
"""(latency in seconds, bandwidth in bytes per second), or a link of a hardware profile"""
Links = LinkFigures | Callable[[int, int], LinkFigures]
"""One link for all ranks, or (rank, other rank) → the link between them."""


class StagePath(NamedTuple):
    """A path from the first stage to a stage, through actions of that stage, and on.

    Attributes:
        forward, input_grad, weight_grad: how many F, I and W of the stage it contains; a B is an I and a W.
        turns: how often it goes from an F to the last stage and back to the I or B of the same microbatch, without the
            actions of the stage between these two.
        returns: whether it goes back to the first stage at the end.
        leaves: whether it continues to the last stage at the end.
    """

    forward: int
    input_grad: int
    weight_grad: int
    turns: int
    returns: bool
    leaves: bool


def _stage_paths(schedule: Schedule) -> list[list[StagePath]]:
    """Return for each stage the paths that may be the longest, whatever the times are."""
    orders: list[list[tuple[Kind, int]]] = [[] for _ in range(schedule.stages)]
    for row in schedule.actions:
        for action in row:
            orders[action.stage].append((action.kind, action.microbatch))
    return [_not_dominated(list(_paths(order))) if schedule.trains else [_forward_path(order)] for order in orders]


def _forward_path(order: Order) -> StagePath:
    return StagePath(len(order), 0, 0, 0, returns=False, leaves=True)


def _paths(order: Order) -> Iterator[StagePath]:
    """Yield paths that turn at the first F, at the last, at each that they reach, or never.

    They go to the last action, or to the last I or B and back to the first stage.
    """
    back = {microbatch: at for at, (kind, microbatch) in enumerate(order) if kind in (Kind.I, Kind.B)}
    forwards = [microbatch for kind, microbatch in order if kind is Kind.F]
    for turning in map(frozenset, ((), forwards[:1], forwards[-1:], forwards)):
        for end, returns in ((len(order), False), (max(back.values()) + 1, True)):
            passed, turns, at = [0, 0, 0], 0, 0
            while at < end:
                kind, microbatch = order[at]
                for part in PARTS[kind]:
                    passed[part] += 1
                turn = kind is Kind.F and microbatch in turning
                turns += turn
                at = back[microbatch] if turn else at + 1
            yield StagePath(passed[0], passed[1], passed[2], turns, returns, leaves=False)


def _not_dominated(paths: Sequence[StagePath]) -> list[StagePath]:
    """Return the paths of which no other contains as much of everything."""
    every = np.unique(np.array(paths, np.int64), axis=0)
    covered = (every[:, None] <= every).all(axis=2) & ~np.eye(len(every), dtype=bool)
    return [StagePath(*row) for row in every[~covered.any(axis=1)].tolist()]


# Plans are compared by the hundred, but have few different schedules.
_graph_of, _paths_of = lru_cache(maxsize=32)(ActionGraph), lru_cache(maxsize=32)(_stage_paths)


class Makespan:
    """An objective: seconds of a step, as `simulate` computes them."""

    def __init__(self, sums: PrefixSums, schedule: Schedule, link: Links | None) -> None:
        """Without a link, crossing a boundary takes no time. Raises PlanError for a link with impossible figures."""
        self._sums, self._schedule = sums, schedule
        self._latency, self._per_byte = _boundary_times(link, schedule.placement)
        self._queued = bool((self._per_byte * sums.crossing.max()).any())

    @property
    def steps(self) -> int:
        return self._graph.steps

    @cached_property
    def _graph(self) -> ActionGraph:
        return _graph_of(self._schedule, self._queued)

    def values(self, cuts: Integers) -> Floats:
        return self._graph.makespans(self.times(cuts), self._latency, self.transfers(cuts))

    def times(self, cuts: Integers) -> Floats:
        """Return the seconds of F, I and W: (3, stages, candidates).

        The first stage's I takes no time: no gradient of the model's inputs is needed, so W is the whole backward.
        """
        return _without_first_input_grad(self._sums.stages(cuts))

    def transfers(self, cuts: Integers) -> Floats:
        """Return the seconds for which a microbatch occupies the link of each boundary: (boundaries, candidates)."""
        seconds: Floats = self._sums.crossing_at(cuts) * self._per_byte[:, None]
        return seconds

    def times_of(self, cuts: Integers) -> Times:
        """Return the times of cuts (cuts,), for `simulate`."""
        times, transfers = self.times(cuts[None]), self.transfers(cuts[None])
        forward, input_grad, weight_grad = times[..., 0].tolist()
        return Times(forward, input_grad, weight_grad, self._latency.tolist(), transfers[:, 0].tolist())

    def initial_bounds(self) -> list[LinearBound]:
        """Return for each rank the way to its first action and then all its actions."""
        bounds, arrays = [], self._schedule.arrays
        for begin, end in pairwise(arrays.bounds):
            kinds, stages = arrays.kind[begin:end], arrays.stage[begin:end]
            work, first = np.zeros((len(TIMES), self._schedule.stages)), int(stages[0])
            work[FORWARD, :first] = 1.0
            for kind, parts in PARTS.items():
                work[list(parts)] += np.bincount(stages[kinds == CODES[kind]], minlength=self._schedule.stages)
            hops = np.arange(self._schedule.stages - 1) < first
            bounds.append(self._linear_bound(work, float(hops @ self._latency), np.zeros(len(hops))))
        return bounds

    def path_bounds(self) -> list[LinearBound]:
        """Return the paths of `stage_bound`, for all stages."""
        bounds, edges = [], np.arange(self._schedule.stages - 1)
        backward = [INPUT_GRAD, WEIGHT_GRAD] if self._has_full_backwards else [INPUT_GRAD]
        for stage, paths in enumerate(_paths_of(self._schedule)):
            for path in paths:
                work = np.zeros((len(TIMES), self._schedule.stages))
                work[:, stage] = path[: len(TIMES)]
                work[FORWARD, :stage], work[FORWARD, stage + 1 :] = 1.0, path.turns + path.leaves
                work[backward, :stage], work[backward, stage + 1 :] = path.returns, path.turns
                hops = np.where(edges < stage, 1 + path.returns, 2 * path.turns + path.leaves)
                bounds.append(self._linear_bound(work, float(hops @ self._latency), np.zeros(len(edges))))
        return bounds

    def tightest_bound(self, cuts: Integers, mixture: Floats) -> LinearBound:
        return self._longest(self.times(cuts) @ mixture, self.transfers(cuts) @ mixture)

    def longest_path(self, stages: Floats) -> LinearBound:
        """Return the linear bound that is largest for stages (quantities, stages) between which nothing crosses."""
        return self._longest(_without_first_input_grad(stages), np.zeros(len(self._latency)))

    def _longest(self, times: Floats, transfers: Floats) -> LinearBound:
        path = self._graph.longest_path(times, self._latency, transfers)
        return self._linear_bound(path.work, float(path.hops @ self._latency), path.transfers)

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        sums = self._sums.before[: len(TIMES)]
        times = sums[:, ends][:, :, None] - sums[:, begins][:, None, :]
        return self.bound_with(times, stage, begins, ends)

    def bound_with(self, times: Floats, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return `stage_bound` for a stage that takes ``times`` F, I and W: (3, ends, begins), which are changed."""
        sums, hops = self._sums.before[: len(TIMES)], np.append(0.0, np.cumsum(self._latency))
        if stage == 0:
            times[WEIGHT_GRAD] += times[INPUT_GRAD]
            times[INPUT_GRAD] = 0.0
        forward, backward = sums[FORWARD], sums[INPUT_GRAD] + (sums[WEIGHT_GRAD] if self._has_full_backwards else 0.0)
        hops_in, hops_on = hops[stage], hops[-1] - hops[stage]
        come, back = forward[begins] + hops_in, backward[begins] + hops_in  # from the first stage to here, and back
        on = forward[-1] - forward[ends] + hops_on  # from here to the last stage
        turn = on + backward[-1] - backward[ends] + hops_on
        longest = np.zeros((len(ends), len(begins)))
        for path in _paths_of(self._schedule)[stage]:
            length = np.tensordot(path[: len(TIMES)], times, 1) + come + path.returns * back
            length += (path.turns * turn + path.leaves * on)[:, None]
            np.maximum(longest, length, out=longest)
        return longest

    @cached_property
    def _has_full_backwards(self) -> bool:
        """Whether every backward is a B, whose gradients leave when its W has ended too."""
        return not any(action.kind is Kind.I for order in self._schedule.actions for action in order)

    def _linear_bound(self, work: Floats, constant: float, transfers: Floats) -> LinearBound:
        weights = work.copy()
        weights[INPUT_GRAD, 0] = weights[WEIGHT_GRAD, 0]
        return self._sums.linear_bound(weights, transfers * self._per_byte, constant)


def _without_first_input_grad(stages: Floats) -> Floats:
    """Return the times (3, stages, …) of stages (quantities, stages, …): W of the first stage is its whole backward."""
    times: Floats = stages[: len(TIMES)].copy()
    times[WEIGHT_GRAD, 0] += times[INPUT_GRAD, 0]
    times[INPUT_GRAD, 0] = 0.0
    return times


def _boundary_times(link: Links | None, placement: Sequence[int]) -> tuple[Floats, Floats]:
    """Return (seconds, seconds per byte) to cross each boundary: 0 on one rank, and everywhere without a link."""
    figures = [_link_figures(link, rank, peer) for rank, peer in pairwise(placement)]
    latency, per_byte = np.array(figures, np.float64).reshape(-1, 2).T
    return latency, per_byte


def _link_figures(link: Links | None, rank: int, peer: int) -> tuple[float, float]:
    if link is None or rank == peer:
        return 0.0, 0.0
    figures = link(rank, peer) if callable(link) else link
    pair = (figures.latency, figures.bandwidth) if isinstance(figures, Link) else figures
    description = "link is a latency and a bandwidth, or a function of two ranks that returns them"
    require_type(pair, Sequence, description, "link=(1e-5, 25e9)", PlanError)
    if len(pair) != 2:
        raise PlanError(f"{description}, not {len(pair)} figures.\nTry: link=(1e-5, 25e9).")
    latency, bandwidth = pair
    if not (0 <= latency < math.inf and bandwidth > 0):
        raise PlanError(
            f"The link between ranks {rank} and {peer} has a latency of {latency!r} and a bandwidth of {bandwidth!r}. "
            "A latency is in seconds, from 0 on; a bandwidth in bytes per second, above 0.\nTry: link=(1e-5, 25e9)."
        )
    return float(latency), 1 / bandwidth
