"""``search``: orders of small makespan for given times and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.lower_bound import lower_bound
from pipegraph.schedule.order_search.hill_climbing import Skeleton, climb_orders, climb_skeleton
from pipegraph.schedule.order_search.order_problem import OrderProblem, Orders
from pipegraph.schedule.order_search.starting_orders import (
    actions_of,
    greedy_orders,
    greedy_rules,
    named_schedules,
    orders_of,
    without_weight_grads,
)
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.stages import PLACEMENTS
from pipegraph.schedule.times import Times
from pipegraph.units import format_number_of

_ACTIONS, _RUNS = 20_000_000, 40_000
"""How many actions, and how many orders, a search with an effort of 1 runs at most: some ten seconds."""
_FEWEST, _GREEDY_SHARE = 8, 0.05  # greedy orders: the least number, and the part of the runs that they may take
_SKELETON_SHARE, _ORDER_SHARE = 0.2, 0.15  # the parts of the runs that one climb takes
_BEST = 2  # the number of starts of each kind from which the search climbs
_REFILLED = 12  # the number of greedy orders of which the W are placed anew
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)
_EQUAL = 1e-9  # makespans that differ by less than this part are equal


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
    memory_limit: float | None = None,
    effort: float = 1.0,
) -> SearchedSchedule:
    """Find orders of small makespan.

    The result is never slower than the fastest named schedule that fits. Of equally fast orders, those with the least
    memory are returned. The same arguments give the same result.

    Args:
        times: of each stage.
        ranks, microbatches: of a step.
        placement: ``loop`` (stage s on rank s mod ranks) or ``v`` (rank r holds stages r and 2·ranks − 1 − r).
        memory_limit: how many saved activations of one stage and microbatch a rank may hold at one time.
        effort: scales the number of orders that are tried, and so the time. 1 takes some ten seconds for 8 ranks and
            32 microbatches, and a minute for 64 and 512.

    Raises:
        ScheduleError: numbers that do not fit together, or a limit too small for one microbatch, which leaves an
            activation on each stage of a rank.
    """
    if isinstance(effort, bool) or not isinstance(effort, int | float) or not 0 <= effort < math.inf:
        raise ScheduleError(f"The effort of a search is a number from 0 on, not {effort!r}: 1 is some ten seconds.")
    places = _placement(times, ranks, microbatches, placement)
    chunks = len(places) // ranks
    limit = microbatches * chunks
    if memory_limit is not None:
        if isinstance(memory_limit, bool) or not isinstance(memory_limit, int | float):
            raise ScheduleError(f"A memory limit is a number of activations, such as {chunks}, not {memory_limit!r}.")
        if not memory_limit >= chunks:
            raise ScheduleError(
                f"With room for {memory_limit!r} on each rank not even one microbatch gets through: "
                f"it leaves {format_number_of('activation', chunks)} there. Give {chunks} or more."
            )
        limit = int(min(limit, memory_limit))
    problem = OrderProblem(times, places, microbatches, limit)
    bound = lower_bound(times, places, microbatches, limit)
    schedules = list(named_schedules(places, microbatches))
    fitting = [schedule for schedule in schedules if max(peak_activations(schedule)) <= limit]
    timed = [(simulate(schedule, times).makespan, schedule) for schedule in fitting]
    goal = bound * (1 + _EQUAL)
    if all(makespan > goal for makespan, _ in timed):
        for orders, origin in _improved(problem, schedules, goal, effort):
            schedule = Schedule(origin, places, microbatches, actions_of(orders))
            timed.append((simulate(schedule, times).makespan, schedule))
    fastest = min(makespan for makespan, _ in timed)
    makespan, best = min(
        ((makespan, schedule) for makespan, schedule in timed if makespan <= fastest * (1 + _EQUAL)),
        key=lambda pair: (max(peak_activations(pair[1])), sum(peak_activations(pair[1]))),
    )
    return SearchedSchedule(
        name="searched",
        placement=places,
        microbatches=microbatches,
        actions=best.actions,
        overlapped=best.overlapped,
        makespan=makespan,
        lower_bound=bound,
        origin=best.name,
    )


def _placement(times: Times, ranks: int, microbatches: int, placement: str) -> tuple[int, ...]:
    """Return the rank of each stage. Raises ScheduleError if the arguments of a search do not fit together."""
    if not isinstance(times, Times):
        raise ScheduleError("search takes Times: Times.equal(stages) has unit times.")
    placement = placement.casefold() if isinstance(placement, str) else placement
    for what, number in (("ranks", ranks), ("microbatches", microbatches)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"A search cannot have {number!r} {what}: give a whole number from 1 on.")
    if placement not in PLACEMENTS:
        raise ScheduleError(
            f'There is no placement "{placement}".{nearest(str(placement), PLACEMENTS)} '
            f"The placements are {', '.join(PLACEMENTS)}."
        )
    kind = PLACEMENTS[placement]
    chunks, rest = divmod(times.stages, ranks)
    if rest or chunks < kind.chunks or (chunks > kind.chunks and not kind.any_chunks):
        more = " or a multiple of that" if kind.any_chunks else ""
        raise ScheduleError(
            f'With the placement "{placement}", {ranks} ranks hold {kind.chunks * ranks} stages{more}, '
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
    made = [orders for orders in (greedy_orders(problem, rule) for rule in tried) if orders is not None]
    greedy = sorted((problem.run(orders) for orders in made), key=lambda timed: timed.makespan)
    known = [(timed, "greedy") for timed in greedy]

    starts = [(orders_of(schedule), schedule.name) for schedule in schedules]
    starts += [(timed.orders, "greedy") for timed in greedy[:_REFILLED]]
    filled = []
    for (orders, origin), overrun in product(starts, _OVERRUNS):
        skeleton = Skeleton(without_weight_grads(orders), (overrun,) * problem.ranks)
        filled.append((problem.fill(*skeleton).makespan, skeleton, origin))
    filled.sort(key=lambda start: start[0])
    for chosen in list(dict.fromkeys(origin for _, _, origin in filled))[:_BEST]:
        skeleton = next(skeleton for _, skeleton, origin in filled if origin == chosen)
        known.append((climb_skeleton(problem, skeleton, round(_SKELETON_SHARE * runs), goal, random), chosen))

    known.sort(key=lambda pair: pair[0].makespan)
    for timed, origin in known[:_BEST]:
        if timed.orders:
            yield climb_orders(problem, timed.orders, round(_ORDER_SHARE * runs), goal, random).orders, origin
