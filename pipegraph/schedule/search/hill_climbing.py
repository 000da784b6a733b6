"""Small changes to orders, kept where they do not make them slower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Generic, NamedTuple, TypeVar

from pipegraph.schedule.search.greedy import Policy, greedy
from pipegraph.schedule.search.order_problem import (
    FORWARD,
    IMPOSSIBLE,
    PER_STAGE,
    WEIGHT_GRAD,
    Orders,
    Path,
    Problem,
    Run,
)

_HISTORY = 80
"""Late acceptance hill climbing (Burke and Bykov, 2017): a change is kept if it is no worse than things were so many
changes ago, which gets the search across level ground and out of shallow hollows."""

_OVERRUNS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_NEAR = 8  # how far a move goes, in actions


class Skeleton(NamedTuple):
    """Orders of F and I; where W come is left to `Problem.fill`."""

    orders: Orders
    overrun: tuple[float, ...]


State = TypeVar("State", Orders, Skeleton, Policy)


class Climbed(NamedTuple, Generic[State]):
    """The best that a climb came to. Its run is impossible where that of the start was."""

    state: State
    run: Run


def climb_policy(problem: Problem, start: Policy, runs: int, goal: float, random: Random) -> Climbed[Policy]:
    """Change the policy of a greedy order, at most so many times."""

    def run_of(policy: Policy) -> Run:
        orders = greedy(problem, policy)
        return IMPOSSIBLE if orders is None else problem.run(orders)

    def change(policy: Policy, run: Run, path: Path) -> Policy:
        most, overrun, priority = [*policy.most], [*policy.overrun], [*policy.priority]
        for _ in range(random.choice((1, 1, 2, 3))):
            rank, at = random.choice(path)
            code = run.orders[rank][at]
            match random.randrange(3):
                case 0:
                    stage = code // PER_STAGE
                    most[stage] = max(1, most[stage] + random.choice((-2, -1, 1, 2)))
                case 1:
                    overrun[rank] = random.choice(_OVERRUNS)
                case 2:
                    priority[code] = random.random()
        return Policy(tuple(most), tuple(overrun), tuple(priority))

    return _climb(problem, start, run_of, change, runs, goal)


def climb_skeleton(problem: Problem, start: Skeleton, runs: int, goal: float, random: Random) -> Climbed[Skeleton]:
    """Change skeletons, in at most so many runs."""

    def change(state: Skeleton, run: Run, path: Path) -> Skeleton | None:
        if random.random() < 0.25:
            rank = random.randrange(problem.ranks)
            overrun = random.choice(_OVERRUNS)
            return Skeleton(state.orders, (*state.overrun[:rank], overrun, *state.overrun[rank + 1 :]))
        rank, place = random.choice(path)
        at = sum(code % PER_STAGE != WEIGHT_GRAD for code in run.orders[rank][:place])
        order = _moved(state.orders[rank], at + random.randint(-1, 1), random.randint(-_NEAR // 2, _NEAR // 2))
        if order is None or not _sound(order, len(order)):
            return None
        return Skeleton([*state.orders[:rank], order, *state.orders[rank + 1 :]], state.overrun)

    return _climb(problem, start, lambda state: problem.fill(*state), change, runs, goal)


def climb_orders(problem: Problem, start: Orders, runs: int, goal: float, random: Random) -> Climbed[Orders]:
    """Change whole orders, in at most so many runs."""

    def change(state: Orders, run: Run, path: Path) -> Orders | None:
        rank, at = random.choice(path)
        order = _moved(state[rank], at + random.randint(-1, 1), random.randint(-_NEAR, _NEAR))
        if order is None or not _sound(order, problem.memory_limit):
            return None
        return [*state[:rank], order, *state[rank + 1 :]]

    return _climb(problem, start, problem.run, change, runs, goal)


def _climb(
    problem: Problem,
    state: State,
    run_of: Callable[[State], Run],
    change: Callable[[State, Run, Path], State | None],
    runs: int,
    goal: float,
) -> Climbed[State]:
    run = run_of(state)
    best = Climbed(state, run)
    if not run.orders:
        return best
    path = problem.critical_path(run)
    earlier = [run.makespan] * _HISTORY
    done = tried = 0
    while done < runs and tried < 4 * runs and best.run.makespan > goal:
        tried += 1
        changed = change(state, run, path)
        if changed is None:
            continue
        done += 1
        new = run_of(changed)
        if new.makespan <= max(run.makespan, earlier[done % _HISTORY]):
            state, run = changed, new
            earlier[done % _HISTORY] = run.makespan
            path = problem.critical_path(run)
            if run.makespan < best.run.makespan:
                best = Climbed(state, run)
    return best


def _moved(order: Sequence[int], at: int, by: int) -> list[int] | None:
    """The order with the action at one place moved by so many places; None where that changes nothing."""
    to = min(max(at + by, 0), len(order) - 1)
    if not 0 <= at < len(order) or order[at] == order[to]:
        return None
    moved = list(order)
    moved.insert(to, moved.pop(at))
    return moved


def _sound(order: Sequence[int], memory_limit: int) -> bool:
    """Whether every I comes behind its F and every W behind its I, and memory suffices."""
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
