"""The orders that a search works on, how long they take, and those from which it starts.

An action is written as a code: 3 × its stage, plus 0 for F, 1 for I, 2 for W. Its microbatch is not written. All
microbatches take the same time, so they can come in order on every stage: the n-th occurrence of a code is of
microbatch n.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import NamedTuple

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.build import build
from pipegraph.schedule.recipes import names
from pipegraph.schedule.schedule import Schedule
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
    """Times, placement, microbatches and the memory limit of each rank, by code.

    The n-th action of a code waits for the n-th action of the code ``source``, −1 if it waits for none; ``target`` is
    the inverse.
    """

    def __init__(self, times: Times, placement: Sequence[int], microbatches: int, memory_limits: Sequence[int]) -> None:
        stages = len(placement)
        self.microbatches = microbatches
        self.memory_limits = memory_limits
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
                    full = forward and activations[rank] == self.memory_limits[rank]
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


# ---- starting orders -------------------------------------------------------------------------------------------------
# Those of named schedules, and greedy ones: every rank begins what has arrived.


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
                elif code == forward and self._activations[rank] + 1 + later_stages > problem.memory_limits[rank]:
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
