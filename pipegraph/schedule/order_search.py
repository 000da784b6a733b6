"""``search``: orders of small makespan for given times and memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, NamedTuple, TypeVar

from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule.check import check
from pipegraph.schedule.collectives import place_collectives, require_resident, residencies
from pipegraph.schedule.join_backwards import EQUAL, join_backwards
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.lower_bound import lower_bound
from pipegraph.schedule.order_problem import (
    FORWARD,
    PER_STAGE,
    WEIGHT_GRAD,
    CriticalPath,
    OrderProblem,
    Orders,
    TimedOrders,
    actions_of,
    greedy_orders,
    greedy_rules,
    named_schedules,
    orders_of,
    without_weight_grads,
)
from pipegraph.schedule.recipes import RECIPES
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.stages import PLACEMENTS, loop
from pipegraph.schedule.times import Times, require_times
from pipegraph.units import format_number_of

# ---- gathers ---------------------------------------------------------------------------------------------------------
# Orders of sharded stages in which a stage stays whole for longer, so that its parameters are gathered less often.


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
        for recipe in RECIPES:
            if recipe.grouped is None:
                continue
            rows = tuple(map(tuple, recipe.grouped(ranks, microbatches, chunks, group)))
            schedule = Schedule(f"{recipe.name} in groups of {group}", placement, microbatches, rows)
            try:
                check(schedule)
            except ScheduleError:
                continue  # the last group is too small
            yield schedule


def climb_gathers(
    orders: Orders, resident: int, cost: Callable[[Orders, Cost], Cost], runs: int, random: Random
) -> tuple[Cost, Orders]:
    """Move uses of a stage from one gather to another, at most ``runs`` times, and keep changes that do not cost more.

    For orders that cost more than its second argument, ``cost`` may return any larger cost.
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
    """Return the order with two residencies of a stage joined, by moving the uses of one; None if no stage has two."""
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


# ---- found schedules -------------------------------------------------------------------------------------------------
# The schedules that a search has found so far, and which of them is best.


class FoundSchedules:
    """Schedules that fit, with the collectives of their stages, and their makespans."""

    def __init__(self, times: Times, resident: int | None) -> None:
        self.timed: list[tuple[float, Schedule]] = []
        self._times, self._resident = times, resident

    def add(self, schedule: Schedule) -> None:
        self.timed.append(self.time(schedule))

    def time(self, schedule: Schedule) -> tuple[float, Schedule]:
        if self._resident is not None:
            if self._resident == 1:  # the two of an overlapped pair are of two stages
                schedule = schedule.changed(overlapped=frozenset())
            schedule = place_collectives(schedule, range(schedule.stages), (), self._resident)
        return simulate(schedule, self._times).makespan, schedule

    def joined(self, schedule: Schedule, tries: int) -> Schedule:
        """Return one of the schedules with whole backwards where they make nothing slower, nor gathers more."""
        origin = schedule.changed(collectives=())
        _, joined = self.time(join_backwards(origin, self._times, tries).changed(name=schedule.name))
        is_slower = simulate(joined, self._times).makespan > simulate(schedule, self._times).makespan * (1 + EQUAL)
        return schedule if is_slower or sum(joined.gathers) > sum(schedule.gathers) else joined

    def best(self, count: int) -> list[Schedule]:
        """Return the fastest, and of those that are equally fast the ones with the fewest gathers and least memory."""
        fastest = min(makespan for makespan, _ in self.timed)

        def key(pair: tuple[float, Schedule]) -> tuple[float, int, int, int]:
            makespan, schedule = pair
            peaks = peak_activations(schedule)
            slower = 0.0 if makespan <= fastest * (1 + EQUAL) else makespan
            return slower, sum(schedule.gathers), max(peaks), sum(peaks)

        return [schedule for _, schedule in sorted(self.timed, key=key)[:count]]


# ---- search orders ---------------------------------------------------------------------------------------------------


_ACTIONS, _RUNS = 20_000_000, 40_000
"""How many actions, and how many orders, a search with an effort of 1 runs at most: some ten seconds."""
_FEWEST, _GREEDY_SHARE = 8, 0.05  # greedy orders: the least number, and the part of the runs that they may take
_SKELETON_SHARE, _ORDER_SHARE = 0.2, 0.15  # the parts of the runs that one climb takes
_BEST = 2  # the number of starts of each kind from which the search climbs
_REFILLED = 12  # the number of greedy orders of which the W are placed again
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)

