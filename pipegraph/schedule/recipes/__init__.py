"""The schedules known by name. To add one, write its recipe in a file here, and name it in `RECIPES`."""

from __future__ import annotations

from pipegraph.errors import ScheduleError, closest, nearest
from pipegraph.schedule.recipes import loop_schedules, v_schedules
from pipegraph.schedule.recipes.recipe import Recipe

RECIPES: tuple[Recipe, ...] = (
    loop_schedules.GPIPE,
    loop_schedules.ONE_F_ONE_B,
    loop_schedules.EAGER,
    loop_schedules.INTERLEAVED,
    loop_schedules.LOOPED_BFS,
    loop_schedules.ZB_H1,
    loop_schedules.ZB_H2,
    loop_schedules.INTERLEAVED_ZB,
    v_schedules.ZB_V,
    v_schedules.V_HALF,
    v_schedules.V_MIN,
    v_schedules.DUALPIPE_V,
    loop_schedules.FORWARD,
)
"""In the order in which they are listed. Of equally good plans, the one whose schedule comes first is chosen."""

_BY_NAME = {name.casefold(): recipe for recipe in RECIPES for name in (recipe.name, *recipe.aliases)}


def names() -> tuple[str, ...]:
    """Return the names that `build` knows. It also knows torch's class names, in upper or lower case."""
    return tuple(recipe.name for recipe in RECIPES)


def compared_names() -> tuple[str, ...]:
    """Return the names of the schedules that plans for a cluster compare by default."""
    return tuple(recipe.name for recipe in RECIPES if recipe.is_compared)


def find_recipe(name: str) -> Recipe:
    """Return the recipe of this name or alias. Raises ScheduleError."""
    recipe = _BY_NAME.get(str(name).casefold())
    if recipe is None:
        file = " A file that holds one ends in .csv." if {".", "/", "\\"} & {*str(name)} else ""
        raise ScheduleError(
            f'There is no schedule "{name}".{nearest(str(name), names())} The schedules are {", ".join(names())}.'
            f"{file}",
            f"{closest(str(name), names()) or '1f1b'}.",
        )
    return recipe


def trains(name: str) -> bool:
    """Return whether the schedule of this name has a backward. An unknown name counts as one with a backward."""
    recipe = _BY_NAME.get(name.casefold())
    return recipe is None or recipe.trains
