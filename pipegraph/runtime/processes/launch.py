"""Starting one process per rank. The code of those processes is in `launched_rank`.

Parent                                   one child per rank
launch ────────────────────────────────▶ exit_with_parent
  │                                        … the run …
  └─ one PipegraphError ◀── error.json ── record_failure

torch is imported only in functions that need it, so that a child that fails early fails at once.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from pipegraph import errors, loopback
from pipegraph.errors import ArgumentError, OutputError, PipegraphError, RuntimeFault, ScheduleError
from pipegraph.progress import Listener, current_listener
from pipegraph.runtime.processes.launched_rank import ERROR_FILE, LAUNCHER
from pipegraph.runtime.schedule_choice import other_names
from pipegraph.schedule import Schedule

# ---- progress relay --------------------------------------------------------------------------------------------------
# Progress and output of the children of `launch`, passed to their parent, which has the terminal.
#
# The child appends lines of JSON to a file whose name is in its environment. The parent reads the file as it grows.
# Printed lines go the same way, so that they and a progress bar do not get into each other.


_VARIABLE = "PIPEGRAPH_PROGRESS"

PrintLine = Callable[[str], None]
"""Prints lines on stdout."""


class ProgressRelay:
    """The child's end."""

    def __init__(self, file: str) -> None:
        self._file = open(file, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - until `close`

    @staticmethod
    def to_parent(quiet: bool = False) -> ProgressRelay | None:
        """The relay to the parent; None if no parent listens, or this process is ``quiet``.

        The process's own children do not inherit the relay.
        """
        file = os.environ.pop(_VARIABLE, None)
        return None if file is None or quiet else ProgressRelay(file)

    def report(self, task: str, done: int, total: int) -> None:
        """Pass on what was reported to `pipegraph.progress.report_progress`."""
        self._write([task, done, total])

    def print(self, line: str) -> None:
        """Print on the parent's stdout."""
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _write(self, message: object) -> None:
        self._file.write(json.dumps(message) + "\n")


@contextmanager
def relay_progress(print_line: PrintLine) -> Iterator[Mapping[str, str]]:
    """Pass on what children report and print while the body runs. Gives what to add to their environment.

    Does nothing if nobody listens to this process's own progress. If a line cannot be printed, because stdout is
    closed, the body is interrupted as by Ctrl-C and the error is raised.
    """
    listener = current_listener()
    if listener is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="pipegraph-progress-") as folder:
        file, over, failed = Path(folder, "messages"), threading.Event(), list[Exception]()
        file.touch()
        main = threading.main_thread().ident or 0

        def read() -> None:
            try:
                _read(file, over, listener, print_line)
            except (OSError, OutputError) as error:
                failed.append(error)
                if not over.is_set():
                    signal.pthread_kill(main, signal.SIGINT)

        reader = threading.Thread(target=read, name="progress", daemon=True)
        reader.start()
        try:
            yield {_VARIABLE: str(file)}
        finally:
            over.set()
            reader.join()
            if failed:
                raise failed[0]


def _read(file: Path, over: threading.Event, listener: Listener, print_line: PrintLine) -> None:
    with file.open(encoding="utf-8") as messages:
        incomplete_line, is_last = "", False
        while not is_last:
            is_last = over.wait(_POLL_SECONDS)  # then one more reading finds everything
            *lines, incomplete_line = (incomplete_line + messages.read()).split("\n")
            for message in map(json.loads, lines):
                print_line(message) if isinstance(message, str) else listener(*message)


# ---- launch ----------------------------------------------------------------------------------------------------------


_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_MOST_PROCESSES = 1024  # each takes some 300 MB before it has a stage
_POLL_SECONDS = 0.05
_REPORT_SECONDS = 0.5  # for children to end by themselves when another one has failed
_CULPRIT_SECONDS = 3.0  # for the one that failed first to end, when others have already ended because of it
_STOP_SECONDS = 5.0  # for children to end after SIGTERM


