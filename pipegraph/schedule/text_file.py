"""Text files, read with an error that says what is wrong with them."""

from __future__ import annotations

from pathlib import Path

from pipegraph.errors import ScheduleError


def read_text(what: str, path: Path) -> str:
    """Read the text of a file that holds a ``what``. Raises ScheduleError that names the file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ScheduleError(f"the {what} {path} cannot be read: it is no UTF-8 text ({error.reason}).") from None
    except OSError as error:
        raise ScheduleError(f"the {what} {path} cannot be read: {error.strerror}.") from None
    except ValueError as error:  # a null character in the path
        raise ScheduleError(f"the {what} {path} cannot be read: {error}.") from None
