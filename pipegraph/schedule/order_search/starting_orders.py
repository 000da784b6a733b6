"""The orders from which a search starts: those of named schedules, and greedy ones.

A simple rule makes greedy orders: every rank begins what has arrived.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.build import build
from pipegraph.schedule.order_search.order_problem import (
    FORWARD,
    INPUT_GRAD,
    PER_STAGE,
    WEIGHT_GRAD,
    OrderProblem,
    Orders,
)
from pipegraph.schedule.recipes import names
from pipegraph.schedule.schedule import Schedule

_CODES = {
    Kind.F: (FORWARD,),
    Kind.I: (INPUT_GRAD,),
    Kind.W: (WEIGHT_GRAD,),
    Kind.B: (INPUT_GRAD, WEIGHT_GRAD),
}
_KINDS = {FORWARD: Kind.F, INPUT_GRAD: Kind.I, WEIGHT_GRAD: Kind.W}

# The settings of greedy rules: the number of microbatches in flight on each stage, in multiples of that of 1F1B (None:
# all), the overrun, and the priorities of (I, F) on the last stage of a rank and on its other stages.
_IN_FLIGHT = (None, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0)
_OVERRUNS = (0.0, 0.3, 0.6, 0.9)
_PRIORITIES = ((0, 2, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 3, 1))


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
        self._activations = [0] * problem.ranks

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
                elif code == forward and self._activations[rank] + 1 + later_stages > problem.memory_limit:
                    full = True
                elif best is None or priority[code] < priority[best]:
                    best = code
        return best, next_arrival, full

    def _weight_grad(self, rank: int) -> int | None:
        """Return the W for which the largest number of microbatches waits; None if no microbatch waits."""
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
        self._activations[rank] += (code % PER_STAGE == FORWARD) - (code % PER_STAGE == WEIGHT_GRAD)
        end = self.clock[rank] = now + problem.duration[code]
        heapq.heappush(self.free, (end, rank))
        target = problem.target[code]
        if target >= 0:
            arrival = end + problem.transfer[code] + problem.hop[code]
            self._arrivals[target].append(arrival)
            target_rank = problem.rank[target]
            heapq.heappush(self.free, (max(arrival, self.clock[target_rank]), target_rank))


def named_schedules(placement: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    """Yield every named schedule with a backward that has this placement and can have these numbers."""
    ranks = max(placement) + 1
    for name in names():
        try:
            schedule = build(name, ranks, microbatches, len(placement) // ranks)
        except ScheduleError:
            continue  # it cannot have these numbers
        if schedule.placement == placement and schedule.trains:
            yield schedule


def greedy_rules(problem: OrderProblem) -> Iterator[GreedyRule]:
    """Yield the rules of the greedy orders from which a search starts."""
    stages = range(problem.last + 1)
    priorities = _PRIORITIES if any(len(rank_stages) > 1 for rank_stages in problem.stages) else _PRIORITIES[:2]
    deepest = {rank_stages[-1] for rank_stages in problem.stages}
    for factor, overrun, (backward, forward, other_backward, other_forward) in product(
        _IN_FLIGHT, _OVERRUNS, priorities
    ):
        in_flight = [
            problem.microbatches if factor is None else 1 + round(factor * (problem.last - stage)) for stage in stages
        ]
        priority = [
            place
            for stage in stages
            for place in ((forward, backward, 1) if stage in deepest else (other_forward, other_backward, 1))
        ]
        yield GreedyRule(tuple(in_flight), overrun, tuple(priority))


def orders_of(schedule: Schedule) -> Orders:
    """Return the orders of a schedule as codes, each B as I and W."""
    return [[PER_STAGE * a.stage + code for a in row for code in _CODES[a.kind]] for row in schedule.actions]


def without_weight_grads(orders: Orders) -> Orders:
    return [[code for code in order if code % PER_STAGE != WEIGHT_GRAD] for order in orders]


def actions_of(orders: Orders) -> tuple[tuple[Action, ...], ...]:
    """Return orders of codes as actions: the n-th occurrence of a code is for microbatch n."""
    count: dict[int, int] = {}
    rows = []
    for order in orders:
        row = []
        for code in order:
            number = count[code] = count.get(code, -1) + 1
            row.append(Action(code // PER_STAGE, _KINDS[code % PER_STAGE], number))
        rows.append(tuple(row))
    return tuple(rows)
