"""Schedules and times read from files, with errors that name the file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from pipegraph.errors import ScheduleError
from pipegraph.schedule.check import check
from pipegraph.schedule.csv_format import Columns, parse_csv
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.times import Times


def read_csv(path: str | PathLike[str]) -> Schedule:
    """Read a schedule from a file, as `from_csv` does, and `check` it. Its name is the file's, without the ending.

    Raises a ScheduleError that names the file, and line and action in it.
    """
    path = Path(path)
    schedule, columns = parse_csv(_read_text("schedule", path), path.stem, path.name)
    try:
        check(schedule)
    except ScheduleError as error:
        what, picture = str(error).split("\n", 1)
        raise ScheduleError(f"{what} ({path.name}, {_places(error, columns)})\n{picture}", error.places) from None
    return schedule


def read_times(path: str | PathLike[str]) -> Times:
    """Read times from a file, as `Times.from_json` does. Raises ScheduleError that names the file."""
    path = Path(path)
    text = _read_text("times", path)
    try:
        return Times.from_json(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def _read_text(what: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"the {what} {path} cannot be read: it is no UTF-8 text ({error.reason}).") from None
    except OSError as error:
        raise ScheduleError(f"the {what} {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a null character in the path
        raise ScheduleError(f"the {what} {path} cannot be read: {error}.") from None


def _places(error: ScheduleError, columns: Columns) -> str:
    """Name the lines and actions at fault; only the line if an action is missing at its end."""
    places = []
    for rank, position in sorted(error.places.items()):
        action = f", action {columns[rank][position]}" if position < len(columns[rank]) else ""
        places.append(f"line {rank + 1}{action}")
    return " and ".join(places)
