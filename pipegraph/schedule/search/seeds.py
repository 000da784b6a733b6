"""Where a search starts: the named schedules, and greedy orders."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.build import build
from pipegraph.schedule.recipes import names
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.search.greedy import Policy
from pipegraph.schedule.search.order_problem import FORWARD, INPUT_GRAD, PER_STAGE, WEIGHT_GRAD, Orders, Problem

_CODES = {
    Kind.F: (FORWARD,),
    Kind.I: (INPUT_GRAD,),
    Kind.W: (WEIGHT_GRAD,),
    Kind.B: (INPUT_GRAD, WEIGHT_GRAD),
}
_KINDS = {FORWARD: Kind.F, INPUT_GRAD: Kind.I, WEIGHT_GRAD: Kind.W}

# Of the greedy orders: how many times as far as in 1F1B each stage may run ahead, what part of a W may delay what comes
# next, and the priorities of I and F, on the last stage of a rank and on its others.
_AHEAD = (None, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0)
_OVERRUNS = (0.0, 0.3, 0.6, 0.9)
_PRIORITIES = ((0, 2, 1, 3), (0, 1, 2, 3), (1, 0, 2, 3), (2, 0, 3, 1))


def named(placement: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    """Every named schedule with a backward that has this placement and takes these numbers."""
    ranks = max(placement) + 1
    for name in names():
        try:
            schedule = build(name, ranks, microbatches, len(placement) // ranks)
        except ScheduleError:
            continue  # it cannot have these numbers
        if schedule.placement == placement and schedule.trains:
            yield schedule


def orders_of(schedule: Schedule) -> Orders:
    """A schedule's orders as codes, each B as I and W."""
    return [[PER_STAGE * a.stage + code for a in row for code in _CODES[a.kind]] for row in schedule.actions]


def policies(problem: Problem) -> Iterator[Policy]:
    """The policies of the greedy orders to begin with."""
    stages = range(problem.last + 1)
    kinds = _PRIORITIES if any(len(held) > 1 for held in problem.stages) else _PRIORITIES[:2]
    deepest = {held[-1] for held in problem.stages}
    for ahead, overrun, (backward, forward, other_backward, other_forward) in product(_AHEAD, _OVERRUNS, kinds):
        most = [
            problem.microbatches if ahead is None else 1 + round(ahead * (problem.last - stage)) for stage in stages
        ]
        priority = [
            place
            for stage in stages
            for place in ((forward, backward, 1) if stage in deepest else (other_forward, other_backward, 1))
        ]
        yield Policy(tuple(most), (overrun,) * problem.ranks, tuple(priority))


def skeleton_of(orders: Orders) -> Orders:
    """The F and I alone."""
    return [[code for code in order if code % PER_STAGE != WEIGHT_GRAD] for order in orders]


def actions_of(orders: Orders) -> tuple[tuple[Action, ...], ...]:
    """Orders of codes as actions, the n-th occurrence of a code for microbatch n."""
    count: dict[int, int] = {}
    rows = []
    for order in orders:
        row = []
        for code in order:
            number = count[code] = count.get(code, -1) + 1
            row.append(Action(code // PER_STAGE, _KINDS[code % PER_STAGE], number))
        rows.append(tuple(row))
    return tuple(rows)
