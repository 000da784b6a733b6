"""Which schedule a plan is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from pipegraph.errors import PlanError, nearest
from pipegraph.schedule import PLACEMENTS, Schedule, check
from pipegraph.schedule.build import schedule_for_stages
from pipegraph.units import format_number_of

_Settings = ParamSpec("_Settings")
_Made = TypeVar("_Made")


def once_for_each(
    make: Callable[Concatenate[Schedule, _Settings], _Made],
) -> Callable[Concatenate[Schedule, _Settings], _Made]:
    """``make(schedule, …)``, whose result is kept for as long as the schedule is: plans are compared by the hundred, of
    few schedules."""
    known: WeakKeyDictionary[Schedule, dict[object, _Made]] = WeakKeyDictionary()

    def of(schedule: Schedule, /, *args: _Settings.args, **kwargs: _Settings.kwargs) -> _Made:
        made = known.setdefault(schedule, {})
        settings = args, tuple(kwargs.items())
        if settings not in made:
            made[settings] = make(schedule, *args, **kwargs)
        return made[settings]

    return of


def arrange(
    schedule: str | Schedule, stages: int, microbatches: int, placement: str | None, ranks: int | None
) -> Schedule:
    """The schedule of so many stages, without transfers: one by name, or a ready one, that holds no mistake.

    By name, ``ranks`` is as many as the stages make up; a ready one has its own microbatches.

    Raises ScheduleError for a name, or numbers, that there is no schedule for; PlanError where the schedule has another
    placement, or other ranks.
    """
    plain = _plain(schedule) if isinstance(schedule, Schedule) else schedule
    found = schedule_for_stages(plain, stages, microbatches, ranks)
    if ranks not in (None, found.ranks):
        raise PlanError(
            f"{found.name} has {format_number_of('stage', stages)} on {format_number_of('rank', found.ranks)}, not on "
            f"{ranks}.\nTry: ranks={found.ranks}{_other(found, ranks)}."
        )
    if placement is not None:
        _check_placement(found, placement)
    return found


def _plain(schedule: Schedule) -> Schedule:
    """A ready schedule as one of a chain of stages without transfers: what crosses a boundary is the costs' to say."""
    rows = tuple(tuple(action for action in row if action.peer is None) for row in schedule.actions)
    plain = schedule.changed(actions=rows, edges=None, gradient_edges=None)
    check(plain)
    return plain


def _other(schedule: Schedule, ranks: object) -> str:
    """Which number of stages the schedule could have on so many ranks."""
    if type(ranks) is not int or ranks < 1:
        return ""
    return f", or {ranks * schedule.stages // schedule.ranks} stages"


def _check_placement(schedule: Schedule, placement: str) -> None:
    kind = PLACEMENTS.get(str(placement).casefold())
    if kind is None:
        raise PlanError(
            f'There is no placement "{placement}".{nearest(str(placement), PLACEMENTS)} '
            f"The placements are {', '.join(PLACEMENTS)}."
        )
    places = kind.places(schedule.ranks, schedule.stages // schedule.ranks)
    if places != schedule.placement:
        raise PlanError(
            f"{schedule.name} places stage by stage on the ranks {', '.join(map(str, schedule.placement))}, which is "
            f'not the placement "{placement}".\nTry: leave placement out, or another schedule.'
        )