_HISTORY = 80
"""Late acceptance hill climbing (Burke and Bykov, 2017): a change is kept if the orders are not slower than they were
`_HISTORY` changes ago. So the search crosses plateaus and leaves shallow local minima."""

_CLIMB_OVERRUNS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
_JOINED_ACTIONS = 500_000  # actions that are simulated to join backwards, with an effort of 1: some seconds
_GATHER_RUNS = 500  # changes of an order that are tried to save gathers, with an effort of 1: some seconds
_REACH = 8  # the number of places by which an action moves, at most


@dataclass(frozen=True, repr=False)
class SearchedSchedule(Schedule):
    """A schedule that `search` found.

    Attributes:
        makespan: in the unit of the times.
        lower_bound: no schedule with these stages, times, microbatches and memory is faster.
        origin: the name of the schedule from which the search came to it, or ``greedy``.
    """

    makespan: float = 0.0
    lower_bound: float = 0.0
    origin: str = ""


def search(
    times: Times,
    ranks: int,
    microbatches: int,
    placement: str = "loop",
    memory_limit: float | Sequence[float] | None = None,
    effort: float = 1.0,
    resident: int | None = None,
) -> SearchedSchedule:
    """Find orders of small makespan.

    The result is never slower than the fastest named schedule that fits. Of equally fast orders, those with the fewest
    gathers, and then those with the least memory, are returned; of these, the one with whole backwards where they make
    nothing slower (`join_backwards`). The same arguments give the same result.

    Args:
        times: of each stage.
        ranks, microbatches: of a step.
        placement: ``loop`` (stage s on rank s mod ranks) or ``v`` (rank r holds stages r and 2·ranks − 1 − r).
        memory_limit: how many saved activations of one stage and microbatch a rank may hold at one time: one number, or
            one for each rank.
        effort: scales the number of orders that are tried, and so the time. 1 takes some ten seconds for 8 ranks and
            32 microbatches, and a minute for 64 and 512.
        resident: how many stages of a rank may be whole at a time; all of them are sharded, and the result has their
            collectives, as `lower` places them. None: nothing is sharded.

    Raises:
        ScheduleError: numbers that do not fit together, or a limit too small for one microbatch, which leaves an
            activation on each stage of a rank.
    """
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 <= effort < math.inf:
        raise ScheduleError(f"The effort of a search is a number from 0 on, not {effort!r}: 1 is some ten seconds.")
    require_resident(resident)
    places = _placement(times, ranks, microbatches, placement)
    chunks = len(places) // ranks
    limits = _memory_limits(memory_limit, ranks, microbatches, chunks)
    problem = OrderProblem(times, places, microbatches, limits)
    bound = lower_bound(times, places, microbatches, max(limits))
    schedules = list(named_schedules(places, microbatches))
    candidates = FoundSchedules(times, resident)
    for schedule in (*schedules, *(grouped_schedules(places, microbatches) if resident is not None else ())):
        if all(peak <= limit for peak, limit in zip(peak_activations(schedule), limits, strict=True)):
            candidates.add(schedule)
    goal = bound * (1 + EQUAL)
    if all(makespan > goal for makespan, _ in candidates.timed):
        for orders, origin in _improved(problem, schedules, goal, effort):
            candidates.add(Schedule(origin, places, microbatches, actions_of(orders)))
    if resident is not None:
        for schedule in candidates.best(_BEST):
            orders = _climb_gathers(problem, candidates, schedule, resident, round(effort * _GATHER_RUNS))
            candidates.add(Schedule(schedule.name, places, microbatches, actions_of(orders)))
    (best,) = candidates.best(1)
    best = candidates.joined(best, round(effort * _JOINED_ACTIONS / sum(map(len, best.actions))))
    return SearchedSchedule(
        name="searched",
        placement=places,
        microbatches=microbatches,
        actions=best.actions,
        overlapped=best.overlapped,
        collectives=best.collectives,
        makespan=simulate(best, times).makespan,
        lower_bound=bound,
        origin=best.name,
    )


