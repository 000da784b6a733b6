"""The schedule of a pipeline: by name, as data, or from a CSV file, for so many stages and processes."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

from pipegraph import schedule as schedules
from pipegraph.errors import ScheduleError
from pipegraph.schedule import Kind, Schedule


def choose(
    schedule: str | PathLike[str] | Schedule, microbatches: int | None, stages: int, processes: int | None
) -> Schedule:
    """The schedule for `stages`, on so many processes; None: on as many virtual ranks as it likes.

    `microbatches` is 1 by default, or what a ready schedule has. ScheduleError where the numbers do not fit together.
    """
    if isinstance(schedule, Schedule):
        found = schedule
    elif isinstance(schedule, PathLike) or schedule.endswith(".csv"):
        path = Path(schedule)
        try:
            found = schedules.from_csv(path.read_text(encoding="utf-8"), name=path.stem)
        except (OSError, UnicodeDecodeError) as error:
            raise ScheduleError(f"the schedule {path} cannot be read: {error}.") from None
    else:
        found = _by_name(schedule, 1 if microbatches is None else microbatches, stages)
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
            f"holds all stages."
        )
    return found


def forward_only(schedule: Schedule) -> Schedule:
    """The schedule without its backward, in the same placement: what `eval` runs."""
    actions = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return replace(schedule, name=f"{schedule.name}, forward only", actions=actions, overlapped=frozenset())


def _by_name(name: str, microbatches: int, stages: int) -> Schedule:
    """A schedule that holds several stages on each rank shows how many when it is built for as many ranks as stages."""
    found = schedules.build(name, stages, microbatches)
    chunks = found.stages // stages
    if chunks > 1 and stages % chunks == 0:
        return schedules.build(name, stages // chunks, microbatches, chunks)
    return found
