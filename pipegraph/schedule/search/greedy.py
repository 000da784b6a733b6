"""Orders made by always doing what is there to be done: the start of a search."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from pipegraph.schedule.search.order_problem import FORWARD, INPUT_GRAD, PER_STAGE, WEIGHT_GRAD, Orders, Problem


class Policy(NamedTuple):
    """What a rank does first."""

    most: tuple[int, ...]
    """of each stage, how many microbatches may be between F and I"""
    overrun: tuple[float, ...]
    """of each rank, what part of a W may delay the next arrival"""
    priority: tuple[float, ...]
    """of each code: of the F and I that have arrived, that with the least begins"""


def greedy(problem: Problem, policy: Policy) -> Orders | None:
    """Let every rank, as soon as it is free, begin an F or I that has arrived.

    A rank with nothing to begin does a W if that fits before the next arrival, or if memory is full. An F leaves room
    for one more activation on each later stage of its rank, so that the oldest microbatch always gets through. None
    where all comes to a stop.
    """
    state = _State(problem, policy)
    while state.free:
        time, rank = heapq.heappop(state.free)
        if state.clock[rank] <= time:
            state.step(time, rank)
    whole = PER_STAGE * problem.microbatches
    done = all(len(order) == whole * len(stages) for order, stages in zip(state.orders, problem.stages, strict=True))
    return state.orders if done else None


class _State:
    """How far a greedy order has come."""

    def __init__(self, problem: Problem, policy: Policy) -> None:
        self.orders: Orders = [[] for _ in range(problem.ranks)]
        self.clock = [0.0] * problem.ranks
        self.free = [(0.0, rank) for rank in range(problem.ranks)]  # a heap
        self._problem, self._policy = problem, policy
        self._count = [0] * len(problem.duration)  # of each code, how many have begun
        self._arrivals: list[list[float]] = [[] for _ in problem.duration]
        self._arrivals[FORWARD] = [0.0] * problem.microbatches
        self._held = [0] * problem.ranks

    def step(self, now: float, rank: int) -> None:
        """Let a free rank begin something, or wait."""
        code, soon, full = self._arrived(now, rank)
        if code is None:
            code = self._weight_grad(rank)
            inside = 1.0 - self._policy.overrun[rank]
            if code is not None and not full and now + self._problem.duration[code] * inside > soon:
                code = None
        if code is not None:
            self._begin(code, now, rank)
        elif soon < math.inf:
            self.clock[rank] = now
            heapq.heappush(self.free, (soon, rank))

    def _arrived(self, now: float, rank: int) -> tuple[int | None, float, bool]:
        """The F or I to begin, when the next one known of arrives, and whether memory keeps an F from beginning."""
        problem, count, priority = self._problem, self._count, self._policy.priority
        best, soon, full = None, math.inf, False
        stages = problem.stages[rank]
        for later, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
            forward = PER_STAGE * stage
            backward = forward + INPUT_GRAD
            begun, ended = count[forward], count[backward]
            for code in (backward, forward):
                if (code == backward and ended == begun) or (
                    code == forward and begun - ended >= self._policy.most[stage]
                ):
                    continue
                arrivals = self._arrivals[code]
                if code == backward and stage == problem.last:
                    arrival = 0.0
                elif count[code] < len(arrivals):
                    arrival = arrivals[count[code]]
                else:
                    continue
                if arrival > now:
                    soon = min(soon, arrival)
                elif code == forward and self._held[rank] + 1 + later > problem.memory_limit:
                    full = True
                elif best is None or priority[code] < priority[best]:
                    best = code
        return best, soon, full

    def _weight_grad(self, rank: int) -> int | None:
        """The W that most microbatches wait for."""
        count = self._count
        left = [
            (count[code - 1] - count[code], code)
            for code in (PER_STAGE * stage + WEIGHT_GRAD for stage in self._problem.stages[rank])
        ]
        most, code = max(left)
        return code if most else None

    def _begin(self, code: int, now: float, rank: int) -> None:
        problem = self._problem
        self.orders[rank].append(code)
        self._count[code] += 1
        self._held[rank] += (code % PER_STAGE == FORWARD) - (code % PER_STAGE == WEIGHT_GRAD)
        end = self.clock[rank] = now + problem.duration[code]
        heapq.heappush(self.free, (end, rank))
        target = problem.target[code]
        if target >= 0:
            arrival = end + problem.transfer[code] + problem.hop[code]
            self._arrivals[target].append(arrival)
            other = problem.rank[target]
            heapq.heappush(self.free, (max(arrival, self.clock[other]), other))
