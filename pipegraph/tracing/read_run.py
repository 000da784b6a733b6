"""Reading a run's folder. Missing and damaged parts are listed as problems, and the rest is returned."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

from pipegraph.arguments import require_path
from pipegraph.errors import PackageError, PipegraphError, ScheduleError
from pipegraph.package import MANIFEST, Manifest
from pipegraph.regular_file import LARGE_LIMIT, read_regular_file
from pipegraph.schedule import Action, Kind, Schedule, from_csv
from pipegraph.tracing.recorded_run import (
    RankClock,
    RankTrace,
    RecordedRun,
    RecordedSpan,
    RunInfo,
    TraceError,
    TraceFile,
    read_trace,
)

_TRY = "Try: pipegraph run OUT --profile DIR, which records one."
_NAME = re.compile(r"rank_(\d+)\.(\d+)\.pt\.trace\.json(\.gz)?")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_HOST, _GPU = "user_annotation", "gpu_user_annotation"


def read_run(path: str | PathLike[str]) -> RecordedRun:
    """Read a run's folder or, of a folder of runs, the newest one.

    Raises PipegraphError if nothing can be shown: no trace is there, or none can be read.
    """
    folder, notes = _choose(require_path(path, "A run is given by its folder", error=PipegraphError))
    problems: list[str] = []
    info, manifest = _read_info(folder, problems), _read_manifest(folder, problems)
    files = [read_rank_file(file) for file in _traces(folder)]
    problems += [file.problem for file in files if file.problem]
    files = [file for file in files if file.host or file.gpu]
    if not files:
        raise PipegraphError(f"{folder} has no trace that can be read: {'; '.join(problems)}.\n{_TRY}")
    files = list(_of_one_run(files, info.run, problems))
    schedule = _read_schedule(folder, info.schedule or "recorded", files, problems)
    schedule = _with_edges(schedule, manifest, problems)
    ranks = _ranks(files, schedule, problems)
    problems += _missing(files, ranks, schedule, info)
    return RecordedRun(folder, info, manifest, schedule, ranks, tuple(problems), tuple(notes))


def _traces(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if _NAME.fullmatch(file.name))


def _choose(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of a run, and notes on the choice."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise PipegraphError(f"{path} {what}, and a run is a folder.\n{_TRY}")
    if _traces(path):
        return path, []
    runs = []
    for folder in sorted(each for each in path.iterdir() if each.is_dir()):
        windows = [file.name.split(".")[1] for file in _traces(folder)]
        if windows:
            runs.append((max(windows), folder))
    if not runs:
        raise PipegraphError(
            f"{path} has no traces: neither it nor a folder in it holds rank_00.….pt.trace.json.gz.\n{_TRY}"
        )
    _, newest = max(runs)
    return newest, [f"{newest.name} is the newest of the {len(runs)} runs in {path}"] if len(runs) > 1 else []


def _read_info(folder: Path, problems: list[str]) -> RunInfo:
    """Read ``run.json`` as far as it can be."""
    try:
        found = json.loads(read_regular_file(folder / "run.json"))
        windows = tuple(str(window["digits"]) for window in found.get("windows", []))
        names = ("run", "package", "schedule", "device", "torch", "kernels")
        texts = {name: str(found.get(name, "")) for name in names}
        return RunInfo(processes=int(found["processes"]), windows=windows, **texts)
    except OSError as error:
        problems.append(f"run.json cannot be read ({error.strerror}): how many processes ran is not known")
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError) as error:
        problems.append(f"run.json is damaged ({type(error).__name__}: {error})")
    return RunInfo()


def _read_manifest(folder: Path, problems: list[str]) -> Manifest | None:
    try:
        return Manifest.from_json(read_regular_file(folder / MANIFEST), MANIFEST)
    except PackageError as error:
        problems.append(str(error))
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        problems.append(f"{MANIFEST} cannot be read ({what}): no predictions are known")
    return None


def _of_one_run(files: Sequence[RankFile], run: str, problems: list[str]) -> Iterator[RankFile]:
    """Yield the files of the run that ``run.json`` names, or else of the run that most files name."""
    named = Counter(file.run for file in files if file.run)
    if run not in named and named:
        run = named.most_common(1)[0][0]
    for file in files:
        if file.run and file.run != run:
            problems.append(f"{file.path.name} is of another run ({file.run}, not {run}), and left out")
        else:
            yield file


def _read_schedule(folder: Path, name: str, files: Sequence[RankFile], problems: list[str]) -> Schedule:
    """Read the schedule's file or, if that fails, take the order of the first recorded step."""
    try:
        return from_csv(read_regular_file(folder / "schedule.csv", LARGE_LIMIT).decode("utf-8"), name)
    except (OSError, ValueError) as error:
        problems.append(f"schedule.csv cannot be read ({getattr(error, 'strerror', None) or error})")
    except ScheduleError as error:
        problems.append(f"schedule.csv is damaged: {error}")
    rows: dict[int, str] = {}
    for file in files:
        spans = [span for span in file.spans() if not span.action.kind.is_transfer]
        rows.setdefault(file.rank, ",".join(str(span.action) for span in spans if span.step == spans[0].step))
    try:
        return from_csv("".join(f"{rows.get(rank, '')}\n" for rank in range(max(rows) + 1)), name)
    except ScheduleError as error:
        raise PipegraphError(
            f"{folder} has no schedule: schedule.csv cannot be used, and the traces do not show it: {error}\n{_TRY}"
        ) from None


