"""The schedule of exactly so many stages."""

from __future__ import annotations

from pipegraph.errors import ScheduleError
from pipegraph.schedule.build import build, find
from pipegraph.schedule.recipes.recipe import counted
from pipegraph.schedule.schedule import Schedule


def fitted(schedule: str | Schedule, stages: int, microbatches: int, ranks: int | None = None) -> Schedule:
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
    recipe = find(schedule)
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
