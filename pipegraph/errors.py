"""Every error pipegraph raises on purpose.

    PipegraphError
     ├── SourceError      the model's file, or what it defines, cannot be used
     ├── CaptureError     the model cannot be captured as a graph
     ├── PlanError        the captured model cannot be split as asked
     ├── ScheduleError    a schedule cannot be built, or is wrong
     ├── PackageError     a package on disk is damaged, too new, or not one
     └── RuntimeFault     a run failed

A message says what happened, where, why, the nearest valid choices, and one thing to try. The command line prints the
message and exits with the class's ``exit_code``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class PipegraphError(Exception):
    """The parent of every error that pipegraph raises on purpose."""

    exit_code: ClassVar[int] = 2


class SourceError(PipegraphError):
    """A model file or configuration is missing, cannot be loaded, or lacks a name that pipegraph needs."""


class CaptureError(PipegraphError):
    """The model cannot be captured: control flow that depends on data, or an operation export does not know."""

    exit_code = 3


class PlanError(PipegraphError):
    """The captured model cannot be split as asked: an unknown or misplaced point, or too many stages."""

    exit_code = 3


class ScheduleError(PipegraphError):
    """No schedule has this name or these numbers, or a schedule breaks a rule."""


class PackageError(PipegraphError):
    """A package cannot be read or written: damaged, of a newer schema, edited by hand, or no package at all."""


class RuntimeFault(PipegraphError):
    """A run failed: the message names the rank, stage, action and microbatch where that is known."""

    exit_code = 4


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``' Did you mean "layers.4"?'`` for the closest choice, or an empty string if none is close."""
    close = difflib.get_close_matches(name, list(choices), n=1)
    return f' Did you mean "{close[0]}"?' if close else ""
