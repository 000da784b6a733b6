"""Schedules by name."""

from __future__ import annotations

from weakref import WeakValueDictionary

from pipegraph.errors import ScheduleError, nearest
from pipegraph.schedule.recipes import (
    controllable_memory,
    dualpipe_v,
    eager_1f1b,
    forward,
    gpipe,
    interleaved,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    zb_h,
    zb_v,
)
from pipegraph.schedule.recipes.recipe import Recipe, counted
from pipegraph.schedule.schedule import Schedule

RECIPES: tuple[Recipe, ...] = (
    gpipe.RECIPE,
    one_f_one_b.RECIPE,
    eager_1f1b.RECIPE,
    interleaved.RECIPE,
    looped_bfs.RECIPE,
    zb_h.H1,
    zb_h.H2,
    interleaved_zb.RECIPE,
    zb_v.RECIPE,
    controllable_memory.HALF,
    controllable_memory.MIN,
    dualpipe_v.RECIPE,
    forward.RECIPE,
)

# A schedule never changes: one that is in use is given again, with all that it has found out about itself.
_alive: WeakValueDictionary[tuple[str, int, int, int], Schedule] = WeakValueDictionary()

_BY_NAME = {name.casefold(): recipe for recipe in RECIPES for name in (recipe.name, *recipe.aliases)}


def names() -> tuple[str, ...]:
    """The names that `build` knows. It knows torch's class names as well, and letters of any case."""
    return tuple(recipe.name for recipe in RECIPES)


def build(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Schedule:
    """Make the schedule of this name for so many ranks, microbatches, and chunks (stages on a rank).

    Raises ScheduleError for an unknown name, or numbers that the schedule cannot have.
    """
    recipe = find(name)
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


def find(name: str) -> Recipe:
    """The recipe of this name. Raises ScheduleError."""
    recipe = _BY_NAME.get(str(name).casefold())
    if recipe is None:
        file = " A file that holds one ends in .csv." if {".", "/", "\\"} & {*str(name)} else ""
        raise ScheduleError(
            f'There is no schedule "{name}".{nearest(str(name), names())} The schedules are {", ".join(names())}.{file}'
        )
    return recipe