def _with_edges(schedule: Schedule, manifest: Manifest | None, problems: list[str]) -> Schedule:
    """Return the schedule without transfers, and with the package's edges; a chain's if the manifest is another's."""
    rows = [tuple(action for action in row if not action.kind.is_transfer) for row in schedule.actions]
    edges: dict[str, Any] = {}
    if manifest is not None and len(manifest.stages) != schedule.stages:
        problems.append(
            f"{MANIFEST} is of another plan: it has {len(manifest.stages)} stages, and the schedule {schedule.stages}"
        )
    elif manifest is not None:
        edges = {"edges": manifest.edges(), "gradient_edges": manifest.gradient_edges()}
    return schedule.changed(actions=tuple(rows), **edges)


def _ranks(files: Sequence[RankFile], schedule: Schedule, problems: list[str]) -> dict[int, RankTrace]:
    """Join the files of each rank. Times count from the first span of all ranks."""
    parts: dict[int, list[RankFile]] = {}
    for file in sorted(files, key=lambda file: (file.rank, file.window)):
        if file.base is None:
            problems.append(f"{file.path.name} has no time base, and is left out")
        elif mismatch := _mismatch(file, schedule):
            problems.append(f"{file.path.name} is of another plan: {mismatch}; it is left out")
        else:
            parts.setdefault(file.rank, []).append(file)
    if not parts:
        raise PipegraphError(f"No trace fits the schedule of its folder: {'; '.join(problems)}.\n{_TRY}")
    origin = min(span.start + file.offset for found in parts.values() for file in found for span in file.spans())
    return {rank: _rank(rank, found, origin) for rank, found in parts.items()}


def _mismatch(file: RankFile, schedule: Schedule) -> str:
    """Return why a file cannot be of this schedule; empty if it can."""
    if file.rank >= schedule.ranks or (file.ranks or schedule.ranks) != schedule.ranks:
        return f"it is of rank {file.rank} of {file.ranks or '?'}, and the schedule has {schedule.ranks} ranks"
    known = set(schedule.actions[file.rank])
    for span in file.spans():
        if not span.action.kind.is_transfer and span.action not in known:
            return f"rank {file.rank} does {span.action} in it, and not in the schedule"
    return ""


