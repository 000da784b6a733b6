"""The schedule, microbatches and ranks that a package was planned for, in place of what the caller leaves out."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Final, NamedTuple

from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.package.prediction import Prediction
from pipegraph.schedule import Schedule, build
from pipegraph.schedule.recipes import find_recipe

DEFAULT_SCHEDULE: Final = "1f1b"


class ScheduleChoice(NamedTuple):
    """The arguments of `resolve_schedule`."""

    schedule: str | PathLike[str] | Schedule
    microbatches: int | None
    ranks: int | None


def as_planned(
    manifest: Manifest, schedule: str | PathLike[str] | Schedule | None, microbatches: int | None
) -> ScheduleChoice:
    """Return the choice of a caller, completed by the plan of the package, or by 1F1B and one microbatch without one.

    Warns if the plan is for an order that no name stands for.
    """
    plan = manifest.prediction
    if schedule is None:
        schedule = DEFAULT_SCHEDULE if plan is None else _name_of(plan)
    if plan is None or not isinstance(schedule, str) or schedule.endswith(".csv"):
        return ScheduleChoice(schedule, microbatches, None)
    name = find_recipe(schedule).name
    ranks = len(set(plan.placement)) if name == plan.schedule else None
    return ScheduleChoice(name, plan.microbatches if microbatches is None else microbatches, ranks)


def _name_of(plan: Prediction) -> str:
    """The name of the plan's schedule; that of the default one if the plan has another order."""
    ranks = len(set(plan.placement))
    try:
        schedule = build(plan.schedule, ranks, plan.microbatches, len(plan.placement) // ranks)
    except ScheduleError:
        schedule = None
    if schedule is not None and tuple(schedule.placement) == tuple(plan.placement):
        return schedule.name
    warnings.warn(
        f"the package is planned for {plan.schedule}, an order that is in a file; {DEFAULT_SCHEDULE} runs instead. "
        "Try: Pipeline(…, schedule=FILE) with that CSV file.",
        stacklevel=4,
    )
    return DEFAULT_SCHEDULE
