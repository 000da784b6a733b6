"""The schedule of a number of stages."""

from __future__ import annotations

from pipegraph.errors import PlanError, nearest
from pipegraph.schedule import PLACEMENTS, Schedule, check
from pipegraph.schedule.build import schedule_for_stages
from pipegraph.units import format_number_of


def resolve_schedule(
    schedule: str | Schedule, stages: int, microbatches: int, placement: str | None, ranks: int | None
) -> Schedule:
    """Return the schedule of so many stages, checked and without transfers.

    Args:
        schedule: a name, which gets as many ranks as the stages need; or a schedule, which has its own ranks and
            microbatches.
        stages, microbatches: of a step.
        placement, ranks: what the schedule must have; None for any.

    Raises:
        ScheduleError: an unknown name, numbers that the schedule cannot have, or a schedule that is wrong.
        PlanError: the schedule has another placement, or another number of ranks.
    """
    if isinstance(schedule, Schedule):  # costs say what crosses boundaries, so transfers and edges are left out
        actions = tuple(tuple(action for action in row if action.peer is None) for row in schedule.actions)
        schedule = schedule.changed(actions=actions, edges=None, gradient_edges=None)
        check(schedule)
    resolved = schedule_for_stages(schedule, stages, microbatches, ranks)
    if ranks not in (None, resolved.ranks):
        other = ""
        if type(ranks) is int and ranks > 0:
            other = f", or {format_number_of('stage', ranks * resolved.stages // resolved.ranks)}"
        raise PlanError(
            f"{resolved.name} has {format_number_of('stage', stages)} on "
            f"{format_number_of('rank', resolved.ranks)}, not on {ranks}.\nTry: ranks={resolved.ranks}{other}."
        )
    if placement is not None:
        _check_placement(resolved, placement)
    return resolved


def _check_placement(schedule: Schedule, placement: str) -> None:
    kind = PLACEMENTS.get(str(placement).casefold())
    if kind is None:
        raise PlanError(
            f'There is no placement "{placement}".{nearest(str(placement), PLACEMENTS)} '
            f"The placements are {', '.join(PLACEMENTS)}."
        )
    if kind.places(schedule.ranks, schedule.stages // schedule.ranks) != schedule.placement:
        raise PlanError(
            f"{schedule.name} places its stages on the ranks {', '.join(map(str, schedule.placement))}, which is not "
            f'the placement "{placement}".\nTry: leave placement out, or another schedule.'
        )
