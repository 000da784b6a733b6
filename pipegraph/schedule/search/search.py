"""The search for an order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.placement import PLACEMENTS
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.search.hill_climbing import Skeleton, climb_orders, climb_policy, climb_skeleton
from pipegraph.schedule.search.lower_bound import lower_bound
from pipegraph.schedule.search.order_problem import Orders, Problem
from pipegraph.schedule.search.seeds import actions_of, named, orders_of, policies, skeleton_of
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.times import Times
from pipegraph.units import format_number_of

_ACTIONS, _RUNS = 20_000_000, 40_000
"""How many actions, and how many orders, a search runs at most: some ten seconds' worth."""
_FEWEST = 8  # policies to begin with, however large a schedule is
_SHARES = 0.05, 0.2, 0.15  # of these, in each climb from a policy, from a skeleton and from orders
_BEST = 2  # how many starts of each form are climbed from
_REFILLED = 12  # of how many greedy orders the W are placed anew
_OVERRUNS = (0.0, 0.25, 0.5, 0.75, 1.0)
_EQUAL = 1e-9  # makespans that differ by less than this part are equal


@dataclass(frozen=True, repr=False)
class SearchedSchedule(Schedule):
    """What `search` found."""

    makespan: float = 0.0
    lower_bound: float = 0.0
    """no schedule with these stages, times, microbatches and memory is faster"""
    origin: str = ""
    """the name of the schedule that it was made from, or ``greedy``"""


def search(
    times: Times,
    ranks: int,
    microbatches: int,
    placement: str = "loop",
    memory_limit: float | None = None,
    effort: float = 1.0,
) -> SearchedSchedule:
    """Find orders of small makespan for the stages of ``times`` on so many ranks.

    ``placement`` is ``loop`` (stage s on rank s mod ranks) or ``v`` (rank r holds stages r and 2·ranks − 1 − r). No
    rank holds more than ``memory_limit`` saved activations of one stage and microbatch at a time. The result is never
    slower than the fastest named schedule that fits; of equally fast ones it is that with the least memory. ``effort``
    scales the number of orders that are tried, and so the time: 1 is some ten seconds for 8 ranks and 32 microbatches,
    and a minute or two for 64 and 512.
    The same arguments give the same result.

    Raises ScheduleError for numbers that do not fit together, and for a limit below one microbatch: a rank's stages.
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
    problem = Problem(times, places, microbatches, limit)
    bound = lower_bound(times, places, microbatches, limit)
    schedules = list(named(places, microbatches))
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
    """stage → rank. ScheduleError where the arguments of a search do not fit together."""
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


def _improved(problem: Problem, schedules: list[Schedule], goal: float, effort: float) -> Iterator[tuple[Orders, str]]:
    """Orders and their origin: the best after climbing from policies, then skeletons, then orders, each time from the
    best of what there is by then."""
    random = Random(0)
    runs = effort * min(_RUNS, _ACTIONS / len(problem.duration) / problem.microbatches)
    of_policies, of_skeletons, of_orders = (round(runs * share) for share in _SHARES)

    # Every start as it is, by a climb of no runs; then climbs from the best.
    every = list(policies(problem))
    tried = every[:: math.ceil(len(every) / max(_FEWEST, of_policies))]
    greedy = [climb_policy(problem, policy, 0, goal, random) for policy in tried]
    greedy.sort(key=lambda climbed: climbed.run.makespan)
    greedy[:_BEST] = [climb_policy(problem, start.state, of_policies, goal, random) for start in greedy[:_BEST]]
    found = [(climbed.run, "greedy") for climbed in greedy if climbed.run.orders]

    starts = [(orders_of(schedule), schedule.name) for schedule in schedules]
    starts += [(run.orders, origin) for run, origin in found[:_REFILLED]]
    filled = [
        (climb_skeleton(problem, Skeleton(skeleton_of(orders), (overrun,) * problem.ranks), 0, goal, random), origin)
        for (orders, origin), overrun in product(starts, _OVERRUNS)
    ]
    filled.sort(key=lambda start: start[0].run.makespan)
    origins = list(dict.fromkeys(origin for _, origin in filled))[:_BEST]
    for origin in origins:
        skeleton = next(climbed.state for climbed, name in filled if name == origin)
        found.append((climb_skeleton(problem, skeleton, of_skeletons, goal, random).run, origin))

    found.sort(key=lambda pair: pair[0].makespan)
    for run, origin in found[:_BEST]:
        if run.orders:
            yield climb_orders(problem, run.orders, of_orders, goal, random).run.orders, origin
