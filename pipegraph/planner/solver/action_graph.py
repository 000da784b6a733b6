"""A schedule as a graph of its actions, timed for many cuts at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.planner.solver.prefix_sums import PARTS, Floats
from pipegraph.schedule import Action, Kind, Schedule

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
    sender's actions. If they take time (``queued``), they are nodes too. Nodes are sorted by level, the largest number
    of nodes on a path to them, and the nodes of one level are timed together.
    """

    def __init__(self, schedule: Schedule, queued: bool) -> None:
        nodes = _nodes(schedule, queued)
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
        arrivals = ends[self._predecessors] + np.append(hop, 0.0)[self._boundary]
        rows, last = np.arange(self._end), arrivals.argmax(axis=1)
        predecessors, crossed = self._predecessors[rows, last].tolist(), self._boundary[rows, last].tolist()
        path = [int(ends[:-1].argmax())]
        while predecessors[path[-1]] != self._end:
            path.append(predecessors[path[-1]])
        passed = np.bincount(self._duration[path], minlength=len(self._work) + len(hop)).astype(np.float64)
        hops = np.bincount([crossed[node] + 1 for node in path], minlength=len(hop) + 1)[1:].astype(np.float64)
        return LongestPath(np.tensordot(passed[: len(self._work)], self._work, 1), hops, passed[len(self._work) :])

    def _ends(self, times: Floats, hop: Floats, transfer: Floats) -> Floats:
        """Return when each node ends: (nodes + 1, candidates). The last row is 0."""
        durations = np.concatenate([np.tensordot(self._work, times, 2), transfer])
        lags = np.append(hop, 0.0)[self._boundary][..., None] if hop.any() else None
        ends = np.empty((self._end + 1, times.shape[2]))
        ends[-1] = 0.0
        for first, last in pairwise(self._levels):
            latest = ends[self._predecessors[first:last, 0]]
            if lags is not None:
                latest += lags[first:last, 0]
            for way in range(1, self._predecessors.shape[1]):
                arrival = ends[self._predecessors[first:last, way]]
                if lags is not None:
                    arrival += lags[first:last, way]
                np.maximum(latest, arrival, out=latest)
            np.add(latest, durations[self._duration[first:last]], out=ends[first:last])
        return ends


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
