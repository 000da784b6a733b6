"""Reading a run's folder. Missing and damaged parts are listed as problems, and the rest is returned."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from pipegraph.arguments import argument, require_path
from pipegraph.errors import ArgumentError, PackageError, PipegraphError, ScheduleError
from pipegraph.package import MANIFEST, Manifest
from pipegraph.regular_file import LARGE_LIMIT, read_regular_file
from pipegraph.runtime.processes.rank_grid import PIPELINE, RankGrid, single
from pipegraph.schedule import Schedule, from_csv
from pipegraph.tracing.rank_file import FILE_NAME, RankFile, read_mesh, read_rank_file
from pipegraph.tracing.recorded_run import (
    RankTrace,
    RecordedCollective,
    RecordedRun,
    RecordedSpan,
    RunInfo,
    TraceFile,
)
from pipegraph.units import format_number_of

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
    return RecordedRun(folder, info, manifest, schedule, ranks, grid, line, origin, tuple(problems), tuple(notes))


def read_pipelines(path: str | PathLike[str]) -> list[RecordedRun]:
    """Read all pipelines of a run's folder, as `read_run` does."""
    first = read_run(path)
    return [first, *(read_run(first.folder, number) for number in range(1, len(first.grid.lines(PIPELINE))))]


def _line(grid: RankGrid, pipeline: int) -> tuple[int, ...]:
    """Return the ranks of a pipeline. Raises ArgumentError if there are not so many."""
    lines = grid.lines(PIPELINE)
    if not 0 <= pipeline < len(lines):
        raise ArgumentError(
            f"{argument('pipeline', pipeline)} is not there: the run has {format_number_of('pipeline', len(lines))}.\n"
            f"Try: {argument('pipeline', len(lines) - 1)}."
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
        edges = {"edges": manifest.edges(), "gradient_edges": manifest.gradient_edges()}
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
