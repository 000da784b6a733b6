"""A recorded run as data: the actions of each rank, with their times, and the traces that hold them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.planner.run_comparison import seconds_of_messages
from pipegraph.planner.step_prediction import StepPrediction, predict_step, pricing_profile
from pipegraph.regular_file import LARGE_LIMIT, read_regular_file
from pipegraph.runtime.measurements import Message
from pipegraph.runtime.processes.rank_grid import PIPELINE, RankGrid
from pipegraph.schedule import Action, Collective, CollectiveKind, Schedule
from pipegraph.tracing.run_figures import RunFigures
from pipegraph.units import format_bytes

_GZIP = b"\x1f\x8b"
_DAMAGE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TRIES = 32  # objects from the end after which a truncated trace may be closed


class TraceError(PipegraphError):
    """A file is not a Chrome trace: the message says why."""


class ChromeTrace(msgspec.Struct):
    """A trace in JSON's object format. Its events are decoded one by one, because a trace may be large.

    ``problem`` says why it is not complete; empty if it is.
    """

    traceEvents: list[msgspec.Raw] = []
    baseTimeNanoseconds: Any = None
    pipegraph: Any = None
    problem: str = ""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events, without damaged ones."""
        decoder = msgspec.json.Decoder(dict[str, Any])
        for text in self.traceEvents:
            with suppress(*_DAMAGE):
                yield decoder.decode(text)


def read_trace(file: Path) -> ChromeTrace:
    """Read a file. Raises TraceError if it is not a trace, and OSError if it cannot be read."""
    try:
        data = read_regular_file(file, LARGE_LIMIT)
    except ValueError as error:
        raise TraceError(str(error)) from None
    if data.startswith(_GZIP):
        try:
            data = zlib.decompressobj(wbits=31).decompress(data, LARGE_LIMIT + 1)  # as much as there is
        except zlib.error:
            raise TraceError("it is not a gzip file, or it is damaged") from None
    if len(data) > LARGE_LIMIT:
        raise TraceError(f"it holds more than {format_bytes(LARGE_LIMIT)}, which are not read")
    try:
        return msgspec.json.decode(data, type=ChromeTrace)
    except _DAMAGE as error:
        if "truncated" not in str(error):
            raise TraceError(f"it is not a Chrome trace: {error}") from None
    return _read_truncated(data)


def _read_truncated(data: bytes) -> ChromeTrace:
    """Read a truncated trace up to the last object after which closing brackets make it valid."""
    end = len(data)
    for _ in range(_TRIES):
        end = data.rfind(b"}", 0, max(end, 0))
        for closing in (b"]}", b"}"):
            try:
                trace = msgspec.json.decode(data[: end + 1] + closing, type=ChromeTrace)
            except _DAMAGE:
                continue
            trace.problem = "it is truncated"
            return trace
    raise TraceError("it is truncated")


class RecordedSpan(NamedTuple):
    """An action of a step, from ``start`` to ``end``: seconds on rank 0's clock since the run's first span.

    A RECV lasts while its message is waited for, a SEND while it is handed over; ``bytes`` is the size of the message.
    """

    rank: int
    action: Action
    step: int
    start: float
    end: float
    bytes: int = 0


class RecordedCollective(NamedTuple):
    """A collective of a step, likewise: from its start to its last message, in parallel with the rank's actions."""

    rank: int
    collective: Collective
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class RankClock:
    """Rank 0's clock is this rank's clock + ``offset`` ± ``error``, in seconds. An error of None was not measured."""

    offset: float = 0.0
    error: float | None = None


@dataclass(frozen=True)
class TraceFile:
    """One rank's file of one window. ``shift`` + 1000 · an event's ``ts`` is its time in the run, in nanoseconds."""

    path: Path
    window: str
    clock: RankClock
    shift: int

    def events(self) -> Iterator[tuple[float, float, dict[str, Any]]]:
        """Yield (start, end, event) of every complete event that torch recorded; the file is read again."""
        try:
            for event in read_trace(self.path).events():
                if event.get("ph") == "X":
                    start = round(float(event["ts"]) * 1000) + self.shift
                    yield start / 1e9, (start + round(float(event["dur"]) * 1000)) / 1e9, event
        except (TraceError, KeyError, TypeError, ValueError):
            return  # already among the run's problems


