"""Every error pipegraph raises on purpose.

    PipegraphError
     ├── SourceError      the model's file, or what it defines, cannot be used
     ├── CaptureError     the model cannot be captured as a graph
     ├── PlanError        the captured model cannot be split as asked
     │    └── ArgumentError    no model could be split as asked
     ├── ScheduleError    a schedule cannot be built, or is wrong
     ├── PackageError     a package on disk is damaged, too new, or not one
     ├── CheckpointError  a checkpoint cannot be written or read, or is another model's
     ├── BatchError       the inputs of a step do not fit the package
     ├── OutputError      stdout or stderr of the command line cannot be written
     │    └── ClosedOutput     … because who read it has closed it
     └── RuntimeFault     a run failed

A message says what happened, where, why, the nearest valid choices, and one thing to try. The command line prints the
message and exits with the class's ``exit_code``.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final

_ADVICE: Final = "\nTry: "


class PipegraphError(Exception):
    """The parent of every error that pipegraph raises on purpose.

    Attributes:
        problem: what happened, where and why.
        advice: one thing to try; may be empty.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, problem: str, advice: str = "") -> None:
        if not advice:  # the text of an error of another process has both
            problem, _, advice = problem.partition(_ADVICE)
        super().__init__(f"{problem}{_ADVICE}{advice}" if advice else problem)
        self.problem, self.advice = problem, advice


class SourceError(PipegraphError):
    """A model file or configuration is missing, cannot be loaded, or lacks a name that pipegraph needs."""


class CaptureError(PipegraphError):
    """The model cannot be captured: control flow that depends on data, or an operation export does not know."""

    exit_code = 3


class PlanError(PipegraphError):
    """The captured model cannot be split as asked: an unknown or misplaced point, or too many stages."""

    exit_code = 3


class ArgumentError(PlanError):
    """An argument has a value that it cannot have for any model."""

    exit_code = 2


class ScheduleError(PipegraphError):
    """No schedule has this name or these numbers, or a schedule breaks a rule.

    ``places`` hold where: rank → position among its actions.
    """

    def __init__(self, problem: str, advice: str = "", places: Mapping[int, int] | None = None) -> None:
        super().__init__(problem, advice)
        self.places = dict(places or {})


class PackageError(PipegraphError):
    """A package cannot be read or written: damaged, of a newer schema, edited by hand, or no package at all."""


class CheckpointError(PipegraphError):
    """A checkpoint cannot be written or read: a full disk, damaged files, another model or another optimizer."""


class RuntimeFault(PipegraphError):
    """A run failed: the message names the rank, stage, action and microbatch where that is known."""

    exit_code = 4


class OutputError(PipegraphError):
    """stdout or stderr cannot be written, as on a full disk."""


class ClosedOutput(OutputError):
    """Who read stdout or stderr has closed it, as ``head`` does. The command line ends without a word."""

    exit_code = 141  # as of a process that SIGPIPE ended


class BatchError(PipegraphError):
    """What was passed to a step is not what the package was made for: another shape, dtype or structure.

    ``is_of_target`` tells that the inputs fit, and the target does not fit them.
    """

    def __init__(self, problem: str, advice: str = "", is_of_target: bool = False) -> None:
        super().__init__(problem, advice)
        self.is_of_target = is_of_target


def user_line(error: BaseException) -> str:
    """``model.py:12: code``: the innermost line of the user's source in the traceback of an error or of its cause;
    empty if no line is the user's. Files of torch, pipegraph and Python are not the user's. The file is named by
    `path_from_here`."""
    current: BaseException | None = error
    while current is not None:
        line = _innermost_user_line(traceback.extract_tb(current.__traceback__))
        if line:
            return line
        current = current.__cause__ or current.__context__
    return ""


def current_user_line() -> str:
    """The innermost line of the model's own source that is running, as `user_line` gives it; not of who captures it."""
    frames = traceback.extract_stack()
    graph = Path(__file__).parent / "graph"
    inside = next((at for at, frame in enumerate(frames) if graph in Path(frame.filename).parents), 0)
    return _innermost_user_line(frames[inside:])


def _innermost_user_line(frames: Sequence[traceback.FrameSummary]) -> str:
    frame = next((summary for summary in reversed(frames) if is_user_file(summary.filename)), None)
    if frame is None:
        return ""
    return f"{path_from_here(frame.filename)}:{frame.lineno}{f': {frame.line}' if frame.line else ''}"


def path_from_here(path: str | Path) -> str:
    """Return how a command in the working folder names a file or folder: relative if it lies within."""
    try:
        working_folder = Path.cwd()
    except OSError:  # it was removed
        return str(path)
    path = Path(path)
    return str(path.relative_to(working_folder) if path.is_relative_to(working_folder) else path)


def frame_above(levels: int) -> FrameType | None:
    """The frame some levels above that of the caller: 1 for its own caller.

    A function that holds its own frame holds all that runs, until the garbage collector finds the cycle.
    """
    frame = inspect.currentframe()
    for _ in range(levels + 1):
        frame = frame.f_back if frame is not None else None
    return frame


@lru_cache(maxsize=1024)
def is_user_file(path: str) -> bool:
    """Return whether a source file is neither torch's nor pipegraph's nor Python's own."""
    torch = sys.modules.get("torch")
    library_folders = [Path(__file__).parent, *([Path(str(torch.__file__)).parent] if torch is not None else [])]
    python = Path(os.__file__).parent  # which may hold the libraries of others, too
    file = Path(path)
    standard = python in file.parents and "site-packages" not in file.parts
    return file.is_file() and not standard and not any(folder in file.parents for folder in library_folders)


def closest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that is spelled most like ``name``; None if none is close."""
    return next(iter(difflib.get_close_matches(name, list(choices), n=1)), None)


def first_names(names: Collection[str], count: int = 3) -> str:
    """The first few names: ``a, b, c and 2 more``."""
    remainder = f" and {len(names) - count} more" if len(names) > count else ""
    return f"{', '.join(list(names)[:count])}{remainder}"


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``' Did you mean "layers.4"?'`` for the closest choice, or an empty string if none is close."""
    close = closest(name, choices)
    return f' Did you mean "{close}"?' if close is not None else ""


def one_line(text: str) -> str:
    """Return ``text`` with what is not printable escaped: names in files may hold anything, terminal escapes included.

    >>> one_line("layers.new\nline")
    'layers.new\\nline'
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def printable(text: str) -> str:
    """Return ``text`` with what is not printable escaped on each of its lines."""
    return "\n".join(map(one_line, text.split("\n")))
