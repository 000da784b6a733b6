"""Schedules by name."""

from __future__ import annotations

from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule import forward, gpipe, one_f_one_b
from pipegraph.schedule.recipe import Recipe
from pipegraph.schedule.schedule import Schedule

RECIPES: tuple[Recipe, ...] = (gpipe.RECIPE, one_f_one_b.RECIPE, forward.RECIPE)

_BY_NAME = {name.casefold(): recipe for recipe in RECIPES for name in (recipe.name, *recipe.aliases)}


def names() -> tuple[str, ...]:
    """The names that `build` knows. It knows torch's class names as well, and letters of any case."""
    return tuple(recipe.name for recipe in RECIPES)


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make the schedule of this name for so many ranks, microbatches, and chunks (stages on a rank).

    Raises ScheduleError for an unknown name, or numbers that the schedule cannot have.
    """
    recipe = _BY_NAME.get(str(name).casefold())
    if recipe is None:
        raise ScheduleError(
            f'There is no schedule "{name}".{nearest(str(name), names())} The schedules are {", ".join(names())}.'
        )
    chunks = recipe.chunks if chunks is None else chunks
    for what, number in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if type(number) is not int or number < 1:
            raise ScheduleError(f"{recipe.name} cannot have {number!r} {what}: give a whole number from 1 on.")
    if chunks != recipe.chunks:
        raise ScheduleError(
            f"{recipe.name} cannot have {chunks} chunks: a rank holds {recipe.chunks} in it. "
            f"Leave chunks out, or give chunks={recipe.chunks}."
        )
    actions = tuple(tuple(order) for order in recipe.orders(ranks, microbatches, chunks))
    return Schedule(recipe.name, recipe.placement(ranks, chunks), microbatches, actions)
