"""The orders from which a search starts: those of named schedules, and the rules of greedy ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.build import build
from pipegraph.schedule.order_search.greedy_orders import GreedyRule
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

# What greedy rules differ in: how many times as many microbatches as in 1F1B are in flight on each stage (None: all),
# the overrun, and the priorities of (I, F) on the last stage of a rank and on its other stages.
_IN_FLIGHT = (None, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0)
_OVERRUNS = (0.0, 0.3, 0.6, 0.9)
_PRIORITIES = ((0, 2, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 3, 1))


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
    priorities = _PRIORITIES if any(len(held) > 1 for held in problem.stages) else _PRIORITIES[:2]
    deepest = {held[-1] for held in problem.stages}
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
