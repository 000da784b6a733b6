"""Hill climbing: small random changes to orders, of which those that make them no slower are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple, TypeVar

from pipegraph.schedule.order_search.order_problem import (
    FORWARD,
    PER_STAGE,
    WEIGHT_GRAD,
    CriticalPath,
    OrderProblem,
    Orders,
    TimedOrders,
)

_HISTORY = 80
"""Late acceptance hill climbing (Burke and Bykov, 2017): a change is kept if the result is no slower than the orders
were so many changes ago. So the search crosses level ground and gets out of shallow hollows."""

_OVERRUNS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_REACH = 8  # the number of places by which an action moves, at most


class Skeleton(NamedTuple):
    """Orders of F and I, and the overrun of each rank, by which `OrderProblem.fill` places the W."""

    orders: Orders
    overrun: tuple[float, ...]


_State = TypeVar("_State", Orders, Skeleton)


def climb_skeleton(problem: OrderProblem, start: Skeleton, runs: int, goal: float, random: Random) -> TimedOrders:
    """Return the fastest orders that changes of a skeleton lead to, in at most so many runs."""

    def change(skeleton: Skeleton, timed: TimedOrders, path: CriticalPath) -> Skeleton | None:
        if random.random() < 0.25:
            rank = random.randrange(problem.ranks)
            overrun = random.choice(_OVERRUNS)
            return Skeleton(skeleton.orders, (*skeleton.overrun[:rank], overrun, *skeleton.overrun[rank + 1 :]))
        rank, place = random.choice(path)
        at = sum(code % PER_STAGE != WEIGHT_GRAD for code in timed.orders[rank][:place])
        order = _moved(skeleton.orders[rank], at + random.randint(-1, 1), random.randint(-_REACH // 2, _REACH // 2))
        if order is None or not _is_possible(order, len(order)):
            return None
        return Skeleton([*skeleton.orders[:rank], order, *skeleton.orders[rank + 1 :]], skeleton.overrun)

    return _climb(problem, start, lambda skeleton: problem.fill(*skeleton), change, runs, goal)


def climb_orders(problem: OrderProblem, start: Orders, runs: int, goal: float, random: Random) -> TimedOrders:
    """Return the fastest orders that changes of orders lead to, in at most so many runs."""

    def change(orders: Orders, timed: TimedOrders, path: CriticalPath) -> Orders | None:
        rank, at = random.choice(path)
        order = _moved(orders[rank], at + random.randint(-1, 1), random.randint(-_REACH, _REACH))
        if order is None or not _is_possible(order, problem.memory_limit):
            return None
        return [*orders[:rank], order, *orders[rank + 1 :]]

    return _climb(problem, start, problem.run, change, runs, goal)


def _climb(
    problem: OrderProblem,
    state: _State,
    run: Callable[[_State], TimedOrders],
    change: Callable[[_State, TimedOrders, CriticalPath], _State | None],
    runs: int,
    goal: float,
) -> TimedOrders:
    """Climb until ``goal``, a makespan, is reached. If the start is impossible, it is returned."""
    best = timed = run(state)
    if not timed.orders:
        return best
    path = problem.critical_path(timed)
    earlier = [timed.makespan] * _HISTORY
    done = tried = 0
    while done < runs and tried < 4 * runs and best.makespan > goal:
        tried += 1
        changed = change(state, timed, path)
        if changed is None:
            continue
        done += 1
        result = run(changed)
        if result.makespan <= max(timed.makespan, earlier[done % _HISTORY]):
            state, timed = changed, result
            earlier[done % _HISTORY] = timed.makespan
            path = problem.critical_path(timed)
            best = min(best, timed, key=lambda each: each.makespan)
    return best


def _moved(order: Sequence[int], at: int, by: int) -> list[int] | None:
    """Return the order with one action moved by so many places; None if that changes nothing."""
    to = min(max(at + by, 0), len(order) - 1)
    if not 0 <= at < len(order) or order[at] == order[to]:
        return None
    moved = list(order)
    moved.insert(to, moved.pop(at))
    return moved


def _is_possible(order: Sequence[int], memory_limit: int) -> bool:
    """Return whether every I comes after its F and every W after its I, and the memory is enough."""
    count: dict[int, int] = {}
    held = 0
    for code in order:
        number = count[code] = count.get(code, 0) + 1
        kind = code % PER_STAGE
        if kind == FORWARD:
            held += 1
            if held > memory_limit:
                return False
        elif number > count.get(code - 1, 0):
            return False
        if kind == WEIGHT_GRAD:
            held -= 1
    return True
