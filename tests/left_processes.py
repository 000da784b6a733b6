"""The processes that tests have started and left: found by a mark in the environment, which each one inherits."""

from __future__ import annotations

import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import time
from pathlib import Path
from typing import Final

_MARK: Final = "PIPEGRAPH_TESTS"
_PATIENCE: Final = 10.0
"""Seconds in which a process may end that has been told to."""


def mark_processes() -> None:
    """Mark everything that this process starts from now on."""
    os.environ[_MARK] = str(os.getpid())


def left_processes(patience: float = _PATIENCE) -> list[str]:
    """Wait a while for the processes of this one to end, and return those that do not end as ``number: command``."""
    deadline = time.monotonic() + patience
    while (processes := _running()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return processes


def _running() -> list[str]:
    mark = f"{_MARK}={os.getpid()}".encode()
    processes = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            marked = mark in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended, or is another user's
            continue
        if marked and command and int(folder.name) not in _helpers() and not _is_compiler(command):
            processes.append(f"{folder.name}: {command}")
    return processes


def _helpers() -> set[int | None]:
    """This process, and those that serve it until it ends."""
    tracker = getattr(multiprocessing.resource_tracker, "_resource_tracker")  # noqa: B009
    server = getattr(multiprocessing.forkserver, "_forkserver")  # noqa: B009
    return {os.getpid(), tracker._pid, server._forkserver_pid}


def _is_compiler(command: str) -> bool:
    """Whether this is one of Inductor's, which end with the process for which they compile."""
    return "torch/_inductor/compile_worker" in command