def _rank(rank: int, files: Sequence[RankFile], origin: int) -> RankTrace:
    spans, steps = [], {}
    for file in files:
        shift = file.offset - origin
        spans += [
            RecordedSpan(rank, span.action, span.step, (span.start + shift) / 1e9, (span.end + shift) / 1e9, span.bytes)
            for span in file.spans()
        ]
        steps.update({step: ((start + shift) / 1e9, (end + shift) / 1e9) for step, (start, end) in file.steps.items()})
    spans.sort(key=lambda span: (span.start, span.end))
    kept = tuple(TraceFile(file.path, file.window, file.clock, file.offset - origin) for file in files)
    return RankTrace(rank, tuple(spans), steps, kept, any(file.gpu for file in files))


def _missing(
    files: Sequence[RankFile], ranks: Mapping[int, RankTrace], schedule: Schedule, info: RunInfo
) -> Iterator[str]:
    """Ranks and windows of which there is no file, and clocks of which the offset is not known."""
    windows = sorted({*info.windows, *(file.window for file in files)})
    for rank in range(schedule.ranks):
        if rank not in ranks:
            yield f"rank {rank} of {schedule.ranks} has no trace"
            continue
        there = {file.window for file in ranks[rank].files}
        yield from (f"rank {rank} has no trace of window {window}" for window in windows if window not in there)
    if info.processes != 1:
        for rank, trace in ranks.items():
            if rank and any(file.clock.error is None for file in trace.files):
                yield f"rank {rank}'s clock was not compared with rank 0's: its times may be off"


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
        run, ranks: of the run that wrote it; "" and None if it does not say.
        base: the time from which its times count, in nanoseconds on its rank's clock; None if it does not say.
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
    clock: RankClock = field(default_factory=RankClock)
    host: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    gpu: dict[tuple[int, Action], RawSpan] = field(default_factory=dict)
    steps: dict[int, tuple[int, int]] = field(default_factory=dict)

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


def read_rank_file(path: Path) -> RankFile:
    """Read a file as far as possible. If its text does not name rank and window, its name does."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, "callers list files by this pattern"
    found = RankFile(path, int(match[1]), match[2])
    try:
        trace = read_trace(path)
    except TraceError as error:
        found.problem = f"{path.name}: {error}"
        return found
    except OSError as error:
        found.problem = f"{path.name} cannot be read: {error.strerror}"
        return found
    if trace.problem:
        found.problem = f"{path.name}: {trace.problem}"
    if isinstance(trace.baseTimeNanoseconds, int):
        found.base = trace.baseTimeNanoseconds
    if isinstance(trace.pipegraph, dict):
        _read_header(found, trace.pipegraph)
    for event in trace.events():
        _read_event(found, event)
    if not found.problem and not found.host and not found.gpu:
        found.problem = f"{path.name} holds no action of a pipeline"
    return found


def _read_header(found: RankFile, header: Mapping[str, Any]) -> None:
    try:
        found.run, found.rank = str(header["run"]), int(header["rank"])
        found.window, found.ranks = str(header["digits"]), int(header["ranks"])
        clock = header["clock"]
        found.clock = RankClock(float(clock["offset_ns"]) / 1e9, float(clock["error_ns"]) / 1e9)
    except (KeyError, TypeError, ValueError, OverflowError):
        found.problem = f"{found.path.name}: its entry of pipegraph is damaged"


def _read_event(found: RankFile, event: Mapping[str, Any]) -> None:
    """Store an event if it is an action or a step."""
    if event.get("ph") != "X" or event.get("cat") not in (_HOST, _GPU):
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
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, ScheduleError):
        return  # another program's event
    key = (span.step, action)
    if event["cat"] == _HOST:
        found.host[key] = span
    elif (earlier := found.gpu.get(key)) is None:
        found.gpu[key] = span
    else:  # a GPU has a span for each stream that worked on it
        found.gpu[key] = replace(span, start=min(earlier.start, span.start), end=max(earlier.end, span.end))
