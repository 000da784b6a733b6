"""Pipeline schedules as pure data: built, written, lowered and checked with neither torch nor a process group.

build ──▶ Schedule ──▶ lower ──▶ Schedule with transfers ──▶ the executor
             │  ▲                     │
       check │  │ from_csv, to_csv    │ check
"""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.build import build, names
from pipegraph.schedule.check import check
from pipegraph.schedule.lower import lower
from pipegraph.schedule.memory import peak_activations
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.text import from_csv, to_csv

__all__ = [
    "Action",
    "Kind",
    "Schedule",
    "build",
    "check",
    "from_csv",
    "lower",
    "names",
    "peak_activations",
    "to_csv",
]
