"""Reading a run's folder. Missing and damaged parts are listed as problems, and the rest is returned."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, Final

from pipegraph.arguments import argument, require_path
from pipegraph.errors import ArgumentError, PackageError, PipegraphError, ScheduleError
from pipegraph.package import MANIFEST, Manifest
from pipegraph.package.routes import gradient_routes, routes
from pipegraph.regular_file import LARGE_LIMIT, read_regular_file
from pipegraph.runtime.measurements import Message
from pipegraph.runtime.processes.rank_grid import PIPELINE, RankGrid, check_dimensions, single
from pipegraph.schedule import Action, Collective, CollectiveKind, Kind, Schedule, from_csv
from pipegraph.tracing import COLLECTIVE_EVENT
from pipegraph.tracing.recorded_run import (
    RankClock,
    RankTrace,
    RecordedCollective,
    RecordedRun,
    RecordedSpan,
    RunInfo,
    TraceError,
    TraceFile,
    read_trace,
)
from pipegraph.tracing.run_figures import RunFigures
from pipegraph.units import format_number_of

# ---- rank file -------------------------------------------------------------------------------------------------------
# Reading the trace of one rank and window: its actions, collectives and steps, as far as the file is whole.


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
    """Raises ValueError if the text is not a collective."""
    collective = Collective.parse(text)
    if collective is None:
        raise ValueError(f"not a collective: {text!r}")
    return collective


def _read_message(entry: Sequence[Any]) -> Message:
    """Raises ValueError or TypeError if the entry is not a message."""
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


# ---- read run --------------------------------------------------------------------------------------------------------


_TRY = "Try: pipegraph run OUT --profile DIR, which records one."


def read_run(path: str | PathLike[str], pipeline: int = 0) -> RecordedRun:
    """Read one pipeline of a run's folder or, of a folder of runs, of the newest one.

    Args:
        path: the folder.
        pipeline: which of those that a mesh has, counted in the order of its ranks.

    Raises PipegraphError if nothing can be shown: no trace is there, or none can be read; and for a pipeline that the
    mesh does not have.
    """
    folder, notes = _choose(require_path(path, "A run is given by its folder", error=PipegraphError))
    problems: list[str] = []
    info, manifest = _read_info(folder, problems), _read_manifest(folder, problems)
    expected_ranks = None if info.mesh is None else _line(info.mesh, pipeline)
    files = [
        read_rank_file(file)
        for file in _traces(folder)
        if expected_ranks is None or _may_be_of(expected_ranks, file, info.mesh)
    ]
    problems += [file.problem for file in files if file.problem]
    files = [file for file in files if file.host or file.gpu]
    if not files:
        raise PipegraphError(f"{folder} has no trace that can be read: {'; '.join(problems)}.\n{_TRY}")
    files = list(_of_one_run(files, info.run, problems))
    grid = info.mesh or _most_common(file.mesh for file in files) or single(1 + max(file.rank for file in files))
    line = _line(grid, pipeline)
    files = [file for file in files if file.mesh not in (None, grid) or _is_of(line, file.rank, grid)]
    for file in files:
        file.rank = line.index(file.rank) if file.rank in line else file.rank
    schedule = _read_schedule(folder, info.schedule or "recorded", files, problems)
    schedule = _with_edges(schedule, manifest, problems)
    origin, ranks = _ranks(files, schedule, grid, problems)
    problems += _missing(files, ranks, schedule, info, line)
    figures = _read_figures(folder, problems)
    return RecordedRun(
        folder, info, manifest, schedule, ranks, grid, line, origin, tuple(problems), tuple(notes), figures
    )


def read_pipelines(path: str | PathLike[str]) -> list[RecordedRun]:
    """Read all pipelines of a run's folder, as `read_run` does."""
    first = read_run(path)
    return [first, *(read_run(first.folder, number) for number in range(1, len(first.grid.lines(PIPELINE))))]


def _line(grid: RankGrid, pipeline: int) -> tuple[int, ...]:
    """Return the ranks of a pipeline. Raises ArgumentError if there is no such pipeline."""
    lines = grid.lines(PIPELINE)
    if not 0 <= pipeline < len(lines):
        raise ArgumentError(
            f"{argument('pipeline', pipeline)} is not there: the run has {format_number_of('pipeline', len(lines))}.",
            f"{argument('pipeline', len(lines) - 1)}.",
        )
    return lines[pipeline]


def _traces(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if FILE_NAME.fullmatch(file.name))


def _may_be_of(line: Sequence[int], file: Path, grid: RankGrid | None) -> bool:
    """Return whether a file is of one of these ranks by its name, so that those of other pipelines are not read."""
    match = FILE_NAME.fullmatch(file.name)
    return match is None or grid is None or _is_of(line, int(match[1]), grid)


def _is_of(line: Sequence[int], rank: int, grid: RankGrid) -> bool:
    """Return whether a rank is of a pipeline, or outside of the mesh, which the report says."""
    return rank in line or rank >= grid.size


def _most_common(grids: Iterable[RankGrid | None]) -> RankGrid | None:
    return next((grid for grid, _ in Counter(filter(None, grids)).most_common(1)), None)


