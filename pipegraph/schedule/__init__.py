"""Pipeline schedules as pure data: built, written, lowered and checked with neither torch nor a process group.

build ──▶ Schedule ──▶ lower ──▶ Schedule with transfers ──▶ the executor
             │  ▲                     │
       check │  │ from_csv, to_csv    │ check
"""

from __future__ import annotations

from pipegraph.schedule.action import Action, Collective, CollectiveKind, Kind
from pipegraph.schedule.build import build
from pipegraph.schedule.check import check
from pipegraph.schedule.collective_stream import CollectiveEvent, RankCollectives
from pipegraph.schedule.join_backwards import join_backwards
from pipegraph.schedule.lifetimes import Lifetime, What, lifetimes, peak_activations, receive_buffers
from pipegraph.schedule.lower import lower, without_transfers
from pipegraph.schedule.lower_bound import lower_bound
from pipegraph.schedule.order_search import SearchedSchedule, search
from pipegraph.schedule.parameter_memory import ParameterBytes, parameter_bytes
from pipegraph.schedule.recipes import names
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.schedule_files import from_csv, read_csv, read_times, to_csv
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.stages import PLACEMENTS, Placement
from pipegraph.schedule.timeline import Event, Timeline
from pipegraph.schedule.times import Times

__all__ = [
    "PLACEMENTS",
    "Action",
    "Collective",
    "CollectiveEvent",
    "CollectiveKind",
    "Event",
    "Kind",
    "Lifetime",
    "ParameterBytes",
    "Placement",
    "RankCollectives",
    "Schedule",
    "SearchedSchedule",
    "Timeline",
    "Times",
    "What",
    "build",
    "check",
    "from_csv",
    "join_backwards",
    "lifetimes",
    "lower",
    "lower_bound",
    "names",
    "parameter_bytes",
    "peak_activations",
    "read_csv",
    "read_times",
    "receive_buffers",
    "search",
    "simulate",
    "to_csv",
    "without_transfers",
]
