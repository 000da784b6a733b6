"""Schedules by name, of given numbers of ranks or stages."""

from __future__ import annotations

from typing import Final
from weakref import WeakValueDictionary

from pipegraph.arguments import argument
from pipegraph.errors import ScheduleError
from pipegraph.schedule.recipes import find_recipe
from pipegraph.schedule.schedule import Schedule
from pipegraph.units import format_number_of

MOST: Final = 2_000_000
"""Forwards of a step. More would take minutes and gigabytes before anything runs."""

# A schedule never changes, so one that is in use is returned again, with its cached properties.
_in_use: WeakValueDictionary[tuple[str, int, int, int], Schedule] = WeakValueDictionary()


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Build the schedule of this name.

    Args:
        name: one of `names`, or torch's class name of the schedule.
        ranks, microbatches: of a step.
        chunks: stages on a rank; by default 1 or 2, as the schedule has it.

    Raises ScheduleError for an unknown name, and for numbers that the schedule cannot have: it names numbers that work.
    """
    return _build(name, ranks, microbatches, chunks)


def _build(name: str, ranks: int, microbatches: int, chunks: int | None = None, has_stages: bool = False) -> Schedule:
    """Do what `build` does; if the stages are there already, as ``has_stages`` says, no other ranks are advised."""
    recipe = find_recipe(name)
    chunks = recipe.chunks if chunks is None else chunks
    for quantity, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"{recipe.name} cannot have {number!r} {quantity}.", "a whole number from 1 on.")
    if chunks != recipe.chunks and not recipe.any_chunks:
        raise ScheduleError(
            f"{recipe.name} cannot have {format_number_of('chunk', chunks)}: a rank holds {recipe.chunks} in it.",
            f"leave {argument('chunks')} out, or give {argument('chunks', recipe.chunks)}.",
        )
    if ranks * chunks * microbatches > MOST:
        number = MOST // (ranks * chunks)
        fewer = f"{number:,} microbatches" if number else f"{max(1, MOST // microbatches):,} stages"
        raise ScheduleError(
            f"{recipe.name} cannot have {microbatches:,} microbatches on {format_number_of('stage', ranks * chunks)}: "
            f"a step has {MOST:,} forwards at most.",
            f"{fewer} or fewer.",
        )
    if wrong := recipe.rule(ranks, microbatches):
        request = f"{format_number_of('microbatch', microbatches)} on {format_number_of('rank', ranks)}"
        possible = wrong.microbatches if has_stages or not wrong.ranks else f"{wrong.microbatches}, or {wrong.ranks}"
        raise ScheduleError(f"{recipe.name} cannot have {request}: {wrong.why}", f"{possible}.")
    numbers = recipe.name, ranks, microbatches, chunks
    schedule = _in_use.get(numbers)
    if schedule is None:
        orders = recipe.orders(ranks, microbatches, chunks)
        actions = tuple(tuple(order) for order in orders)
        pairs = frozenset(recipe.overlapped(orders))
        schedule = Schedule(recipe.name, recipe.placement(ranks, chunks), microbatches, actions, pairs)
        _in_use[numbers] = schedule
    return schedule


def schedule_for_stages(schedule: str | Schedule, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """Return the schedule of this name with this number of stages, or the given schedule if it has that number.

    Args:
        schedule: a name, for a schedule with the number of ranks that the stages need; or a schedule, which has its
            own microbatches and ranks.
        stages: the number of stages that the schedule must have.
        microbatches: of a step.
        ranks: for schedules that can have any number of stages on a rank.

    Raises ScheduleError for an unknown name, and for numbers that the schedule cannot have.
    """
    if isinstance(schedule, Schedule):
        if schedule.stages != stages:
            raise ScheduleError(
                f"{schedule.name} is for {format_number_of('stage', schedule.stages)}, and there are {stages}.",
                f"{format_number_of('stage', schedule.stages)}, or a schedule for {stages}.",
            )
        return schedule
    recipe = find_recipe(schedule)
    chunks = recipe.chunks
    if recipe.any_chunks and type(ranks) is int and ranks > 0 and stages % ranks == 0:
        chunks = stages // ranks
    if stages % chunks:
        possible = [number for number in (stages // chunks * chunks, (stages // chunks + 1) * chunks) if number]
        raise ScheduleError(
            f"{recipe.name} has {chunks} stages on each rank, which {format_number_of('stage', stages)} cannot fill.",
            f"{format_number_of('stage', *possible)}, or a schedule with 1 stage on each rank, such as 1f1b.",
        )
    return _build(recipe.name, stages // chunks, microbatches, chunks, has_stages=True)
