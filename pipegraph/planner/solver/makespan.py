"""The makespan of a schedule, for many cuts at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.arguments import require_type
from pipegraph.cost.hardware import Link
from pipegraph.errors import PlanError
from pipegraph.planner.solver.prefix_sums import (
    FORWARD,
    INPUT_GRAD,
    PARTS,
    QUANTITIES,
    TIMES,
    WEIGHT_GRAD,
    Floats,
    Integers,
    LinearBound,
    PrefixSums,
)
from pipegraph.schedule import Action, Kind, Schedule, Times
from pipegraph.schedule.action_arrays import CODES

# ---- action graph ----------------------------------------------------------------------------------------------------
# A schedule as a graph of its actions, timed for many cuts at once.


_BATCH = 256  # candidates timed at once: enough to make little of a call, few enough for the cache


class LongestPath(NamedTuple):
    """How often a path contains something.

    Attributes:
        work: F, I and W of each stage: (3, stages).
        hops: the latency of each boundary: (boundaries,).
        transfers: the transfer over each boundary: (boundaries,).
    """

    work: Floats
    hops: Floats
    transfers: Floats


@dataclass(frozen=True)
class _Node:
    """Something that takes time: an action, an overlapped pair, or a transfer that occupies its link.

    Attributes:
        work: the F, I and W of an action or a pair, as (F, I or W, stage).
        transfer: the boundary of a transfer; None for an action.
        edges: (node that must end before, boundary whose latency comes between or −1).
    """

    work: tuple[tuple[int, int], ...]
    transfer: int | None
    edges: list[tuple[int, int]]


class ActionGraph:
    """The actions of a schedule of a chain of stages, and what each waits for. It times many candidates at once.

    The order on a rank is given, so an action starts when the one before it on the rank has ended and what it needs of
    another rank has arrived: the makespan is the longest path. Transfers over a link leave in the order of their
    sender's actions. If one may have to wait for another (``queued``), they are nodes too; otherwise a transfer is part
    of the way between two actions. Nodes are sorted by level, the largest number of nodes on a path to them, and the
    nodes of one level are timed together.
    """

    def __init__(self, schedule: Schedule, queued: bool) -> None:
        nodes = _nodes(schedule, queued)
        self._queued = queued
        levels = _levels(nodes)
        order = np.argsort(levels, kind="stable")
        self._end = len(nodes)
        moved = np.append(np.empty(self._end, np.int64), self._end)  # −1 for no node → the last row, which ends at 0
        moved[order] = np.arange(self._end)
        widest = max(1, *(len(node.edges) for node in nodes))
        edges = np.array([node.edges + [(-1, -1)] * (widest - len(node.edges)) for node in nodes], np.int64)[order]
        self._predecessors, self._boundary = moved[edges[..., 0]], edges[..., 1]
        self._levels = [0, *np.cumsum(np.bincount(levels)).tolist()]
        # Nodes of equal duration share a row of durations: first the kinds of work, then the transfers of boundaries.
        rows = {work: row for row, work in enumerate(dict.fromkeys(node.work for node in nodes if node.work))}
        self._work = np.zeros((len(rows), 3, schedule.stages))
        for work, row in rows.items():
            for part, stage in work:
                self._work[row, part, stage] = 1.0
        durations = [rows[node.work] if node.transfer is None else len(rows) + node.transfer for node in nodes]
        self._duration = np.array(durations)[order]

    @property
    def steps(self) -> int:
        """The number of actions, pairs and transfers."""
        return self._end

    def makespans(self, times: Floats, hop: Floats, transfer: Floats) -> Floats:
        """Return the makespan of each candidate.

        Args:
            times: (3, stages, candidates)
            hop: (boundaries,)
            transfer: (boundaries, candidates)
        """
        batches = range(0, times.shape[2], _BATCH)
        ends = (self._ends(times[..., at : at + _BATCH], hop, transfer[:, at : at + _BATCH]) for at in batches)
        return np.concatenate([batch.max(axis=0) for batch in ends])

    def longest_path(self, times: Floats, hop: Floats, transfer: Floats) -> LongestPath:
        """Return a longest path for times (3, stages), hops (boundaries,) and transfers (boundaries,)."""
        ends = self._ends(times[..., None], hop, transfer[:, None])[:, 0]
        arrivals = ends[self._predecessors] + self._lags(hop, transfer[:, None])[self._boundary, 0]
        rows, last = np.arange(self._end), arrivals.argmax(axis=1)
        predecessors, crossed = self._predecessors[rows, last].tolist(), self._boundary[rows, last].tolist()
        path = [int(ends[:-1].argmax())]
        while predecessors[path[-1]] != self._end:
            path.append(predecessors[path[-1]])
        passed = np.bincount(self._duration[path], minlength=len(self._work) + len(hop)).astype(np.float64)
        hops = np.bincount([crossed[node] + 1 for node in path], minlength=len(hop) + 1)[1:].astype(np.float64)
        transfers = passed[len(self._work) :] if self._queued else hops
        return LongestPath(np.tensordot(passed[: len(self._work)], self._work, 1), hops, transfers)

    def _ends(self, times: Floats, hop: Floats, transfer: Floats) -> Floats:
        """Return when each node ends: (nodes + 1, candidates). The last row is 0."""
        durations = np.concatenate([np.tensordot(self._work, times, 2), transfer])
        lags = self._lags(hop, transfer) if hop.any() or not self._queued else None
        ends = np.empty((self._end + 1, times.shape[2]))
        ends[-1] = 0.0
        for first, last in pairwise(self._levels):
            latest = ends[self._predecessors[first:last, 0]]
            if lags is not None:
                latest += lags[self._boundary[first:last, 0]]
            for way in range(1, self._predecessors.shape[1]):
                arrival = ends[self._predecessors[first:last, way]]
                if lags is not None:
                    arrival += lags[self._boundary[first:last, way]]
                np.maximum(latest, arrival, out=latest)
            np.add(latest, durations[self._duration[first:last]], out=ends[first:last])
        return ends

    def _lags(self, hop: Floats, transfer: Floats) -> Floats:
        """Return what passes on an edge over each boundary, and on one that crosses none: (boundaries + 1,
        candidates)."""
        lags = hop[:, None] if self._queued else hop[:, None] + transfer
        return np.concatenate([lags, np.zeros((1, lags.shape[1]))])


def _nodes(schedule: Schedule, queued: bool) -> list[_Node]:
    nodes: list[_Node] = []
    node_of: dict[tuple[bool, int, int], int] = {}  # the node of each F and of each I or B
    for rank in range(schedule.ranks):
        for number, unit in enumerate(schedule.units(rank)):
            work = tuple((part, action.stage) for action in unit for part in PARTS[action.kind])
            node_of |= {_result(action): len(nodes) for action in unit if action.kind is not Kind.W}
            nodes.append(_Node(work, None, [(len(nodes) - 1, -1)] if number else []))
    sent: dict[tuple[int, int], int] = {}  # the last transfer so far from each rank to each other one
    for action, user, boundary in _crossings(schedule):
        source = node_of[_result(action)]
        if queued:
            link = schedule.placement[action.stage], schedule.placement[user.stage]
            nodes.append(_Node((), boundary, [(source, -1), *((sent[key], -1) for key in (link,) if key in sent)]))
            source = sent[link] = len(nodes) - 1
        nodes[node_of[_result(user)]].edges.append((source, boundary))
    return nodes


def _result(action: Action) -> tuple[bool, int, int]:
    return action.kind is Kind.F, action.stage, action.microbatch


def _crossings(schedule: Schedule) -> Iterator[tuple[Action, Action, int]]:
    """Yield what goes from one rank to another, for each sender in the order of its actions.

    As (the action that makes it, an action with the result of the one that needs it, the boundary).
    """
    for row in schedule.actions:
        for action in row:
            onward = action.kind is Kind.F
            target_stage = action.stage + (1 if onward else -1)
            if action.kind is Kind.W or not 0 <= target_stage < schedule.stages:
                continue
            if schedule.placement[action.stage] != schedule.placement[target_stage]:
                yield action, Action(target_stage, action.kind, action.microbatch), min(action.stage, target_stage)


def _levels(nodes: list[_Node]) -> list[int]:
    """Return for each node the largest number of nodes before it on a path."""
    missing = [len(node.edges) for node in nodes]
    users: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes):
        for predecessor, _ in node.edges:
            users[predecessor].append(number)
    levels = [0] * len(nodes)
    free = [number for number, count in enumerate(missing) if not count]
    while free:
        number = free.pop()
        for user in users[number]:
            levels[user] = max(levels[user], levels[number] + 1)
            missing[user] -= 1
            if not missing[user]:
                free.append(user)
    return levels


# ---- makespan --------------------------------------------------------------------------------------------------------


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
    forwards = [at for at, (kind, _) in enumerate(order) if kind is Kind.F]
    passed = np.zeros((len(order) + 1, len(TIMES)), np.int64)  # before each action
    for at, (kind, _) in enumerate(order):
        passed[at + 1, list(PARTS[kind])] = 1
    passed = passed.cumsum(axis=0)
    for turning in (forwards[:0], forwards[:1], forwards[-1:], forwards):
        for end, returns in ((len(order), False), (max(back.values()) + 1, True)):
            total, turns, at = passed[end], 0, 0
            for turn in turning:
                if at <= turn < end:
                    target = back[order[turn][1]]
                    total = total - (passed[target] - passed[turn + 1])  # skipped
                    turns, at = turns + 1, target
            forward, input_grad, weight_grad = total.tolist()
            yield StagePath(forward, input_grad, weight_grad, turns, returns, leaves=False)


def _not_dominated(paths: Sequence[StagePath]) -> list[StagePath]:
    """Return the paths except those that another path equals or exceeds in every figure."""
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
        self._senders = _senders(schedule)

    @property
    def steps(self) -> int:
        return _graph_of(self._schedule, False).steps

    def _graph(self, times: Floats, transfers: Floats) -> ActionGraph:
        """Return the graph that times candidates: the smaller one if no transfer of theirs waits for another.

        A link is free when the next transfer begins, if a transfer takes no longer than each action that sends over the
        link: between two transfers their sender runs the action that sends the second one.

        Args:
            times: (3, stages, candidates)
            transfers: (boundaries, candidates)
        """
        waits = False
        if transfers.any():
            kinds, stages, boundaries, starts = self._senders
            shortest = np.minimum.reduceat(times[kinds, stages], starts)
            longest = np.maximum.reduceat(transfers[boundaries], starts)
            waits = bool(self._schedule.overlapped) or bool((longest > shortest).any())
        return _graph_of(self._schedule, waits)

    def values(self, cuts: Integers) -> Floats:
        times, transfers = self.times(cuts), self.transfers(cuts)
        return self._graph(times, transfers).makespans(times, self._latency, transfers)

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
        graph = self._graph(times[..., None], transfers[:, None])
        path = graph.longest_path(times, self._latency, transfers)
        return self._linear_bound(path.work, float(path.hops @ self._latency), path.transfers)

    def stage_bound(self, stage: int, begins: Integers, ends: Integers) -> Floats:
        return np.stack([self._bound_with(sums, stage, begins, ends) for sums in self._sums.by_option])

    def _bound_with(self, stage_sums: Floats, stage: int, begins: Integers, ends: Integers) -> Floats:
        """Return `stage_bound` for a stage with the option whose sums are ``stage_sums``: (ends, begins)."""
        times = stage_sums[: len(TIMES), ends, None] - stage_sums[: len(TIMES), None, begins]
        sums, hops = self._sums.prefix_sums[: len(TIMES)], np.append(0.0, np.cumsum(self._latency))
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
        weights = np.zeros((len(QUANTITIES), self._schedule.stages))
        weights[: len(TIMES)] = work
        weights[INPUT_GRAD, 0] = weights[WEIGHT_GRAD, 0]
        return LinearBound(self._sums, weights, transfers * self._per_byte, constant)


def _senders(schedule: Schedule) -> tuple[Integers, Integers, Integers, Integers]:
    """Return (F or I, stage, boundary) of all that is sent, by link, and where each link begins."""
    sent = []
    for boundary, (rank, next_rank) in enumerate(pairwise(schedule.placement)):
        if rank != next_rank:
            sent.append(((rank, next_rank), FORWARD, boundary, boundary))
            sent.append(((next_rank, rank), INPUT_GRAD, boundary + 1, boundary))
    sent = sorted(member for member in sent if schedule.trains or member[1] == FORWARD)
    starts = [at for at, member in enumerate(sent) if not at or member[0] != sent[at - 1][0]]
    kinds, stages, boundaries = np.array([member[1:] for member in sent], np.int64).reshape(-1, 3).T
    return kinds, stages, boundaries, np.array(starts, np.int64)


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
        raise PlanError(f"{description}, not {len(pair)} figures.", "link=(1e-5, 25e9).")
    latency, bandwidth = pair
    if not (0 <= latency < math.inf and bandwidth > 0):
        raise PlanError(
            f"The link between ranks {rank} and {peer} has a latency of {latency!r} and a bandwidth of {bandwidth!r}. "
            "A latency is in seconds, from 0 on; a bandwidth in bytes per second, above 0.",
            "link=(1e-5, 25e9).",
        )
    return float(latency), 1 / bandwidth
