"""The folder of a recorded run: made by all processes together, and filled window by window.

DIR/transformer_1f1b_2026-10-01_12-30-00/
  rank_00.1790857026000000000.pt.trace.json.gz   of each rank and window; all ranks of a window have one number
  pipeline.json                                  the package's manifest
  schedule.csv                                   what was run
  run.json                                       where, when, and how
  events.out.tfevents…                           what TensorBoard shows by itself
"""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from pipegraph.errors import PipegraphError
from pipegraph.package import MANIFEST
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
    """The name of a rank's trace; it is what torch-tb-profiler knows a worker and its span by."""
    return f"rank_{rank:02d}.{digits}.pt.trace.json.gz"


def check_parent(folder: Path) -> None:
    """Raise PipegraphError where no run could be written into a folder, which may yet have to be made."""
    standing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        tempfile.TemporaryFile(dir=standing).close()
    except OSError as error:
        raise unwritable(folder, error) from None


@dataclass
class RunFolder:
    """A run's folder. Every process has one, and all make the same calls; the first one writes what is not a trace.

    `run` is its unique name, and `windows` what was recorded until now.
    """

    path: Path
    run: str
    _pipe: Pipeline
    _about: dict[str, Any]
    windows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes what concerns all of them."""
        return 0 in self._pipe.ranks

    def add_window(self, traces: Mapping[int, Mapping[str, Any]], digits: str, about: Mapping[str, Any]) -> None:
        """Write the traces of this process's ranks. They appear when those of all ranks are written, or none does."""
        parts: dict[Path, Path] = {}

        def write() -> None:
            for rank, trace in traces.items():
                whole = self.path / trace_file(rank, digits)
                part = parts[whole] = whole.with_name(f".{whole.name}{_PART}")
                part.write_bytes(gzip.compress(json.dumps(trace, separators=(",", ":")).encode(), compresslevel=5))

        def publish() -> None:
            for whole, part in parts.items():
                part.replace(whole)
            self.windows.append({"digits": digits, **about})
            self._write_about()

        try:
            together(self._pipe, self.path, write)
            together(self._pipe, self.path, publish)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)

    def leave(self) -> None:
        """Remove the folder again where nothing was recorded."""
        if self.windows or not self.is_first:
            return
        ours = {MANIFEST, SCHEDULE, RUN}
        with suppress(OSError):
            files = list(self.path.iterdir())
            if all(file.name in ours or file.suffix == _PART or file.name.startswith(_SCALARS) for file in files):
                for file in files:
                    file.unlink(missing_ok=True)  # another process removes its own part of a window
                self.path.rmdir()

    def _write_about(self) -> None:
        if self.is_first:
            _write(self.path / RUN, json.dumps({**self._about, "windows": self.windows}, indent=1) + "\n")


def make_run_folder(pipe: Pipeline, parent: Path) -> RunFolder:
    """A new folder in `parent`, which is made if need be. All processes of the pipeline call this.

    Raises PipegraphError, in all of them, where one of them cannot write into it.
    """
    schedule, manifest = pipe.schedule, pipe.package.manifest
    words = (manifest.model.class_name or "model").lower(), schedule.name, f"{datetime.now():%Y-%m-%d_%H-%M-%S}"
    name = "_".join(re.sub(r"[^\w.-]+", "-", word) for word in words)
    run = pipe.broadcast_text(uuid.uuid4().hex)
    about = {
        "schema_version": SCHEMA_VERSION,
        "generator": f"pipegraph {__version__}",
        "run": run,
        "package": pipe.package.path.name,
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "processes": len(pipe.gather([0.0])),
        "device": pipe.device.type,
        "torch": torch.__version__,
        "kernels": pipe.kernels,
    }
    folder = RunFolder(parent, run, pipe, about)

    def make() -> None:
        parent.mkdir(parents=True, exist_ok=True)
        if folder.is_first:
            folder.path = _made(parent, name)

    together(pipe, parent, make)
    folder.path = parent / pipe.broadcast_text(folder.path.name)

    def fill() -> None:
        folder.path.mkdir(exist_ok=True)  # on another machine
        tempfile.TemporaryFile(dir=folder.path).close()
        if folder.is_first:
            _write(folder.path / MANIFEST, manifest.to_json())
            _write(folder.path / SCHEDULE, to_csv(schedule))
        folder._write_about()

    together(pipe, parent, fill)
    return folder


def together(pipe: Pipeline, folder: Path, do: Callable[[], None]) -> None:
    """Do this in every process, and go on when all have done it. Raises PipegraphError in all where one cannot."""
    failed: OSError | None = None
    try:
        do()
    except OSError as error:
        failed = error
    told: Sequence[Sequence[float]] = pipe.gather([failed is not None])
    if failed is not None:
        raise unwritable(folder, failed) from failed
    others = [rank for rank, (fails,) in enumerate(told) if fails]
    if others:
        raise PipegraphError(f"rank {others[0]} cannot write a trace to {folder}; it says why.")


def _made(parent: Path, name: str) -> Path:
    for number in count(1):
        path = parent / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError("there is always another number")


def _write(file: Path, text: str) -> None:
    part = file.with_name(f".{file.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


def unwritable(folder: Path, error: OSError) -> PipegraphError:
    """What to raise where something of a run could not be written."""
    why = error.strerror or str(error)
    hint = "room on that disk" if error.errno in _FULL else "the name of a folder, which is made"
    return PipegraphError(f"no trace can be written to {folder}: {why}.\nTry: {hint}.")
