"""Plans in an order of actions that no schedule's name stands for: `search` finds it for the times of their stages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipegraph.cost import SegmentCost
from pipegraph.errors import ScheduleError
from pipegraph.planner.cut_choice import CutChoice
from pipegraph.planner.step_prediction import stage_times
from pipegraph.schedule import Schedule, Times, search
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.stages import placement_name

SEARCHED = 2
"""How many of the fastest plans get an order of their own."""
LEAST_GAIN = 0.03
"""The part of a step that an order has to save: it is for one number of microbatches, and a name is for any."""
_EFFORT = 0.1


def searched_orders(choices: Iterable[CutChoice]) -> Iterator[CutChoice]:
    """Yield the fastest plans with the orders that `search` finds for them, if these save enough time, and with those
    for stages side by side.

    An order keeps no more activations on a rank than some rank has in the schedule of its plan, and fits the memory.

    Args:
        choices: the plans, the fastest first.
    """
    for choice in list(choices)[:SEARCHED]:
        if (searched := _searched(choice)) is not None:
            yield searched
        yield from (order for order in choice.branch_orders() if order.fits)


def _searched(choice: CutChoice) -> CutChoice | None:
    options = choice.options
    if not options.timed:
        return None
    stages = choice.costs.stages(choice.cuts)
    times = stage_times(stages, choice.schedule, options.link, options.host_link)
    memory = None if options.memory_bytes is None else options.memory_of_ranks(choice.schedule.ranks)
    limits = activation_limits(choice.schedule, stages, choice.memory, memory, options.factors.allowance)
    schedule = searched_schedule(choice.schedule, times, limits, options.effort)
    if schedule is None:
        return None
    searched = replace(choice, schedule=schedule, options=replace(options, schedule=schedule), solution=None)
    searched = searched.with_branches()
    is_worth_it = searched.value < choice.value * (1 - LEAST_GAIN)
    return searched if is_worth_it and searched.fits else None


def activation_limits(
    schedule: Schedule,
    stages: Sequence[SegmentCost],
    memory: Sequence[float],
    limits: Sequence[float] | None,
    allowance: float,
) -> list[int]:
    """Return how many activations of one stage and microbatch each rank may hold in another order.

    The number is at most that of the fullest rank in the order of ``schedule``, and fits the memory of the rank.

    Args:
        stages: the stages.
        memory: bytes that each rank needs in the order of ``schedule``.
        limits: bytes of each rank; None for any.
        allowance: the part of activations that fragmentation adds.
    """
    peaks = peak_activations(schedule)
    if limits is None:
        return [max(peaks)] * schedule.ranks
    rank_limits = []
    for rank, (peak, required_bytes, limit) in enumerate(zip(peaks, memory, limits, strict=True)):
        saved = max(stage.saved_bytes for stage, place in zip(stages, schedule.placement, strict=True) if place == rank)
        room = (limit - required_bytes) / max(1.0, saved * (1 + allowance))
        rank_limits.append(max(peak, min(max(peaks), peak + math.floor(room))))
    return rank_limits


def searched_schedule(schedule: Schedule, times: Times, limits: Sequence[int], effort: float) -> Schedule | None:
    """Return the order that `search` finds for the times of stages; None if a search does not apply.

    Args:
        limits: how many activations of one stage and microbatch each rank may hold.
    """
    placement = placement_name(schedule.placement)
    if not schedule.trains or schedule.overlapped or placement is None:
        return None
    if any(map(times.offload_of, range(schedule.stages))):  # copies to CPU memory fit the schedule's own order
        return None
    try:
        order = search(times, schedule.ranks, schedule.microbatches, placement, limits, _EFFORT * effort)
    except ScheduleError:
        return None
    return Schedule(order.name, order.placement, order.microbatches, order.actions, overlapped=order.overlapped)