def launch(
    arguments: Sequence[str],
    processes: int,
    debug: bool = False,
    environment: Mapping[str, str] | None = None,
    folders: Sequence[str] = (),
    grace: float = 0.0,
    timeout: float = math.inf,
) -> None:
    """Run ``python *arguments`` once per rank on this machine and wait for all of them.

    Standard output is shared. Standard error is held back per rank, and passed on when every rank has succeeded, or
    with ``debug``. When a rank fails, the others are stopped. No process outlives the call. A signal that ends this
    process stops the children first; its handlers are as before afterwards.

    Args:
        environment: added to the environment of each child.
        folders: temporary ones of this process, which the children remove if it is killed.
        grace: how many seconds the children have to end when a signal ends this process, 5 at least.
        timeout: how many seconds the others have to end after the first one that succeeds.

    Raises:
        PipegraphError: the failure that came first, of the class that the child raised; RuntimeFault if the child died,
            or has not ended in time.
    """
    from pipegraph.kernels.cpu.process import threads_per_rank
    from pipegraph.torch_private.distributed import launcher_environment

    with tempfile.TemporaryDirectory(prefix="pipegraph-run-") as folder:
        common = {**(environment or {}), "OMP_NUM_THREADS": str(threads_per_rank(processes))}
        loopback.use_loopback(common, replace=True)
        common[LAUNCHER] = os.pathsep.join([str(os.getpid()), folder, *folders])
        children: list[_Child] = []
        seconds = max(grace, _STOP_SECONDS)
        with _signals_raised():
            try:
                store = loopback.open_store()  # where the ranks meet
                for rank in range(processes):
                    rank_environment = launcher_environment(rank, processes, store.port)
                    children.append(_start(arguments, Path(folder, str(rank)), rank, {**common, **rank_environment}))
                unfinished = _wait(children, timeout)
                seconds = _STOP_SECONDS
            finally:
                _stop(children, seconds)
        failed = [child for child in children if child.process.returncode]
        if debug or not failed:
            for child in children:
                sys.stderr.write(child.log.read_text(encoding="utf-8", errors="replace"))
        if unfinished:
            raise _not_ended(unfinished, timeout)
        if failed:
            raise _first_failure(failed)


def check_processes(schedule: Schedule, processes: int, launched: bool = False, pipelines: int = 1) -> None:
    """Raise `ScheduleError` unless `processes` can run the schedule: one process per rank, or one for all ranks.

    Without a launcher the processes are started on this machine, which can start only a limited number.

    One process for all ranks must be a plain process: it was not started by a launcher, and is not in a mesh.

    Args:
        processes: the number of processes of each pipeline.
        launched: whether a launcher started this process.
        pipelines: the number of pipelines in a mesh.
    """
    if processes * pipelines > _MOST_PROCESSES and not launched:
        raise ScheduleError(
            f"{processes * pipelines:,} processes cannot be started: {_MOST_PROCESSES:,} is the most on one machine.",
            "a smaller mesh, or torchrun on several machines.",
        )
    if processes == schedule.ranks or (processes == 1 and pipelines == 1 and not launched):
        return
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    count = "1 process" if schedule.ranks == 1 else f"{schedule.ranks} processes, or 1 that runs all stages"
    option = "--nproc-per-node" if launched else "--nproc"
    raise ScheduleError(
        f"{processes} process{'es' if processes > 1 else ''} cannot run {stages} under {schedule.name}: "
        f"that takes {count}.",
        f"{option} {schedule.ranks * pipelines}.{other_names(schedule.stages, processes)}",
    )


def pipeline_ranks(
    processes: int | None,
    lengths: Mapping[str, int],
    usual: Callable[[], int],
    launched: bool = False,
    planned: Collection[str] = (),
) -> int | None:
    """Return the number of processes of one pipeline in a mesh; None if `processes` is None.

    Args:
        processes: the number of processes in the mesh.
        lengths: the number of ranks along each other dimension.
        usual: returns the default number of ranks of the schedule, for advice.
        planned: dimensions of a plan, which options override.

    Raises:
        ArgumentError: the processes cannot be divided into whole pipelines.
    """
    ranks_per_stage = math.prod(lengths.values())
    if processes is None or processes % ranks_per_stage == 0:
        return None if processes is None else processes // ranks_per_stage
    named = " × ".join(f"{name} {length}" for name, length in lengths.items() if length > 1)
    option = "--nproc-per-node" if launched else "--nproc"
    overrides = " ".join(f"--{name.replace('_', '-')} 1" for name in planned if lengths[name] > 1)
    instead = f"; or {overrides}, without the mesh of the plan" if overrides else ""
    count = f"{processes} process is" if processes == 1 else f"{processes} processes are"
    raise ArgumentError(
        f"{count} no mesh of pp × {named}, which takes {ranks_per_stage} for each rank of a pipeline.",
        f"{option} {usual() * ranks_per_stage}{instead}.",
    )