def _climb_gathers(
    problem: OrderProblem, candidates: FoundSchedules, start: Schedule, resident: int, runs: int
) -> Orders:
    """Return the orders with the fewest gathers that changes of a schedule's orders reach without a longer makespan."""

    def cost(orders: Orders, most: Cost) -> Cost:
        if not all(map(_is_possible, orders, problem.memory_limits)):
            return IMPOSSIBLE_COST
        timed = problem.run(orders)
        if timed.makespan > most[0] * (1 + EQUAL):  # without waiting for gathers, even
            return IMPOSSIBLE_COST
        makespan, schedule = candidates.time(start.changed(actions=actions_of(orders), overlapped=frozenset()))
        equal = abs(makespan - most[0]) <= EQUAL * makespan
        return most[0] if equal else makespan, sum(schedule.gathers), sum(peak_activations(schedule))

    _, orders = climb_gathers(orders_of(start), resident, cost, runs, Random(0))
    return orders


def _memory_limits(memory_limit: Any, ranks: int, microbatches: int, chunks: int) -> tuple[int, ...]:
    """Return the limit of each rank.

    Raises:
        ScheduleError: a limit is not a number or too small for one microbatch, or the number of limits is wrong.
    """
    most = microbatches * chunks
    if memory_limit is None:
        return (most,) * ranks
    is_one = isinstance(memory_limit, str) or not isinstance(memory_limit, Sequence)
    limits = [memory_limit] * ranks if is_one else memory_limit
    if len(limits) != ranks:
        raise ScheduleError(f"A memory limit is one number, or one for each of {ranks} ranks, not {len(limits)}.")
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, int | float):
            raise ScheduleError(f"A memory limit is a number of activations, such as {chunks}, not {limit!r}.")
        if not limit >= chunks:
            raise ScheduleError(
                f"With room for {limit!r} on each rank not even one microbatch gets through: "
                f"it leaves {format_number_of('activation', chunks)} there.",
                f"{chunks} or more.",
            )
    return tuple(int(min(most, limit)) for limit in limits)


def _placement(times: Times, ranks: int, microbatches: int, placement: str) -> tuple[int, ...]:
    """Return the rank of each stage. Raises ScheduleError if the arguments of a search do not fit together."""
    require_times("search", times)
    placement = placement.casefold() if isinstance(placement, str) else placement
    for quantity, number in (("ranks", ranks), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"A search cannot have {number!r} {quantity}: give a whole number from 1 on.")
    if placement not in PLACEMENTS:
        raise ScheduleError(
            f'There is no placement "{placement}".{nearest(str(placement), PLACEMENTS)} '
            f"The placements are {', '.join(PLACEMENTS)}."
        )
    kind = PLACEMENTS[placement]
    chunks, remainder = divmod(times.stages, ranks)
    if remainder or chunks < kind.chunks or (chunks > kind.chunks and not kind.any_chunks):
        alternative = " or a multiple of that" if kind.any_chunks else ""
        raise ScheduleError(
            f'With the placement "{placement}", {ranks} ranks hold {kind.chunks * ranks} stages{alternative}, '
            f"and the times are for {times.stages}."
        )
    return kind.places(ranks, chunks)


def _improved(
    problem: OrderProblem, schedules: list[Schedule], goal: float, effort: float
) -> Iterator[tuple[Orders, str]]:
    """Yield better orders and their origin. Each kind of climb starts from the best orders that are known by then."""
    random = Random(0)
    runs = effort * min(_RUNS, _ACTIONS / len(problem.duration) / problem.microbatches)
    rules = list(greedy_rules(problem))
    tried = rules[:: math.ceil(len(rules) / max(_FEWEST, round(_GREEDY_SHARE * runs)))]
    feasible_orders = [orders for orders in (greedy_orders(problem, rule) for rule in tried) if orders is not None]
    greedy = sorted((problem.run(orders) for orders in feasible_orders), key=lambda timed: timed.makespan)
    candidates = [(timed, "greedy") for timed in greedy]

    starts = [(orders_of(schedule), schedule.name) for schedule in schedules]
    starts += [(timed.orders, "greedy") for timed in greedy[:_REFILLED]]
    filled = []
    for (orders, origin), overrun in product(starts, _OVERRUNS):
        skeleton = Skeleton(without_weight_grads(orders), (overrun,) * problem.ranks)
        filled.append((problem.fill(*skeleton).makespan, skeleton, origin))
    filled.sort(key=lambda start: start[0])
    for chosen in list(dict.fromkeys(origin for _, _, origin in filled))[:_BEST]:
        skeleton = next(skeleton for _, skeleton, origin in filled if origin == chosen)
        candidates.append((_climb_skeleton(problem, skeleton, round(_SKELETON_SHARE * runs), goal, random), chosen))

    candidates.sort(key=lambda pair: pair[0].makespan)
    for timed, origin in candidates[:_BEST]:
        if timed.orders:
            yield _climb_orders(problem, timed.orders, round(_ORDER_SHARE * runs), goal, random).orders, origin


