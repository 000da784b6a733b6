"""Orders of sharded stages in which a stage stays whole for longer, so that its parameters are gathered less often."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from random import Random

from pipegraph.errors import ScheduleError
from pipegraph.schedule.check import check
from pipegraph.schedule.order_search.order_problem import PER_STAGE, Orders
from pipegraph.schedule.recipes.one_f_one_b import one_f_one_b, zero_bubble
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.stages import loop
from pipegraph.schedule.unshard_windows import residencies

_GROUPS = 16  # sizes of groups that are tried, at most

Cost = tuple[float, float, float]
"""(makespan, gathers, activations) of orders: the first figure in which two differ decides."""

IMPOSSIBLE_COST: Cost = (math.inf, math.inf, math.inf)


def grouped_schedules(placement: tuple[int, ...], microbatches: int) -> Iterator[Schedule]:
    """Yield interleaved schedules in which larger groups of microbatches pass a stage before a rank goes to its next.

    Their bubble is that of groups of p. A group of g holds (v − 1)(g − p) activations more, and gathers p/g as often.
    """
    ranks = max(placement) + 1
    chunks = len(placement) // ranks
    if chunks == 1 or placement != loop(ranks, chunks):
        return
    sizes = range(ranks + 1, microbatches + 1)
    for group in sizes[:: -max(1, math.ceil(len(sizes) / _GROUPS))]:
        for name, orders, lead in (("interleaved-1f1b", one_f_one_b, 2), ("interleaved-zb", zero_bubble, 1)):
            rows = tuple(map(tuple, orders(lead, ranks, microbatches, chunks, group)))
            schedule = Schedule(f"{name} in groups of {group}", placement, microbatches, rows)
            try:
                check(schedule)
            except ScheduleError:
                continue  # the last group is too small
            yield schedule


def climb_gathers(
    orders: Orders, resident: int, cost: Callable[[Orders, Cost], Cost], runs: int, random: Random
) -> tuple[Cost, Orders]:
    """Bring the uses of a stage from one gather to another, and keep what costs no more, in at most so many runs.

    ``cost`` may return anything larger for orders that cost more than what it is given.
    """
    best = cost(orders, IMPOSSIBLE_COST)
    for _ in range(runs):
        rank = random.randrange(len(orders))
        order = _with_one_gather_less(orders[rank], resident, random)
        if order is not None:
            changed = [*orders[:rank], order, *orders[rank + 1 :]]
            if (result := cost(changed, best)) <= best:
                orders, best = changed, result
    return best, orders


def _with_one_gather_less(order: Sequence[int], resident: int, random: Random) -> list[int] | None:
    """Return the order with all uses of a residency next to one before of the same stage; None if there is none."""
    stages = [code // PER_STAGE for code in order]
    all_residencies = residencies([(stage,) for stage in stages], resident)
    again = [
        at
        for at, residency in enumerate(all_residencies)
        if residency.stage in {predecessor.stage for predecessor in all_residencies[:at]}
    ]
    if not again:
        return None
    repeat = all_residencies[random.choice(again)]
    previous = max(
        (
            residency
            for residency in all_residencies
            if residency.stage == repeat.stage and residency.last < repeat.first
        ),
        key=lambda residency: residency.last,
    )
    moved, to = random.choice(((repeat, previous.last + 1), (previous, repeat.first)))
    uses = [at for at in range(moved.first, moved.last + 1) if stages[at] == moved.stage]
    inside = {*uses}
    head = [code for at, code in enumerate(order[:to]) if at not in inside]
    tail = [code for at, code in enumerate(order[to:], to) if at not in inside]
    return [*head, *(order[at] for at in uses), *tail]
