"""Starting one process per rank with torch's launcher, and what those processes do when they fail.

Parent                                   one child per rank
launch ── elastic_launch ──────────────▶ exit_with_parent
  │                                        … the run …
  └─ one PipegraphError ◀── error.json ── record_failure
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipegraph import errors
from pipegraph.errors import PipegraphError, RuntimeFault, ScheduleError
from pipegraph.kernels.threads import threads_per_rank
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.schedule_choice import other_names
from pipegraph.schedule import Schedule

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's launcher, for torchrun too: where a child says why it failed
_PARENT = "PIPEGRAPH_LAUNCHER"  # the process that started this one through `launch`
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PATIENCE = 5.0  # seconds that a child has to end when another one has failed


def is_launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(arguments: Sequence[str], processes: int, debug: bool = False) -> None:
    """Run ``python *arguments`` once per rank on this machine and wait for all of them.

    Standard output is shared. Standard error is held back per rank: when every rank succeeds it is passed on, and when
    one fails the others are stopped and the failure that came first is raised, as the class the child raised it with
    (`RuntimeFault` where a child just died); with ``debug`` it is passed on then too. No process outlives the call.
    """
    with tempfile.TemporaryDirectory(prefix="pipegraph-run-") as folder:
        exit_codes = _elastic_launch(arguments, processes, folder)
        logs = {int(path.parent.name): path for path in Path(folder).glob("*/attempt_0/*/stderr.log")}
        if debug or not exit_codes:
            for _, log in sorted(logs.items()):
                sys.stderr.write(log.read_text(encoding="utf-8", errors="replace"))
        if exit_codes:
            raise _first_failure(exit_codes, logs)


def check_processes(schedule: Schedule, processes: int, launched: bool = False) -> None:
    """Raise `ScheduleError` unless so many processes can run the schedule: one per rank, or one for all ranks.

    One for all is a plain process, not one that a launcher started.
    """
    if processes == schedule.ranks or (processes == 1 and not launched):
        return
    stages = f"{schedule.stages} stage{'s' if schedule.stages > 1 else ''}"
    count = "1 process" if schedule.ranks == 1 else f"{schedule.ranks} processes, or 1 that runs all stages"
    option = "--nproc-per-node" if launched else "--nproc"
    raise ScheduleError(
        f"{processes} process{'es' if processes > 1 else ''} cannot run {stages} under {schedule.name}: "
        f"that takes {count}.\nTry: {option} {schedule.ranks}.{other_names(schedule.stages, processes)}"
    )


def record_failure(error: BaseException) -> None:
    """Tell the launcher, if there is one, why this rank fails."""
    path = os.environ.get(_ERROR_FILE)
    if path is None:
        return
    public = next((base.__name__ for base in type(error).__mro__ if base in vars(errors).values()), "RuntimeFault")
    now = time.time_ns()
    said = {
        "message": str(error) if isinstance(error, PipegraphError) else f"{type(error).__name__}: {error}",
        "timestamp": now // 10**9,  # torchrun prints these two; within a second, others have failed for this failure
        "nanoseconds": now,
        "class": public,
        "victim": isinstance(error.__cause__, ConnectionLost),
    }
    Path(path).write_text(json.dumps(said), encoding="utf-8")


def exit_with_parent() -> None:
    """End this process when the one that called `launch` is gone, which a killed parent cannot see to itself."""
    parent = int(os.environ.pop(_PARENT, 0))  # not for this process's own children
    if not parent:
        return
    if error_file := os.environ.get(_ERROR_FILE):
        Path(error_file).with_name("pid").write_text(str(os.getpid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(RuntimeFault.exit_code)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def _elastic_launch(arguments: Sequence[str], processes: int, folder: str) -> dict[int, int]:
    """Exit codes by rank of the children that failed; an empty dict when none did.

    The one place that uses torch's elastic launcher, `torch.distributed.launcher.api`: it is what torchrun runs, and
    unlike torchrun's own `run` it neither prints nor parses, but its module is documented only by its docstrings.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    environment = {_PARENT: str(os.getpid()), "OMP_NUM_THREADS": str(threads_per_rank(processes))}
    before = dict(os.environ)
    disabled = logging.root.manager.disable
    os.environ.update(environment)
    logging.disable(logging.CRITICAL)  # the launcher's log repeats what is raised here
    try:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # the system chooses the port
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ERR),
        )
        with _signals_restored(), _hung_ones_ended(Path(folder)):
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        return {rank: failure.exitcode for rank, failure in error.failures.items()}
    except SignalException as stopped:  # the children are stopped by now
        raise SystemExit(128 + stopped.sigval) from None
    finally:
        logging.disable(disabled)
        os.environ.clear()
        os.environ.update(before)
    return {}


@contextmanager
def _signals_restored() -> Iterator[None]:
    """The launcher takes the signals that end a process for itself, and does not give them back."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not None:  # as for one that was not set in Python
                    signal.signal(number, handler)


@contextmanager
def _hung_ones_ended(folder: Path) -> Iterator[None]:
    """Kill children that do not end when another one has failed: torch's launcher gives them 30 seconds for it."""
    over = threading.Event()

    def watch() -> None:
        failed_at = None
        while not over.wait(0.2):
            if failed_at is None and any(folder.glob("*/attempt_0/*/error.json")):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > _PATIENCE:
                for file in folder.glob("*/attempt_0/*/pid"):
                    if not file.with_name("error.json").exists() and _is_child(pid := int(file.read_text())):
                        file.with_name("hung").touch()
                        os.kill(pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=watch, name="hung-children", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def _is_child(pid: int) -> bool:
    """Whether this is a living child of this process, and not another process that got its number."""
    try:
        state, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended, or the system has no /proc
        return False
    return state != "Z" and int(parent) == os.getpid()


@dataclass(frozen=True, order=True)
class _Failure:
    """How a rank failed. The least one is the cause of the others."""

    stopped: bool  # by the launcher, for another rank's failure
    victim: bool  # its connection to another rank broke
    nanoseconds: int  # 0 for a rank that died without a word: nothing else can have killed it
    rank: int
    message: str
    kind: str = "RuntimeFault"


def _first_failure(exit_codes: dict[int, int], logs: dict[int, Path]) -> PipegraphError:
    """The failure that came first, of the ranks that ended by themselves and of those stopped after them."""
    failures = []
    for rank, log in logs.items():
        recorded = log.with_name("error.json")
        if recorded.exists():
            said = json.loads(recorded.read_text(encoding="utf-8"))
            when = said.get("nanoseconds", 0)
            kind = said.get("class", "RuntimeFault")
            failures.append(_Failure(False, said.get("victim", False), when, rank, str(said["message"]), kind))
        elif rank in exit_codes:
            code = exit_codes[rank]
            stopped = code == -signal.SIGTERM or log.with_name("hung").exists()
            failures.append(_Failure(stopped, False, 0, rank, _last_words(code, log)))
    first = min(failures)
    error: type[PipegraphError] = getattr(errors, first.kind)
    return error(first.message if first.message.startswith("rank ") else f"rank {first.rank}: {first.message}")


def _last_words(exit_code: int, log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
    ended = f"exited with code {exit_code}" if exit_code >= 0 else f"was killed by {signal.Signals(-exit_code).name}"
    advice = "\nTry: look for a lack of memory in the system's log (dmesg)." if exit_code == -signal.SIGKILL else ""
    return f"the process {ended}; its last words: {said}{advice}"
