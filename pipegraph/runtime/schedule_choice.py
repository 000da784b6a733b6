"""The schedule of a pipeline: by name, as data, or from a CSV file, for a number of stages and processes."""

from __future__ import annotations

import warnings
from os import PathLike
from typing import Final, NamedTuple

from pipegraph import schedule as schedules
from pipegraph.arguments import require_type
from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.package.prediction import Prediction
from pipegraph.schedule import Kind, Schedule, build
from pipegraph.schedule.build import schedule_for_stages
from pipegraph.schedule.lower import without_transfers
from pipegraph.schedule.recipes import find_recipe


def resolve_schedule(
    schedule: str | PathLike[str] | Schedule,
    microbatches: int | None,
    stages: int,
    processes: int | None,
    ranks: int | None = None,
    sharing: int = 1,
) -> Schedule:
    """The schedule for a package's stages.

    Args:
        schedule: a name, the path of a CSV file, or a ready schedule. Its transfers are taken out: those that the
            package needs are inserted later.
        microbatches: 1 by default, or those of a ready schedule.
        processes: the number of processes, one per rank; None for one process with any number of virtual ranks.
        ranks: the number of ranks if `processes` is None, for a name that allows any number of stages on a rank.
        sharing: the number of processes of the mesh that share the stages of one rank, including itself.

    Raises:
        ScheduleError: the numbers do not fit together.
    """
    kinds = (str, PathLike, Schedule)
    require_type(schedule, kinds, "schedule is a name, a Schedule or a CSV file", 'schedule="1f1b"', ScheduleError)
    if isinstance(schedule, PathLike) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        schedule = schedules.read_csv(schedule, transfers=False)
    if isinstance(schedule, Schedule) and schedule.lowered:
        schedule = without_transfers(schedule)
    resolved = schedule_for_stages(schedule, stages, 1 if microbatches is None else microbatches, processes or ranks)
    if microbatches not in (None, resolved.microbatches):
        raise ScheduleError(
            f"{resolved.name} has {resolved.microbatches} microbatches; microbatches={microbatches} was given.",
            "leave it out.",
        )
    if processes is not None and processes != resolved.ranks:
        count, alternatives = resolved.ranks, other_names(stages, processes)
        on = f"{resolved.name} runs the package's {stages} stages on {count} ranks, and"
        if sharing > 1:
            raise ScheduleError(
                f"{on} the mesh has {processes} along pp.",
                f"{count} along pp, which takes {count * sharing} processes.{alternatives}",
            )
        raise ScheduleError(
            f"{on} {processes} processes were started. Start {count} (--nproc-per-node {count}), or run without "
            f"torchrun: one process then holds all stages.{alternatives}"
        )
    return resolved


def with_microbatches(
    schedule: Schedule, choice: str | PathLike[str] | Schedule, microbatches: int, processes: int | None
) -> Schedule:
    """The schedule of a pipeline for another number of microbatches.

    Args:
        schedule: the schedule of the pipeline.
        choice: the argument that chose it.
        microbatches: 1 or more.
        processes: as for `resolve_schedule`.

    Raises:
        ScheduleError: the choice was not a name but a fixed order, or the schedule cannot have this number.
    """
    if microbatches == schedule.microbatches:
        return schedule
    if not isinstance(choice, str) or choice.endswith(".csv"):
        count = schedule.microbatches
        raise ScheduleError(
            f"{schedule.name} is an order of {count} microbatches, and microbatches={microbatches} was given.",
            f"leave it out, give Pipeline the name of a schedule, or make another Pipeline with an order of "
            f"{microbatches}.",
        )
    return resolve_schedule(choice, microbatches, schedule.stages, processes, schedule.ranks)


def fewer_microbatches(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule without its last microbatches. What is left keeps its order, and so can run if the whole can."""
    actions = tuple(tuple(action for action in row if action.microbatch < microbatches) for row in schedule.actions)
    pairs = frozenset(pair for pair in schedule.overlapped if all(action.microbatch < microbatches for action in pair))
    name = f"{schedule.name}, its first {microbatches} microbatches"
    return schedule.changed(name=name, microbatches=microbatches, actions=actions, overlapped=pairs)


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward and collectives, in the same placement: what `evaluate` runs."""
    actions = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    name = f"{schedule.name}, forward only"
    return schedule.changed(name=name, actions=actions, overlapped=frozenset(), collectives=())


def other_names(stages: int, ranks: int) -> str:
    """Return a sentence that names the schedules for `stages` on `ranks`; empty if no schedule fits."""
    if stages % ranks:
        return ""
    recipes = [find_recipe(name) for name in schedules.names()]
    fitting = [recipe.name for recipe in recipes if recipe.any_chunks or recipe.chunks * ranks == stages]
    shared = f"{stages // ranks} stages on each of {ranks} ranks" if ranks > 1 else f"{stages} stages on 1 rank"
    return f" With {shared} run {', '.join(fitting)}." if fitting else ""


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
    if schedule is None and plan is not None and plan.order:
        schedule = schedules.from_csv("\n".join(plan.order) + "\n", plan.schedule, transfers=False)
    elif schedule is None:
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
