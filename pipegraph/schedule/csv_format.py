"""Schedules as text, in the CSV form of torch.distributed.pipelining: a line per rank, a cell per action."""

from __future__ import annotations

import csv
import io
import re
from os import PathLike
from pathlib import Path

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind, unit_text
from pipegraph.schedule.check import check
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.text_file import read_text

# torch writes two actions that run at the same time as (0F7;7B3)OVERLAP_F_B.
_OVERLAPPED = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
# What torch adds for sharded parameters and for data parallelism, and (from 2.15) where it lets go of a sent buffer. It
# is no part of the order, and is left out.
_OF_OTHERS = re.compile(r"[0-9]+(UNSHARD|RESHARD|(WAIT_)?REDUCE_GRAD|WAIT_SEND_[FB][0-9]*)")


Columns = tuple[tuple[int, ...], ...]
"""Of each rank, the cell in which each of its actions stands, counted from 1."""


def to_csv(schedule: Schedule) -> str:
    """Write the orders of all ranks, with their transfers if they have any.

    torch reads and runs what has no transfers with ``_load_csv`` of _PipelineScheduleRuntime, and adds its own; with
    transfers it takes format="compute_comms", and then leaves gradients summed over microbatches, not divided by their
    number. It cannot read a transfer to a stage that is not the neighbour, such as 0SEND_F0>3, as it knows only chains
    of stages, nor a schedule without a backward. An overlapped pair is written as one cell where its two actions stand
    together; torch has no other form for it, and where they do not, it is lost.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"to_csv takes a Schedule, not {schedule!r}. build makes one from a name.")
    return "".join(f"{','.join(map(unit_text, schedule.units(rank)))}\n" for rank in range(schedule.ranks))


def from_csv(text: str, name: str = "csv") -> Schedule:
    """Read what `to_csv` or torch writes, with or without transfers; empty cells mean nothing.

    The placement is read off the lines: a stage is on the rank in whose line its actions stand. Microbatches count from
    0 to the largest that stands there. Raises ScheduleError that names line and action; whether the schedule can run is
    for `check` to say.
    """
    schedule, _ = _parse_csv(text, name, name)
    return schedule


def read_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule from a file, as `from_csv` does, and `check` it. It is called as the file is.

    Raises ScheduleError that names the file, and line and action in it.
    """
    path = Path(path)
    schedule, columns = _parse_csv(read_text("schedule", path), path.stem, path.name)
    try:
        check(schedule)
    except ScheduleError as error:
        what, picture = str(error).split("\n", 1)
        raise ScheduleError(f"{what} ({path.name}, {_where(error, columns)})\n{picture}", error.places) from None
    return schedule


def _parse_csv(text: str, name: str, source: str) -> tuple[Schedule, Columns]:
    """As `from_csv`; also say where each action stands. Line n is that of rank n − 1. Errors speak of ``source``."""
    orders: list[list[Action]] = []
    columns: list[list[int]] = []
    overlapped: set[tuple[Action, Action]] = set()
    placement: dict[int, int] = {}
    for rank, row in enumerate(_lines(text, source)):
        order: list[Action] = []
        columns.append([])
        for column, written in enumerate(row, 1):
            try:
                actions = _parse(written)
                for action in actions:
                    _place(action, rank, placement)
            except ScheduleError as error:
                raise ScheduleError(f"{source}, line {rank + 1}, action {column}: {error}") from None
            if len(actions) == 2:
                overlapped.add((actions[0], actions[1]))
            order += actions
            columns[rank] += [column] * len(actions)
        if not order:
            raise ScheduleError(
                f"{source}, line {rank + 1}: no action stands here. Every rank has a line with actions."
            )
        orders.append(order)
    if not orders:
        raise ScheduleError(f"{source}: there is no action. A schedule has a line per rank, such as 0F0,0F1,0B0,0B1.")
    for stage in range(len(placement)):
        if stage not in placement:
            raise ScheduleError(
                f"{source}: stage {stage} has no action, but stage {max(placement)} has. "
                f"Stages count from 0 with no gap."
            )
    microbatches = 1 + max(action.microbatch for order in orders for action in order)
    ranks_of_stages = tuple(placement[stage] for stage in range(len(placement)))
    schedule = Schedule(name, ranks_of_stages, microbatches, tuple(map(tuple, orders)), frozenset(overlapped))
    return schedule, tuple(map(tuple, columns))


def _where(error: ScheduleError, columns: Columns) -> str:
    """The lines and actions at fault. Where an action is missing at the end of a line, the line."""
    places = []
    for rank, position in sorted(error.places.items()):
        action = f", action {columns[rank][position]}" if position < len(columns[rank]) else ""
        places.append(f"line {rank + 1}{action}")
    return " and ".join(places)


def _place(action: Action, rank: int, placement: dict[int, int]) -> None:
    if (other := placement.setdefault(action.stage, rank)) != rank:
        raise ScheduleError(
            f"{action} is of stage {action.stage}, which line {other + 1} holds. "
            f"A stage is on one rank: move {action} to line {other + 1}."
        )


def _lines(text: str, source: str) -> list[list[str]]:
    """The cells of every line, without the byte order mark at the beginning and the empty lines at the end."""
    try:
        lines = list(csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
    except csv.Error as error:
        raise ScheduleError(f"{source}: this is no CSV: {error}.") from None
    while lines and not any(cell.strip() for cell in lines[-1]):
        lines.pop()
    return lines


def _parse(text: str) -> list[Action]:
    """The actions of one cell: none, one, or an overlapped F and B."""
    text = text.strip()
    if not text or _OF_OTHERS.fullmatch(text):
        return []
    if match := _OVERLAPPED.fullmatch(text):
        pair = [Action.parse(part) for part in match.groups()]
        if [action.kind for action in pair] != [Kind.F, Kind.B]:
            raise ScheduleError(f"{text!r} is no overlapped pair: that is an F and a B, such as (0F7;7B3)OVERLAP_F_B.")
        return pair
    return [Action.parse(text)]
