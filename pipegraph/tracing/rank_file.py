"""Reading the trace of one rank and window: its actions, collectives and steps, as far as the file is whole."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pipegraph.errors import ArgumentError, ScheduleError
from pipegraph.runtime.measurements import Message
from pipegraph.runtime.processes.rank_grid import PIPELINE, RankGrid, check_dimensions
from pipegraph.schedule import Action, Collective, CollectiveKind, Kind
from pipegraph.tracing import COLLECTIVE_EVENT
from pipegraph.tracing.recorded_run import RankClock, TraceError, read_trace

FILE_NAME: Final = re.compile(r"rank_(\d+)\.(\d+)\.pt\.trace\.json(\.gz)?")
_MOST_RANKS: Final = 1 << 16
_STEP = re.compile(r"ProfilerStep#(\d+)")
_HOST, _GPU = "user_annotation", "gpu_user_annotation"


@dataclass(frozen=True)
class RawSpan:
    """An action as a file has it: nanoseconds from the file's base."""

    action: Action
    rank: int
    step: int
    start: int
    end: int
    bytes: int


@dataclass
class RankFile:
    """The content of a file. ``problem`` says why it is not complete; empty if it is.

    Attributes:
        run, mesh: of the run that wrote it; "" and None if it does not say.
        rank: its number in the mesh.
        base: the time from which its times count, in nanoseconds on its rank's clock; None if it does not say.
        host, gpu: actions by (step, action), as the host and as the GPU took them.
        steps: step → (start, end).
        collectives: (step, collective, start, end), by what tells them apart in the file.
        messages: what is sent for a collective in each step.
    """

    path: Path
    rank: int
    window: str
    problem: str = ""
    run: str = ""
    mesh: RankGrid | None = None
    base: int | None = None
    clock: RankClock = field(default_factory=RankClock)
    host: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    gpu: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)
    collectives: dict[Any, tuple[int, Collective, int, int]] = field(default_factory=dict)
    messages: dict[Collective, tuple[Message, ...]] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """Nanoseconds to add to its times to get rank 0's clock."""
        return (self.base or 0) + round(self.clock.offset * 1e9)

    def spans(self) -> list[RawSpan]:
        """Return each action once, by its start: the GPU's span if there is one.

        If the GPU has spans, those of the host only say when work was launched. A transfer without a span of the GPU is
        then left out. A computation without one launched nothing: it takes no time, after the one before.
        """
        if not self.gpu:
            return sorted(self.host.values(), key=lambda span: (span.start, span.end))
        spans: list[RawSpan] = []
        last = min(span.start for span in self.gpu.values())
        for key, host in sorted(self.host.items(), key=lambda item: item[1].start):
            span = self.gpu.get(key)
            if span is None and not host.action.kind.is_transfer:
                span = RawSpan(host.action, host.rank, host.step, last, last, 0)
            if span is not None:
                spans.append(span)
                last = max(last, span.end) if not span.action.kind.is_transfer else last
        spans += [span for key, span in self.gpu.items() if key not in self.host]
        return sorted(spans, key=lambda span: (span.start, span.end))


def read_rank_file(path: Path) -> RankFile:
    """Read a file as far as possible. If its text does not name rank and window, its name does."""
    match = FILE_NAME.fullmatch(path.name)
    assert match is not None, "callers list files by this pattern"
    file = RankFile(path, int(match[1]), match[2])
    try:
        trace = read_trace(path)
    except TraceError as error:
        file.problem = f"{path.name}: {error}"
        return file
    except OSError as error:
        file.problem = f"{path.name} cannot be read: {error.strerror}"
        return file
    if trace.problem:
        file.problem = f"{path.name}: {trace.problem}"
    if isinstance(trace.baseTimeNanoseconds, int):
        file.base = trace.baseTimeNanoseconds
    if isinstance(trace.pipegraph, dict):
        _read_header(file, trace.pipegraph)
    for event in trace.events():
        _read_event(file, event)
    if not file.problem and not file.host and not file.gpu:
        file.problem = f"{path.name} holds no action of a pipeline"
    return file