@dataclass
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    """what it writes to standard error"""
    error_file: Path
    """what `record_failure` writes"""
    was_stopped: bool = False


def _start(arguments: Sequence[str], folder: Path, rank: int, environment: Mapping[str, str]) -> _Child:
    folder.mkdir()
    log, error_file = folder / "stderr.log", folder / "error.json"
    with log.open("wb") as stderr:
        # In a new session: Ctrl-C on the terminal reaches only the parent, which then stops all children.
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stderr=stderr,
            env={**os.environ, **environment, ERROR_FILE: str(error_file)},
            start_new_session=True,
        )
    return _Child(rank, process, log, error_file)


def _wait(children: Sequence[_Child], timeout: float) -> list[_Child]:
    """Wait until all children have ended, or one has failed and the others had a moment to report the same failure.

    If all that have failed did so because of another one, that one is given a moment more.

    Returns those that have not ended though none failed: `timeout` seconds after the first that succeeded. A rank may
    be stopped when its work is done, and no other rank waits for it then.
    """
    first = succeeded = math.inf
    while None in (codes := [child.process.poll() for child in children]):
        if 0 in codes and not any(codes):
            succeeded = min(succeeded, time.monotonic())
            if time.monotonic() > succeeded + timeout:
                return [child for child, code in zip(children, codes, strict=True) if code is None]
        if any(codes):
            first = min(first, time.monotonic())
            failures = [_failure(child) for child, code in zip(children, codes, strict=True) if code]
            is_known = not all(failure.is_victim for failure in failures)
            if time.monotonic() > first + (_REPORT_SECONDS if is_known else _CULPRIT_SECONDS):
                return []
        time.sleep(_POLL_SECONDS)
    return []


def _stop(children: Sequence[_Child], seconds: float) -> None:
    """Stop the children that still run; kill those that do not end within `seconds`."""
    for child in children:
        if child.process.poll() is None:
            child.was_stopped = True
            child.process.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
        with suppress(ProcessLookupError, PermissionError):  # nobody is left, or only who has ended
            os.killpg(child.process.pid, signal.SIGTERM)  # compilers that it started, and did not live to stop


@contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise SystemExit for a signal that ends the process, so that what must be done first is done.

    Handlers belong to the main thread. Elsewhere nothing is changed, and children end through `exit_with_parent`.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous_handlers = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING_SIGNALS:
                handler = signal.getsignal(number)
                if handler not in (signal.SIG_IGN, None):  # None: it was not set in Python, and cannot be given back
                    previous_handlers[number] = handler
                    signal.signal(number, stop)
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


@dataclass(frozen=True, order=True)
class _Failure:
    """The failure of a rank. The smallest one is the cause of the others."""

    was_stopped: bool
    """because another rank failed"""
    is_victim: bool
    """its connection to another rank broke"""
    nanoseconds: int
    """0 for a rank that died without a word: no other rank can have caused that"""
    rank: int
    message: str
    kind: str = "RuntimeFault"


def _first_failure(failed: Sequence[_Child]) -> PipegraphError:
    """The failure that came first, of the ranks that ended by themselves and of those stopped after them."""
    first = min(map(_failure, failed))
    error: type[PipegraphError] = getattr(errors, first.kind)
    return error(first.message if first.message.startswith("rank ") else f"rank {first.rank}: {first.message}")


def _not_ended(children: Sequence[_Child], timeout: float) -> RuntimeFault:
    named = " and ".join(f"rank {child.rank}" for child in children)
    return RuntimeFault(
        f"{named} did not end within {timeout:g} s of the first rank that did: stopped, or busy with something else.",
        "a longer timeout if it is not hung.",
    )


def _failure(child: _Child) -> _Failure:
    if not child.error_file.exists():
        return _Failure(child.was_stopped, False, 0, child.rank, _last_words(child))
    record = json.loads(child.error_file.read_text(encoding="utf-8"))
    when, kind = record.get("nanoseconds", 0), record.get("class", "RuntimeFault")
    return _Failure(False, record.get("victim", False), when, child.rank, str(record["message"]), kind)


def _last_words(child: _Child) -> str:
    lines = child.log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    code = child.process.returncode
    ended = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
    advice = "\nTry: look for a lack of memory in the system's log (dmesg)." if code == -signal.SIGKILL else ""
    return f"the process {ended}; its last words: {last}{advice}"
