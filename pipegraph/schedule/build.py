"""Schedules by name, of given numbers of ranks or stages."""

from __future__ import annotations

from weakref import WeakValueDictionary

from pipegraph.errors import ScheduleError
from pipegraph.schedule.recipes import find_recipe
from pipegraph.schedule.recipes.recipe import counted
from pipegraph.schedule.schedule import Schedule

# A schedule never changes: one that is in use is given again, with all that it has found out about itself.
_alive: WeakValueDictionary[tuple[str, int, int, int], Schedule] = WeakValueDictionary()


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make the schedule of this name for so many ranks, microbatches, and chunks (stages on a rank).

    Raises ScheduleError for an unknown name, or numbers that the schedule cannot have.
    """
    recipe = find_recipe(name)
    chunks = recipe.chunks if chunks is None else chunks
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"{recipe.name} cannot have {number!r} {what}: give a whole number from 1 on.")
    if chunks != recipe.chunks and not recipe.any_chunks:
        raise ScheduleError(
            f"{recipe.name} cannot have {counted([chunks], 'chunk')}: a rank holds {recipe.chunks} in it. "
            f"Leave chunks out, or give chunks={recipe.chunks}."
        )
    if why := recipe.rule(ranks, microbatches):
        asked = f"{counted([microbatches], 'microbatch')} on {counted([ranks], 'rank')}"
        raise ScheduleError(f"{recipe.name} cannot have {asked}: {why}")
    numbers = recipe.name, ranks, microbatches, chunks
    schedule = _alive.get(numbers)
    if schedule is None:
        orders = recipe.orders(ranks, microbatches, chunks)
        actions = tuple(tuple(order) for order in orders)
        pairs = frozenset(recipe.overlapped(orders))
        schedule = Schedule(recipe.name, recipe.placement(ranks, chunks), microbatches, actions, pairs)
        _alive[numbers] = schedule
    return schedule


def schedule_for_stages(schedule: str | Schedule, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
    """The schedule by this name of so many stages, or a ready one, which must have as many.

    By name, there are as many ranks as the stages make up; ``ranks`` are taken where a rank may hold any number of
    stages. A ready one has its own microbatches and ranks.

    Raises ScheduleError for a name, or numbers, that there is no schedule for.
    """
    if isinstance(schedule, Schedule):
        if schedule.stages != stages:
            raise ScheduleError(
                f"{schedule.name} is for {counted([schedule.stages], 'stage')}, and there are {stages}.\n"
                f"Try: {counted([schedule.stages], 'stage')}, or a schedule for {stages}."
            )
        return schedule
    recipe = find_recipe(schedule)
    chunks = recipe.chunks
    if recipe.any_chunks and type(ranks) is int and ranks > 0 and stages % ranks == 0:
        chunks = stages // ranks
    if stages % chunks:
        fitting = [number for number in (stages // chunks * chunks, (stages // chunks + 1) * chunks) if number]
        raise ScheduleError(
            f"{recipe.name} has {chunks} stages on each rank, and {counted([stages], 'stage')} cannot be shared out "
            f"so.\nTry: {counted(fitting, 'stage')}, or a schedule with 1 stage on each rank, such as 1f1b."
        )
    return build(recipe.name, stages // chunks, microbatches, chunks)