@dataclass(frozen=True)
class RankTrace:
    """What one rank of a pipeline recorded.

    Attributes:
        spans: in the order of their starts.
        steps: step → (start, end), as torch.profiler has them: with the optimizer and the data.
        files: one per window.
        on_gpu: whether the spans that compute are the GPU's.
        collectives: in the order of their starts.
        messages: what is sent for a collective in each step.
    """

    rank: int
    spans: tuple[RecordedSpan, ...]
    steps: Mapping[int, tuple[float, float]]
    files: tuple[TraceFile, ...] = ()
    on_gpu: bool = False
    collectives: tuple[RecordedCollective, ...] = ()
    messages: Mapping[Collective, tuple[Message, ...]] = field(default_factory=dict)

    @property
    def clock(self) -> RankClock:
        """The offset of the window with the largest error."""
        clocks = [file.clock for file in self.files if file.clock.error is not None]
        return max(clocks, key=lambda clock: clock.error or 0.0, default=RankClock())


@dataclass(frozen=True)
class RunInfo:
    """What ``run.json`` says; empty and None if it does not. ``package_folder`` is as seen from where it ran."""

    run: str = ""
    package: str = ""
    package_folder: str = ""
    schedule: str = ""
    processes: int | None = None
    device: str = ""
    torch: str = ""
    kernels: str = ""
    windows: tuple[str, ...] = ()
    mesh: RankGrid | None = None


@dataclass(frozen=True)
class RecordedRun:
    """One pipeline of a run's folder. ``problems`` say what is missing or wrong, and ``chosen`` which run it is.

    Attributes:
        ranks: by their places in the pipeline.
        grid: where the ranks of the mesh are; without a mesh those of the pipeline.
        line: the numbers of the pipeline's ranks in the grid.
        origin: the time from which times count, in nanoseconds on rank 0's clock.
        figures: what the run printed; None if it was not `pipegraph run`.
    """

    folder: Path
    info: RunInfo
    manifest: Manifest | None
    schedule: Schedule
    ranks: Mapping[int, RankTrace]
    grid: RankGrid
    line: tuple[int, ...]
    origin: int = 0
    problems: tuple[str, ...] = ()
    chosen: tuple[str, ...] = ()
    figures: RunFigures | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was chosen: the run, and the pipeline of its mesh."""
        if not self.place:
            return self.chosen
        lines = self.grid.lines(PIPELINE)
        other_line = (lines.index(self.line) + 1) % len(lines)
        note = f"this is the pipeline at {self.place}, one of {len(lines)}; --pipeline {other_line} shows another"
        return (*self.chosen, note)

    @property
    def place(self) -> str:
        """Return where the pipeline is in the mesh, as ``dp_shard 1, tp 0``; empty if it is the only one."""
        coordinates = self.grid.coordinates(self.line[0])
        places = [f"{name} {at}" for name, at in coordinates.items() if name != PIPELINE and self.grid.length(name) > 1]
        return ", ".join(places)

    @cached_property
    def prediction(self) -> StepPrediction | None:
        """What was predicted of a step; None without a manifest, or with one of another number of stages."""
        if self.manifest is None or len(self.manifest.stages) != self.schedule.stages:
            return None
        return predict_step(self.manifest, self.schedule, collectives=self.predicted_collectives)

    @cached_property
    def predicted_collectives(self) -> Mapping[tuple[int, CollectiveKind], float]:
        """The seconds that the messages of each stage's collectives take by the profile that priced the package.

        Empty without a profile or without messages.
        """
        hardware = None if self.manifest is None else pricing_profile(self.manifest)
        predicted_seconds = {}
        for trace in self.ranks.values():
            for collective, sent in trace.messages.items():
                seconds = seconds_of_messages(sent, hardware)
                if seconds is not None and collective.stage < self.schedule.stages:
                    predicted_seconds[collective.stage, collective.kind] = seconds
        return predicted_seconds

    @property
    def shares_process(self) -> bool:
        """Return whether several ranks shared a process, and so never computed at the same time."""
        return self.info.processes is not None and self.info.processes < self.schedule.ranks

    @property
    def clock_error(self) -> float | None:
        """Seconds by which two ranks' times may differ: the sum of their errors. None if an error is not known."""
        if self.shares_process:
            return 0.0
        errors = [trace.clock.error for rank, trace in self.ranks.items() if self.line[rank] != 0]
        known_errors = sorted(error for error in errors if error is not None)
        return sum(known_errors[-2:]) if len(known_errors) == len(errors) else None