class Skeleton(NamedTuple):
    """Orders of F and I, and the overrun of each rank, by which `OrderProblem.fill` places the W."""

    orders: Orders
    overrun: tuple[float, ...]


_State = TypeVar("_State", Orders, Skeleton)


def _climb_skeleton(problem: OrderProblem, start: Skeleton, runs: int, goal: float, random: Random) -> TimedOrders:
    """Return the fastest orders that changes of a skeleton lead to, in at most ``runs`` runs."""

    def change(skeleton: Skeleton, timed: TimedOrders, path: CriticalPath) -> Skeleton | None:
        if random.random() < 0.25:
            rank = random.randrange(problem.ranks)
            overrun = random.choice(_CLIMB_OVERRUNS)
            return Skeleton(skeleton.orders, (*skeleton.overrun[:rank], overrun, *skeleton.overrun[rank + 1 :]))
        rank, place = random.choice(path)
        at = sum(code % PER_STAGE != WEIGHT_GRAD for code in timed.orders[rank][:place])
        order = _moved(skeleton.orders[rank], at + random.randint(-1, 1), random.randint(-_REACH // 2, _REACH // 2))
        if order is None or not _is_possible(order, len(order)):
            return None
        return Skeleton([*skeleton.orders[:rank], order, *skeleton.orders[rank + 1 :]], skeleton.overrun)

    return _climb(problem, start, lambda skeleton: problem.fill(*skeleton), change, runs, goal)


def _climb_orders(problem: OrderProblem, start: Orders, runs: int, goal: float, random: Random) -> TimedOrders:
    """Return the fastest orders that changes of orders lead to, in at most ``runs`` runs."""

    def change(orders: Orders, timed: TimedOrders, path: CriticalPath) -> Orders | None:
        rank, at = random.choice(path)
        order = _moved(orders[rank], at + random.randint(-1, 1), random.randint(-_REACH, _REACH))
        if order is None or not _is_possible(order, problem.memory_limits[rank]):
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
    history = [timed.makespan] * _HISTORY
    done = tried = 0
    while done < runs and tried < 4 * runs and best.makespan > goal:
        tried += 1
        changed = change(state, timed, path)
        if changed is None:
            continue
        done += 1
        result = run(changed)
        if result.makespan <= max(timed.makespan, history[done % _HISTORY]):
            state, timed = changed, result
            history[done % _HISTORY] = timed.makespan
            path = problem.critical_path(timed)
            best = min(best, timed, key=lambda candidate: candidate.makespan)
    return best


def _moved(order: Sequence[int], at: int, by: int) -> list[int] | None:
    """Return the order with the action ``at`` moved by ``by`` places; None if that changes nothing."""
    to = min(max(at + by, 0), len(order) - 1)
    if not 0 <= at < len(order) or order[at] == order[to]:
        return None
    moved = list(order)
    moved.insert(to, moved.pop(at))
    return moved


def _is_possible(order: Sequence[int], memory_limit: int) -> bool:
    """Return whether every I comes after its F and every W after its I, and the memory is enough."""
    count: dict[int, int] = {}
    activations = 0
    for code in order:
        number = count[code] = count.get(code, 0) + 1
        kind = code % PER_STAGE
        if kind == FORWARD:
            activations += 1
            if activations > memory_limit:
                return False
        elif number > count.get(code - 1, 0):
            return False
        if kind == WEIGHT_GRAD:
            activations -= 1
    return True
