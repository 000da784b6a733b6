"""Schedules as the text that torch reads and writes, and files with schedules and times."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from os import PathLike
from pathlib import Path

from pipegraph.arguments import require_path, require_type
from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Collective, Kind, unit_text
from pipegraph.schedule.check import check
from pipegraph.schedule.schedule import Schedule, require_schedule
from pipegraph.schedule.times import TIMES_FORM, Times

# torch writes two actions that run at the same time as (0F7;7B3)OVERLAP_F_B.
_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
# Left out: the waits that torch adds, from 2.15 on, for a sent buffer and for reduced gradients.
_IGNORED = re.compile(r"[0-9]+WAIT_(REDUCE_GRAD|SEND_[FB][0-9]*)")


Columns = tuple[tuple[int, ...], ...]
"""rank → the cell of each of its actions, counted from 1"""


def to_csv(schedule: Schedule) -> str:
    """Write the orders of all ranks, with their transfers and collectives if they have any.

    torch reads a schedule without transfers with ``_load_csv`` of _PipelineScheduleRuntime, and adds its own. With
    transfers it needs format="compute_comms", and then sums gradients over microbatches without dividing by their
    number; from 2.15 it also wants a WAIT_SEND for each send, which a Schedule lacks. It cannot read a schedule without
    a backward, nor a transfer that skips stages, such as 0SEND_F0>3, because it knows only chains of stages. An
    overlapped pair is written as one cell if its two actions are adjacent; otherwise the mark is lost, because torch
    has no other form for it.
    """
    require_schedule("to_csv", schedule)
    rows = (map(unit_text, schedule.program_units(rank)) for rank in range(schedule.ranks))
    return "".join(f"{','.join(row)}\n" for row in rows)


def from_csv(text: str, name: str = "csv", transfers: bool = True) -> Schedule:
    """Read what `to_csv` or torch writes, with or without transfers. Empty cells are skipped.

    Transfers are read as they are, or left out if ``transfers`` is false: `lower` then inserts them again. UNSHARD,
    RESHARD and REDUCE_GRAD become `Schedule.collectives`. A stage is placed on the rank whose line has its actions.
    Microbatches count from 0 to the largest in the text. Raises a ScheduleError that names line and action. `check`
    decides whether the schedule can run.
    """
    require_type(text, str, "from_csv() takes the text of a CSV file", "read_csv(path)", ScheduleError)
    schedule, _ = _parse_csv(text, name, name, transfers)
    return schedule


def _parse_csv(text: str, name: str, source: str, transfers: bool) -> tuple[Schedule, Columns]:
    """Read a schedule and the cells of its actions. Line n is that of rank n − 1. Errors name the text ``source``."""
    orders: list[list[Action]] = []
    columns: list[list[int]] = []
    overlapped: set[tuple[Action, Action]] = set()
    collectives: list[Collective] = []
    placement: dict[int, int] = {}
    for rank, row in enumerate(_lines(text, source)):
        order: list[Action] = []
        waiting: list[Collective] = []
        columns.append([])
        for column, cell in enumerate(row, 1):
            try:
                if (collective := Collective.parse(cell)) is not None:
                    _place(collective, rank, placement)
                    waiting.append(collective)
                    continue
                actions = _parse_cell(cell)
                for action in actions:
                    _place(action, rank, placement)
            except ScheduleError as error:
                raise ScheduleError(f"{source}, line {rank + 1}, action {column}: {error}") from None
            if not transfers:
                actions = [action for action in actions if action.peer is None]
            if actions:
                collectives += [replace(pending, before=actions[0]) for pending in waiting]
                waiting.clear()
            if len(actions) == 2:
                overlapped.add((actions[0], actions[1]))
            order += actions
            columns[rank] += [column] * len(actions)
        collectives += waiting
        if not order:
            raise ScheduleError(
                f"{source}, line {rank + 1}: there is no action here.", "a line with actions for every rank."
            )
        orders.append(order)
    if not orders:
        raise ScheduleError(f"{source}: there is no action.", "a line for each rank, such as 0F0,0F1,0B0,0B1.")
    for stage in range(len(placement)):
        if stage not in placement:
            raise ScheduleError(
                f"{source}: stage {stage} has no action, but stage {max(placement)} has.",
                "numbers of stages from 0 on, with no gap.",
            )
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    ranks_of_stages = tuple(placement[stage] for stage in range(len(placement)))
    rows, pairs = tuple(map(tuple, orders)), frozenset(overlapped)
    schedule = Schedule(name, ranks_of_stages, microbatches, rows, pairs, collectives=tuple(collectives))
    return schedule, tuple(map(tuple, columns))


def _place(action: Action | Collective, rank: int, placement: dict[int, int]) -> None:
    if (stage_rank := placement.setdefault(action.stage, rank)) != rank:
        raise ScheduleError(
            f"{action} is of stage {action.stage}, which line {stage_rank + 1} holds: a stage is on one rank.",
            f"move {action} to line {stage_rank + 1}.",
        )


def _lines(text: str, source: str) -> list[list[str]]:
    """Return the cells of every line, without a byte order mark and the empty lines at the end."""
    try:
        lines = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"{source}: this is no CSV: {error}.") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    return lines


def _parse_cell(text: str) -> list[Action]:
    """Return the actions of one cell: none, one, or an overlapped F and B."""
    text = text.strip()
    if not text or _IGNORED.fullmatch(text):
        return []
    if match := _OVERLAPPED.fullmatch(text):
        pair = [Action.parse(part) for part in match.groups()]
        if [action.kind for action in pair] != [Kind.F, Kind.B]:
            raise ScheduleError(f"{text!r} is not an overlapped pair of an F and a B, such as (0F7;7B3)OVERLAP_F_B.")
        return pair
    return [Action.parse(text)]


def read_csv(path: str | PathLike[str], transfers: bool = True) -> Schedule:
    """Read a schedule from a file, as `from_csv` does, and `check` it. Its name is the file's, without the ending.

    Raises a ScheduleError that names the file, and line and action in it.
    """
    path = require_path(path, "read_csv() takes the path of a file", "from_csv(text)", ScheduleError)
    schedule, columns = _parse_csv(_read_text("schedule", path), path.stem, path.name, transfers)
    try:
        check(schedule)
    except ScheduleError as error:
        problem, picture = error.problem.split("\n", 1)
        place = f"{path.name}, {_places(error, columns)}"
        raise ScheduleError(f"{problem} ({place})\n{picture}", error.advice, error.places) from None
    return schedule


def read_times(path: str | PathLike[str]) -> Times:
    """Read times from a file, as `Times.from_json` does. Raises ScheduleError that names the file."""
    path = require_path(path, "read_times() takes the path of a file", "Times.from_json(text)", ScheduleError)
    text = _read_text("times", path)
    try:
        return Times.from_json(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error.problem}", error.advice or f"{TIMES_FORM}.") from None


def _read_text(subject: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            f"the {subject} {path} cannot be read: it is no UTF-8 text ({error.reason}).", "save it as UTF-8."
        ) from None
    except OSError as error:
        raise ScheduleError(
            f"the {subject} {path} cannot be read: {error.strerror}.", "the name of a file that is there."
        ) from None


def _places(error: ScheduleError, columns: Columns) -> str:
    """Name the lines and actions at fault; only the line if an action is missing at its end."""
    places = []
    for rank, position in sorted(error.places.items()):
        action = f", action {columns[rank][position]}" if position < len(columns[rank]) else ""
        places.append(f"line {rank + 1}{action}")
    return " and ".join(places)
