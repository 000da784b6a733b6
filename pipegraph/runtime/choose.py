"""The schedule of a pipeline: by name, as data, or from a CSV file, for so many stages and processes."""

from __future__ import annotations

from os import PathLike

from pipegraph import schedule as schedules
from pipegraph.errors import ScheduleError
from pipegraph.schedule import Kind, Schedule
from pipegraph.schedule.build import find


def choose(
    schedule: str | PathLike[str] | Schedule,
    microbatches: int | None,
    stages: int,
    processes: int | None,
    ranks: int | None = None,
) -> Schedule:
    """The schedule for `stages`, on so many processes; None: on as many virtual ranks as it likes.

    `microbatches` is 1 by default, or what a ready schedule has. A name that allows any number of stages on a rank gets
    as many `ranks` as are given, or as processes. ScheduleError where the numbers do not fit together.
    """
    if isinstance(schedule, Schedule):
        found = schedule
    elif isinstance(schedule, PathLike) or schedule.endswith(".csv"):
        found = schedules.read_csv(schedule)
    else:
        found = _by_name(schedule, 1 if microbatches is None else microbatches, stages, processes or ranks)
    if microbatches not in (None, found.microbatches):
        raise ScheduleError(
            f"{found.name} has {found.microbatches} microbatches; microbatches={microbatches} was given."
        )
    if found.stages != stages:
        raise ScheduleError(
            f"{found.name} is for {found.stages} stages, and the package has {stages}: "
            f"split the model with --stages {found.stages}, or make the schedule for {stages}."
        )
    if processes not in (None, found.ranks):
        raise ScheduleError(
            f"{found.name} runs the package's {stages} stages on {found.ranks} ranks, and {processes} processes were "
            f"started. Start {found.ranks} (--nproc-per-node {found.ranks}), or run without torchrun: one process then "
            f"holds all stages.{other_names(stages, processes)}"
        )
    return found


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward, in the same placement: what `eval` runs."""
    actions = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return schedule.changed(name=f"{schedule.name}, forward only", actions=actions, overlapped=frozenset())


def _by_name(name: str, microbatches: int, stages: int, ranks: int | None) -> Schedule:
    recipe = find(name)
    chunks = recipe.chunks
    if recipe.any_chunks and ranks is not None and stages % ranks == 0:
        chunks = stages // ranks
    if stages % chunks:
        fewer = stages // chunks * chunks
        fitting = f"{fewer} or {fewer + chunks}" if fewer else f"{chunks}"
        raise ScheduleError(
            f"{recipe.name} needs {chunks} stages per rank, and the package's {stages} cannot be shared out so. "
            f"Split the model with --stages {fitting}, or take a schedule with 1 stage per rank, such as 1f1b."
        )
    return schedules.build(name, stages // chunks, microbatches, chunks)


def other_names(stages: int, ranks: int) -> str:
    """A sentence that says which schedules can have so many stages on so many ranks; empty if none can."""
    if stages % ranks:
        return ""
    recipes = [find(name) for name in schedules.names()]
    fitting = [recipe.name for recipe in recipes if recipe.any_chunks or recipe.chunks * ranks == stages]
    shared = f"{stages // ranks} stages on each of {ranks} ranks" if ranks > 1 else f"{stages} stages on 1 rank"
    return f" With {shared} run {', '.join(fitting)}." if fitting else ""