def _read_header(file: RankFile, header: Mapping[str, Any]) -> None:
    try:
        file.run, file.rank = str(header["run"]), int(header["rank"])
        file.window, file.mesh = str(header["digits"]), read_mesh(header.get("mesh", {PIPELINE: header["ranks"]}))
        file.messages = {
            _read_collective(text): tuple(map(_read_message, sent)) for text, sent in header.get("messages", {}).items()
        }
        clock = header["clock"]
        file.clock = RankClock(float(clock["offset_ns"]) / 1e9, float(clock["error_ns"]) / 1e9)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, ArgumentError):
        file.problem = f"{file.path.name}: its entry of pipegraph is damaged"


def _read_collective(text: str) -> Collective:
    """Raises ValueError for what is no collective."""
    collective = Collective.parse(text)
    if collective is None:
        raise ValueError(f"no collective: {text!r}")
    return collective


def _read_message(entry: Sequence[Any]) -> Message:
    """Raises ValueError or TypeError for what is no message."""
    kind, size, ranks = entry
    if kind not in ("gather", "reduce", "all_reduce"):
        raise ValueError(f"a message of the kind {kind!r}")
    return Message(kind, int(size), tuple(map(int, ranks)))


def read_mesh(lengths: Mapping[str, Any]) -> RankGrid:
    """Return the grid of the ranks along dimensions. Raises ArgumentError, ValueError, TypeError or AttributeError."""
    check_dimensions(tuple(lengths))
    grid = RankGrid(tuple(lengths), tuple(map(int, lengths.values())))
    if min(grid.shape, default=1) < 1 or grid.size > _MOST_RANKS:
        raise ValueError(f"a mesh of {grid.shape}")
    return grid


def _read_event(file: RankFile, event: Mapping[str, Any]) -> None:
    """Store an event if it is an action, a collective or a step."""
    if event.get("ph") != "X" or event.get("cat") not in (_HOST, _GPU, COLLECTIVE_EVENT):
        return
    try:
        start = round(float(event["ts"]) * 1000)
        end = start + round(float(event["dur"]) * 1000)
        if match := _STEP.fullmatch(str(event.get("name"))):
            if event["cat"] == _HOST:
                file.steps[int(match[1])] = (start, end)
            return
        args = event.get("args", {})
        if args.get("kind") in list(CollectiveKind):
            collective = Collective(int(args["stage"]), CollectiveKind(args["kind"]))
            _add_collective(file, event, (int(args["step"]), collective, start, end))
            return
        if "kind" not in args or "microbatch" not in args:
            return
        action = Action(int(args["stage"]), Kind(args["kind"]), int(args["microbatch"]), args.get("peer"))
        span = RawSpan(action, int(args["rank"]), int(args["step"]), start, end, int(args.get("bytes", 0)))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, ScheduleError):
        return  # another program's event
    key = (span.step, action)
    if event["cat"] == _HOST:
        file.host[key] = span
    elif (previous := file.gpu.get(key)) is None:
        file.gpu[key] = span
    else:  # a GPU has a span for each stream that worked on it
        file.gpu[key] = replace(span, start=min(previous.start, span.start), end=max(previous.end, span.end))


def _add_collective(file: RankFile, event: Mapping[str, Any], span: tuple[int, Collective, int, int]) -> None:
    """Store a collective. A GPU has a span for each stream that worked on it, with one id."""
    step, collective, start, end = span
    external_id = event["args"].get("External id") if event["cat"] == _GPU else None
    key = len(file.collectives) if external_id is None else (external_id, collective)
    previous = file.collectives.get(key, span)
    file.collectives[key] = step, collective, min(previous[2], start), max(previous[3], end)
