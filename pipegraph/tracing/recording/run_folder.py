"""The folder of a recorded run: made by all processes together, and filled window by window.

DIR/1f1b_m8_transformer_2026-10-01_12-30-00/
  rank_00.1790857026000000000.pt.trace.json.gz   of each rank of the mesh and window; a window has one number
  pipeline.json                                  the package's manifest
  schedule.csv                                   what was run, with its collectives
  run.json                                       where, when, and how
  figures.json                                   of `pipegraph run`: losses of its steps, memory of its ranks
  events.out.tfevents…                           what TensorBoard shows by itself
"""

from __future__ import annotations

import errno
import gzip
import json
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from pipegraph.errors import PipegraphError, path_from_here
from pipegraph.package import MANIFEST
from pipegraph.regular_file import replaced_file
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import to_csv
from pipegraph.version import __version__

SCHEMA_VERSION: Final = 1
RUN: Final = "run.json"
SCHEDULE: Final = "schedule.csv"
_PART: Final = ".part"  # of a trace that is being written
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SCALARS: Final = "events.out.tfevents"  # what the files begin with that TensorBoard reads by itself


def trace_file(rank: int, digits: str) -> str:
    """Return the name of a rank's trace. torch-tb-profiler reads the worker and its span from it."""
    return f"rank_{rank:02d}.{digits}.pt.trace.json.gz"


def check_run_parent(folder: Path) -> None:
    """Raise PipegraphError if no run could be written into a folder, which need not exist yet."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise write_error(folder, error) from None


@dataclass
class RunFolder:
    """A run's folder. Every process has one, and all make the same calls. Rank 0's writes everything but traces.

    Attributes:
        run: its unique name.
        folder_count: how many folders were made for it, itself included: the innermost ones of `path`.
        windows: what was recorded until now.
    """

    path: Path
    run: str
    _pipe: Pipeline
    _about: dict[str, Any]
    folder_count: int = 1
    windows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what is not a trace."""
        return _is_first(self._pipe)

    def add_window(self, traces: Mapping[int, Mapping[str, Any]], digits: str, about: Mapping[str, Any]) -> None:
        """Write the traces of this process's ranks. Either the traces of all ranks appear, or none.

        Collective: every process must call it.
        """
        parts: dict[Path, Path] = {}

        def write() -> None:
            for rank, trace in traces.items():
                file = self.path / trace_file(rank, digits)
                part = parts[file] = file.with_name(f".{file.name}{_PART}")
                part.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=5))

        def publish() -> None:
            for file, part in parts.items():
                part.replace(file)
            self.windows.append({"digits": digits, **about})
            self._write_about()

        try:
            run_on_all_ranks(self._pipe, self.path, write)
            run_on_all_ranks(self._pipe, self.path, publish)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing was recorded, with those that were made around it.

        Any process does, for the first one may have been killed.
        """
        if self.windows:
            return
        run_files = {MANIFEST, SCHEDULE, RUN}
        with suppress(OSError):
            files = list(self.path.iterdir())
            if all(file.name in run_files or file.suffix == _PART or file.name.startswith(_SCALARS) for file in files):
                for file in files:
                    file.unlink(missing_ok=True)  # another process removes its own part of a window
                for empty in (self.path, *self.path.absolute().parents)[: self.folder_count]:
                    empty.rmdir()

    def _write_about(self) -> None:
        if self.is_first:
            _write(self.path / RUN, json.dumps({**self._about, "windows": self.windows}, indent=1) + "\n")


def make_run_folder(pipe: Pipeline, parent: Path) -> RunFolder:
    """Make a new folder in `parent`, which is made too. Collective: every process of the mesh must call it.

    Raises PipegraphError, in all processes, if one of them cannot write into it.
    """
    schedule, manifest = pipe.schedule, pipe.package.manifest
    model, moment = (manifest.model.class_name or "model").lower(), f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    # What differs comes first: a narrow list of runs cuts names off.
    words = schedule.name, f"m{schedule.microbatches}", model, moment
    name = "_".join(re.sub(r"[^\w.-]+", "-", word) for word in words)
    run = pipe.gather_text(uuid.uuid4().hex if _is_first(pipe) else "", everywhere=True)[0]
    about = {
        "schema_version": SCHEMA_VERSION,
        "generator": f"pipegraph {__version__}",
        "run": run,
        "package": pipe.package.path.name,
        "package_folder": path_from_here(pipe.package.path),
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "mesh": dict(zip(pipe.grid.names, pipe.grid.shape, strict=True)),
        "processes": len(pipe.gather([0.0], everywhere=True)),
        "device": pipe.device.type,
        "torch": torch.__version__,
        "kernels": pipe.kernels,
    }
    folder = RunFolder(parent, run, pipe, about)

    def make() -> None:
        if folder.is_first:
            around = (parent, *parent.absolute().parents)
            folder.folder_count += next(number for number, ancestor in enumerate(around) if ancestor.exists())
            parent.mkdir(parents=True, exist_ok=True)
            folder.path = _make_new(parent, name)

    run_on_all_ranks(pipe, parent, make)
    folder_name = f"{folder.folder_count} {folder.path.name}" if folder.is_first else ""
    count_text, _, folder_name = pipe.gather_text(folder_name, everywhere=True)[0].partition(" ")
    folder.path, folder.folder_count = parent / folder_name, int(count_text)

    def fill() -> None:
        folder.path.mkdir(parents=True, exist_ok=True)  # on another machine
        tempfile.TemporaryFile(dir=folder.path).close()
        if folder.is_first:
            _write(folder.path / MANIFEST, manifest.to_json())
            _write(folder.path / SCHEDULE, to_csv(pipe.schedule_with_collectives))
        folder._write_about()

    try:
        run_on_all_ranks(pipe, parent, fill)
    except Exception:
        folder.remove_if_empty()
        raise
    return folder


def run_on_all_ranks(pipe: Pipeline, folder: Path, do: Callable[[], None]) -> None:
    """Call `do` in every process, and return when all are done. Raises PipegraphError, in all, if one fails.

    Every process says why that one failed. Collective: every process of the mesh must call it.
    """
    failed: OSError | None = None
    try:
        do()
    except OSError as error:
        failed = error
    why = "" if failed is None else str(write_error(folder, failed))
    reasons = pipe.gather_text(why, everywhere=True)
    if failed is not None:
        raise PipegraphError(why) from failed
    errors = [f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text]
    if errors:
        raise PipegraphError(errors[0])


def _is_first(pipe: Pipeline) -> bool:
    return 0 in [pipe.mesh_ranks[rank] for rank in pipe.ranks]


def _make_new(parent: Path, name: str) -> Path:
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("there is always another number")


def _write(file: Path, text: str) -> None:
    with replaced_file(file) as part:
        part.write_text(text, encoding="utf-8")


def write_error(folder: Path, error: OSError) -> PipegraphError:
    """Return the error to raise if a part of a run could not be written."""
    why = error.strerror or str(error)
    hint = "room on that disk" if error.errno in _FULL else "the name of a folder, which is made"
    return PipegraphError(f"no trace can be written to {folder}: {why}.", f"{hint}.")
