"""Orders that a simple rule makes: every rank begins what has arrived. A search starts from them."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

from pipegraph.schedule.order_search.order_problem import (
    FORWARD,
    INPUT_GRAD,
    PER_STAGE,
    WEIGHT_GRAD,
    OrderProblem,
    Orders,
)


class GreedyRule(NamedTuple):
    """What a rank does first.

    Attributes:
        in_flight: for each stage, how many microbatches may be between F and I.
        overrun: the part of a W that may delay the next arrival.
        priority: for each code; of the F and I that have arrived, the one with the smallest number begins.
    """

    in_flight: tuple[int, ...]
    overrun: float
    priority: tuple[int, ...]


def greedy_orders(problem: OrderProblem, rule: GreedyRule) -> Orders | None:
    """Let every rank, as soon as it is free, begin an F or I that has arrived.

    A rank with nothing to begin does a W if that fits before the next arrival, or if memory is full. An F leaves room
    for one more activation on each later stage of its rank, so that the oldest microbatch always gets through.

    Returns None if the ranks cannot come to an end.
    """
    run = _GreedyRun(problem, rule)
    while run.free:
        time, rank = heapq.heappop(run.free)
        if run.clock[rank] <= time:
            run.step(time, rank)
    expected = PER_STAGE * problem.microbatches
    done = all(len(order) == expected * len(stages) for order, stages in zip(run.orders, problem.stages, strict=True))
    return run.orders if done else None


class _GreedyRun:
    """The state of all ranks while greedy orders are made."""

    def __init__(self, problem: OrderProblem, rule: GreedyRule) -> None:
        self.orders: Orders = [[] for _ in range(problem.ranks)]
        self.clock = [0.0] * problem.ranks
        self.free = [(0.0, rank) for rank in range(problem.ranks)]  # a heap
        self._problem, self._rule = problem, rule
        self._begun = [0] * len(problem.duration)  # for each code
        self._arrivals: list[list[float]] = [[] for _ in problem.duration]
        self._arrivals[FORWARD] = [0.0] * problem.microbatches
        self._held = [0] * problem.ranks

    def step(self, now: float, rank: int) -> None:
        """Let a free rank begin an action, or wait."""
        code, next_arrival, full = self._arrived(now, rank)
        if code is None:
            code = self._weight_grad(rank)
            inside = 1.0 - self._rule.overrun
            if code is not None and not full and now + self._problem.duration[code] * inside > next_arrival:
                code = None
        if code is not None:
            self._begin(code, now, rank)
        elif next_arrival < math.inf:
            self.clock[rank] = now
            heapq.heappush(self.free, (next_arrival, rank))

    def _arrived(self, now: float, rank: int) -> tuple[int | None, float, bool]:
        """Return (the F or I to begin, the time of the next known arrival, whether an F lacks memory to begin)."""
        problem, begun, priority = self._problem, self._begun, self._rule.priority
        best, next_arrival, full = None, math.inf, False
        stages = problem.stages[rank]
        for later_stages, stage in zip(range(len(stages) - 1, -1, -1), stages, strict=True):
            forward = PER_STAGE * stage
            backward = forward + INPUT_GRAD
            in_flight = begun[forward] - begun[backward]
            for code in (backward, forward):
                if (code == backward and not in_flight) or (
                    code == forward and in_flight >= self._rule.in_flight[stage]
                ):
                    continue
                arrivals = self._arrivals[code]
                if code == backward and stage == problem.last:
                    arrival = 0.0
                elif begun[code] < len(arrivals):
                    arrival = arrivals[begun[code]]
                else:
                    continue
                if arrival > now:
                    next_arrival = min(next_arrival, arrival)
                elif code == forward and self._held[rank] + 1 + later_stages > problem.memory_limit:
                    full = True
                elif best is None or priority[code] < priority[best]:
                    best = code
        return best, next_arrival, full

    def _weight_grad(self, rank: int) -> int | None:
        """Return the W for which the largest number of microbatches waits; None if there is none."""
        begun = self._begun
        waiting, code = max(
            (begun[code - 1] - begun[code], code)
            for code in (PER_STAGE * stage + WEIGHT_GRAD for stage in self._problem.stages[rank])
        )
        return code if waiting else None

    def _begin(self, code: int, now: float, rank: int) -> None:
        problem = self._problem
        self.orders[rank].append(code)
        self._begun[code] += 1
        self._held[rank] += (code % PER_STAGE == FORWARD) - (code % PER_STAGE == WEIGHT_GRAD)
        end = self.clock[rank] = now + problem.duration[code]
        heapq.heappush(self.free, (end, rank))
        target = problem.target[code]
        if target >= 0:
            arrival = end + problem.transfer[code] + problem.hop[code]
            self._arrivals[target].append(arrival)
            other = problem.rank[target]
            heapq.heappush(self.free, (max(arrival, self.clock[other]), other))
