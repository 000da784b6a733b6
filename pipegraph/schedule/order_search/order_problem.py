"""The orders that a search works on, and how long they take.

An action is written as a code: 3 × its stage, plus 0 for F, 1 for I, 2 for W. Its microbatch is not written. All
microbatches take the same time, so they can come in order on every stage: the n-th occurrence of a code is of
microbatch n.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pipegraph.schedule.times import Times

FORWARD, INPUT_GRAD, WEIGHT_GRAD, PER_STAGE = 0, 1, 2, 3

Orders = list[list[int]]
"""For each rank, the codes of its actions."""

CriticalPath = list[tuple[int, int]]
"""(rank, position) of actions, in order of time"""


class TimedOrders(NamedTuple):
    """Orders, and when each of their actions ends. The makespan of impossible orders is infinite."""

    makespan: float
    orders: Orders
    ends: list[list[float]]


IMPOSSIBLE = TimedOrders(math.inf, [], [])

_TINY = 1e-9  # times that differ by less than this part of the makespan are equal


class OrderProblem:
    """Times, placement, microbatches and memory limit, by code.

    The n-th action of a code waits for the n-th action of the code ``source``, −1 if it waits for none; ``target`` is
    the inverse.
    """

    def __init__(self, times: Times, placement: Sequence[int], microbatches: int, memory_limit: int) -> None:
        stages = len(placement)
        self.microbatches = microbatches
        self.memory_limit = memory_limit
        self.ranks = max(placement) + 1
        self.stages = [[stage for stage in range(stages) if placement[stage] == rank] for rank in range(self.ranks)]
        self.last = stages - 1
        self.rank = [placement[code // PER_STAGE] for code in range(PER_STAGE * stages)]
        self.duration = [
            figure for three in zip(times.forward, times.input_grad, times.weight_grad, strict=True) for figure in three
        ]
        self.source = [-1] * (PER_STAGE * stages)
        self.target = [-1] * (PER_STAGE * stages)
        self.hop = [0.0] * (PER_STAGE * stages)
        self.transfer = [0.0] * (PER_STAGE * stages)
        self.link = [-1] * (PER_STAGE * stages)  # a number for (from rank, to rank)
        for stage, (rank, next_rank) in enumerate(pairwise(placement)):
            forward, backward = PER_STAGE * stage, PER_STAGE * stage + INPUT_GRAD
            self._connect(forward, forward + PER_STAGE)
            self._connect(backward + PER_STAGE, backward)
            if rank != next_rank:
                self.hop[forward] = self.hop[backward + PER_STAGE] = times.hop_of((stage, stage + 1))
                self.transfer[forward] = self.transfer[backward + PER_STAGE] = times.transfer_of((stage, stage + 1))
                self.link[forward] = rank * self.ranks + next_rank
                self.link[backward + PER_STAGE] = next_rank * self.ranks + rank

    def _connect(self, source: int, target: int) -> None:
        self.target[source], self.source[target] = target, source

    # `simulate` does the same for any schedule, with events. A search runs some ten thousand orders, so these two
    # compute nothing but the ends of actions, and have their inner loops written out.

    def run(self, orders: Orders) -> TimedOrders:
        """Start every action as early as its order, and the action that it waits for, allow."""
        source, duration, hop = self.source, self.duration, self.hop
        arrivals: list[list[float]] = [[] for _ in duration]
        used = [0] * len(duration)
        link_ends = self._links()
        ends: list[list[float]] = [[] for _ in orders]
        moving = True
        while moving:
            moving = False
            for order, row in zip(orders, ends, strict=True):
                begin = len(row)
                clock = row[-1] if row else 0.0
                for code in order[begin:]:
                    producer = source[code]
                    if producer >= 0:
                        number, source_arrivals = used[code], arrivals[producer]
                        if number == len(source_arrivals):
                            break
                        used[code] = number + 1
                        if source_arrivals[number] > clock:
                            clock = source_arrivals[number]
                    clock += duration[code]
                    row.append(clock)
                    arrivals[code].append(self._arrival(code, clock, link_ends) if link_ends else clock + hop[code])
                moving = moving or len(row) > begin
        if any(len(row) < len(order) for order, row in zip(orders, ends, strict=True)):
            return IMPOSSIBLE
        return TimedOrders(max(row[-1] for row in ends), orders, ends)

    def fill(self, skeletons: Orders, overrun: Sequence[float]) -> TimedOrders:
        """Run orders of F and I alone, and put each W into the first gap after its I that has room for it.

        ``overrun`` is, for each rank, the part of a W that may stick out of its gap. If memory is full and an F is
        next, a W comes before it. The remaining W come last.
        """
        source, duration, hop = self.source, self.duration, self.hop
        arrivals: list[list[float]] = [[] for _ in duration]
        used = [0] * len(duration)
        link_ends = self._links()
        orders: Orders = [[] for _ in skeletons]
        ends: list[list[float]] = [[] for _ in skeletons]
        waiting: list[deque[int]] = [deque() for _ in skeletons]  # W whose I is done
        position, activations = [0] * self.ranks, [0] * self.ranks
        moving = True
        while moving:
            moving = False
            for rank, skeleton in enumerate(skeletons):
                order, row, ready, begin = orders[rank], ends[rank], waiting[rank], position[rank]
                clock = row[-1] if row else 0.0
                inside = 1.0 - overrun[rank]
                for code in skeleton[begin:]:
                    producer, start = source[code], 0.0
                    if producer >= 0:
                        number, source_arrivals = used[code], arrivals[producer]
                        if number == len(source_arrivals):
                            break
                        start = source_arrivals[number]
                        used[code] = number + 1
                    forward = code % PER_STAGE == FORWARD
                    full = forward and activations[rank] == self.memory_limit
                    if full and not ready:
                        return IMPOSSIBLE
                    while (full or start > clock) and ready and (full or clock + duration[ready[0]] * inside <= start):
                        order.append(ready.popleft())
                        clock += duration[order[-1]]
                        row.append(clock)
                        activations[rank] -= 1
                        full = False
                    if forward:
                        activations[rank] += 1
                    else:
                        ready.append(code + 1)
                    clock = (start if start > clock else clock) + duration[code]
                    order.append(code)
                    row.append(clock)
                    arrivals[code].append(self._arrival(code, clock, link_ends) if link_ends else clock + hop[code])
                    position[rank] += 1
                moving = moving or position[rank] > begin
        if any(at < len(skeleton) for at, skeleton in zip(position, skeletons, strict=True)):
            return IMPOSSIBLE
        for order, row, ready in zip(orders, ends, waiting, strict=True):
            for code in ready:
                order.append(code)
                row.append(row[-1] + duration[code])
        return TimedOrders(max(row[-1] for row in ends), orders, ends)

    def _links(self) -> list[float]:
        """Return when the last transfer over each link has left; an empty list if transfers take no time."""
        return [0.0] * self.ranks**2 if any(self.transfer) else []

    def _arrival(self, code: int, end: float, link_ends: list[float]) -> float:
        """Return when a value that is made at ``end`` arrives."""
        link = self.link[code]
        if link >= 0:
            end = link_ends[link] = max(end, link_ends[link]) + self.transfer[code]
        return end + self.hop[code]

    def critical_path(self, timed: TimedOrders) -> CriticalPath:
        """Return the actions that make up the makespan. Each starts when the one before ends or its value arrives."""
        rank = max(range(self.ranks), key=lambda rank: timed.ends[rank][-1])
        at = len(timed.orders[rank]) - 1
        places: list[list[int]] = [[] for _ in self.duration]  # of each code, its positions
        number: list[list[int]] = [[] for _ in timed.orders]  # of each position, which occurrence of its code it is
        for order, numbers in zip(timed.orders, number, strict=True):
            for position, code in enumerate(order):
                numbers.append(len(places[code]))
                places[code].append(position)
        path: CriticalPath = []
        while at >= 0:
            path.append((rank, at))
            code = timed.orders[rank][at]
            start = timed.ends[rank][at] - self.duration[code]
            waited = at == 0 or start > timed.ends[rank][at - 1] + _TINY * timed.makespan
            if waited and self.source[code] < 0:
                break
            if waited:
                at, rank = places[self.source[code]][number[rank][at]], self.rank[self.source[code]]
            else:
                at -= 1
        return path[::-1]
