"""Plans in an order of actions that no schedule's name stands for: `search` finds it for the times of their stages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from pipegraph.errors import ScheduleError
from pipegraph.planner.cut_choice import CutChoice
from pipegraph.planner.step_prediction import stage_times
from pipegraph.schedule import Schedule, search
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.stages import placement_name

SEARCHED = 2
"""How many of the fastest plans get an order of their own."""
LEAST_GAIN = 0.03
"""The part of a step that an order has to save: it is for one number of microbatches, and a name is for any."""
_EFFORT = 0.1


def searched_orders(choices: Iterable[CutChoice]) -> Iterator[CutChoice]:
    """Yield the fastest plans with the orders that `search` finds for them, if these save enough time.

    An order keeps activations of no more microbatches on a rank than the schedule of its plan, and fits the memory.

    Args:
        choices: the plans, the fastest first.
    """
    for choice in list(choices)[:SEARCHED]:
        if (searched := _searched(choice)) is not None:
            yield searched


def _searched(choice: CutChoice) -> CutChoice | None:
    schedule, options = choice.schedule, choice.options
    placement = placement_name(schedule.placement)
    if not options.timed or not schedule.trains or schedule.overlapped or placement is None:
        return None
    times = stage_times(choice.costs.stages(choice.cuts), schedule, options.link, options.host_link)
    if any(
        map(times.offload_of, range(schedule.stages))
    ):  # copies to CPU memory are planned for the schedule's own order
        return None
    limit = max(peak_activations(schedule))
    try:
        order = search(times, schedule.ranks, schedule.microbatches, placement, limit, _EFFORT * options.effort)
    except ScheduleError:
        return None
    actions = Schedule(order.name, order.placement, order.microbatches, order.actions, overlapped=order.overlapped)
    searched = replace(choice, schedule=actions, options=replace(options, schedule=actions), solution=None)
    is_worth_it = searched.value < choice.value * (1 - LEAST_GAIN)
    return searched if is_worth_it and searched.fits else None
