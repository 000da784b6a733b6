"""One rank's file of one window: its spans, its steps, and whose it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind
from pipegraph.tracing.reading.recorded_run import Clock
from pipegraph.tracing.reading.trace_stream import EVENTS, Broken, entries

NAME: Final = re.compile(r"rank_(\d+)\.(\d+)\.pt\.trace\.json(\.gz)?")
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
    """What was found in a file; ``problem`` says why it is not all of it.

    Attributes:
        run, ranks: of the run that wrote it; "" and None where it does not say.
        base: what its times count from, in nanoseconds on its rank's clock; None where it does not get to saying so.
        host, gpu: actions by (step, action), as the host and as the GPU took them.
        steps: step → (start, end).
    """

    path: Path
    rank: int
    window: str
    problem: str = ""
    run: str = ""
    ranks: int | None = None
    base: int | None = None
    clock: Clock = field(default_factory=Clock)
    host: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    gpu: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def offset(self) -> int:
        """Nanoseconds to add to its times for rank 0's clock."""
        return (self.base or 0) + round(self.clock.offset * 1e9)

    def starts(self) -> dict[int, int]:
        """Of each step, when its first action starts on rank 0's clock."""
        found: dict[int, int] = {}
        for span in self.spans():
            if not span.action.kind.is_transfer:
                found.setdefault(span.step, span.start + self.offset)
        return found

    def spans(self) -> list[RawSpan]:
        """Each action once, by its start: the GPU's where there is one.

        Beside spans of the GPU, what the host did tells when work was launched. So a transfer without a span of the
        GPU is left out, and a computation without one, which launched nothing, takes no time behind the one before.
        """
        if not self.gpu:
            return sorted(self.host.values(), key=lambda span: (span.start, span.end))
        found: list[RawSpan] = []
        last = min(span.start for span in self.gpu.values())
        for key, host in sorted(self.host.items(), key=lambda item: item[1].start):
            span = self.gpu.get(key)
            if span is None and not host.action.kind.is_transfer:
                span = RawSpan(host.action, host.rank, host.step, last, last, 0)
            if span is not None:
                found.append(span)
                last = max(last, span.end) if not span.action.kind.is_transfer else last
        found += [span for key, span in self.gpu.items() if key not in self.host]
        return sorted(found, key=lambda span: (span.start, span.end))


def read_file(path: Path) -> RankFile:
    """Read a file as far as it goes. Its name tells rank and window where its text does not get there."""
    match = NAME.fullmatch(path.name)
    assert match is not None  # by which it was found
    found = RankFile(path, int(match[1]), match[2])
    try:
        for key, value in entries(path):
            if key == EVENTS:
                _take(found, value)
            elif key == "baseTimeNanoseconds" and isinstance(value, int):
                found.base = value
            elif key == "pipegraph" and isinstance(value, dict):
                _header(found, value)
    except Broken as error:
        found.problem = f"{path.name}: {error}"
    except OSError as error:
        found.problem = f"{path.name} cannot be read: {error.strerror}"
    if not found.problem and not found.host and not found.gpu:
        found.problem = f"{path.name} holds no action of a pipeline"
    return found


def _header(found: RankFile, header: Mapping[str, Any]) -> None:
    try:
        found.run, found.rank = str(header["run"]), int(header["rank"])
        found.window, found.ranks = str(header["digits"]), int(header["ranks"])
        clock = header["clock"]
        found.clock = Clock(float(clock["offset_ns"]) / 1e9, float(clock["error_ns"]) / 1e9)
    except (KeyError, TypeError, ValueError):
        found.problem = f"{found.path.name}: its entry of pipegraph is damaged"


def _take(found: RankFile, event: Any) -> None:
    """Keep an event if it is an action or a step."""
    if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") not in (_HOST, _GPU):
        return
    try:
        start = round(float(event["ts"]) * 1000)
        end = start + round(float(event["dur"]) * 1000)
        if match := _STEP.fullmatch(str(event.get("name"))):
            if event["cat"] == _HOST:
                found.steps[int(match[1])] = (start, end)
            return
        given = event.get("args", {})
        if "kind" not in given or "microbatch" not in given:
            return
        action = Action(int(given["stage"]), Kind(given["kind"]), int(given["microbatch"]), given.get("peer"))
        span = RawSpan(action, int(given["rank"]), int(given["step"]), start, end, int(given.get("bytes", 0)))
        if event["cat"] == _HOST:
            found.host[span.step, action] = span
        else:
            found.gpu[span.step, action] = _together(found.gpu.get((span.step, action)), span)
    except (KeyError, TypeError, ValueError, AttributeError, ScheduleError):
        return  # another program's event


def _together(earlier: RawSpan | None, span: RawSpan) -> RawSpan:
    """An action that a GPU did in several streams, which has a span in each."""
    if earlier is None:
        return span
    return replace(span, start=min(earlier.start, span.start), end=max(earlier.end, span.end))