def _choose(path: Path) -> tuple[Path, list[str]]:
    """Return the folder of a run, and notes on the choice."""
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise PipegraphError(f"{path} {problem}, and a run is a folder.\n{_TRY}")
    if _traces(path):
        return path, []
    runs = []
    for folder in sorted(child for child in path.iterdir() if child.is_dir()):
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
        fields = json.loads(read_regular_file(folder / "run.json"))
        windows = tuple(str(window["digits"]) for window in fields.get("windows", []))
        names = ("run", "package", "package_folder", "schedule", "device", "torch", "kernels")
        texts = {name: str(fields.get(name, "")) for name in names}
        mesh = read_mesh(fields["mesh"]) if "mesh" in fields else None
        return RunInfo(processes=int(fields["processes"]), windows=windows, mesh=mesh, **texts)
    except OSError as error:
        problems.append(f"run.json cannot be read ({error.strerror}): how many processes ran is not known")
    except (ValueError, KeyError, TypeError, OverflowError, AttributeError, RecursionError, ArgumentError) as error:
        problems.append(f"run.json is damaged ({type(error).__name__}: {error})")
    return RunInfo()


def _read_figures(folder: Path, problems: list[str]) -> RunFigures | None:
    try:
        return RunFigures.read(folder)
    except PipegraphError as error:
        problems.append(error.problem)
    return None


def _read_manifest(folder: Path, problems: list[str]) -> Manifest | None:
    try:
        return Manifest.from_json(read_regular_file(folder / MANIFEST), MANIFEST)
    except PackageError as error:
        problems.append(str(error))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problems.append(f"{MANIFEST} cannot be read ({reason}): no predictions are known")
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
        of_values = routes(manifest, schedule.placement)
        edges = {"edges": tuple(of_values), "gradient_edges": gradient_routes(manifest, of_values)}
    return schedule.changed(actions=tuple(rows), **edges)


def _ranks(
    files: Sequence[RankFile], schedule: Schedule, grid: RankGrid, problems: list[str]
) -> tuple[int, dict[int, RankTrace]]:
    """Join the files of each rank. Times count from the first span of all ranks, which is returned, too."""
    parts: dict[int, list[RankFile]] = {}
    for file in sorted(files, key=lambda file: (file.rank, file.window)):
        if file.base is None:
            problems.append(f"{file.path.name} has no time base, and is left out")
        elif mismatch := _mismatch(file, schedule, grid):
            problems.append(f"{file.path.name} is of another plan: {mismatch}; it is left out")
        else:
            parts.setdefault(file.rank, []).append(file)
    if not parts:
        raise PipegraphError(f"No trace fits the schedule of its folder: {'; '.join(problems)}.\n{_TRY}")
    origin = min(
        span.start + file.offset for rank_files in parts.values() for file in rank_files for span in file.spans()
    )
    return origin, {rank: _rank(rank, rank_files, origin) for rank, rank_files in parts.items()}


def _mismatch(file: RankFile, schedule: Schedule, grid: RankGrid) -> str:
    """Return why a file cannot be of this schedule; empty if it can."""
    file_grid = grid if file.mesh is None else file.mesh
    if file.rank >= schedule.ranks or file_grid != grid or file_grid.length(PIPELINE) != schedule.ranks:
        return f"it is of rank {file.rank} of {file_grid.size}, and the schedule has {schedule.ranks} ranks"
    scheduled_actions = set(schedule.actions[file.rank])
    for span in file.spans():
        if not span.action.kind.is_transfer and span.action not in scheduled_actions:
            return f"rank {file.rank} does {span.action} in it, and not in the schedule"
    return ""


def _rank(rank: int, files: Sequence[RankFile], origin: int) -> RankTrace:
    spans, collectives, steps = [], [], {}
    for file in files:
        shift = file.offset - origin
        spans += [
            RecordedSpan(rank, span.action, span.step, (span.start + shift) / 1e9, (span.end + shift) / 1e9, span.bytes)
            for span in file.spans()
        ]
        collectives += [
            RecordedCollective(rank, collective, step, (start + shift) / 1e9, (end + shift) / 1e9)
            for step, collective, start, end in file.collectives.values()
        ]
        steps.update({step: ((start + shift) / 1e9, (end + shift) / 1e9) for step, (start, end) in file.steps.items()})
    spans.sort(key=lambda span: (span.start, span.end))
    collectives.sort(key=lambda collective: (collective.start, collective.end))
    trace_files = tuple(TraceFile(file.path, file.window, file.clock, file.offset - origin) for file in files)
    messages = {collective: sent for file in files for collective, sent in file.messages.items()}
    return RankTrace(
        rank, tuple(spans), steps, trace_files, any(file.gpu for file in files), tuple(collectives), messages
    )


def _missing(
    files: Sequence[RankFile],
    ranks: Mapping[int, RankTrace],
    schedule: Schedule,
    info: RunInfo,
    line: Sequence[int],
) -> Iterator[str]:
    """Ranks and windows of which there is no file, and clocks of which the offset is not known."""
    windows = sorted({*info.windows, *(file.window for file in files)})
    for rank in range(schedule.ranks):
        if rank not in ranks:
            yield f"rank {rank} of {schedule.ranks} has no trace"
            continue
        recorded_windows = {file.window for file in ranks[rank].files}
        yield from (
            f"rank {rank} has no trace of window {window}" for window in windows if window not in recorded_windows
        )
    if info.processes != 1:
        for rank, trace in ranks.items():
            if line[rank] and any(file.clock.error is None for file in trace.files):
                yield f"rank {rank}'s clock was not compared with rank 0's: its times may be off"
