"""Functions for a process that a launcher (torchrun, or `launch`) started as one of several ranks.

It reports why it failed, ends with its launcher, and leaves no files or processes. torch is imported only in functions
that need it, so that a rank that fails early fails at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

from pipegraph import errors
from pipegraph.errors import PipegraphError, RuntimeFault

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun too: where a child says why it failed
LAUNCHER = "PIPEGRAPH_LAUNCHER"  # the process that started this one through `launch`, and its temporary folders
_PARENT_SECONDS = 0.5
_VICTIM_SECONDS = 60


def is_launched() -> bool:
    """Whether a launcher (torchrun, or `launch`) started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def environment_ranks() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, as a launcher has set them. Raises RuntimeFault."""
    rank, count = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
        raise RuntimeFault(
            f"RANK is {rank!r} and WORLD_SIZE {count!r}, and ranks count from 0 to WORLD_SIZE - 1.",
            "torchrun, which sets both; or unset RANK to run all stages in this process.",
        )
    return int(rank), int(count)


def record_failure(error: BaseException) -> None:
    """Write for the launcher, if there is one, why this rank fails."""
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    public = next((base.__name__ for base in type(error).__mro__ if base in vars(errors).values()), "RuntimeFault")
    now, is_victim = time.time_ns(), _is_connection_lost(error.__cause__)
    message = str(error) if isinstance(error, PipegraphError) else f"{type(error).__name__}: {error}"
    failure = {
        "message": "interrupted by SIGINT" if isinstance(error, KeyboardInterrupt) else message,
        # torchrun prints these two, and blames the rank with the smallest timestamp: of those that say nothing, the
        # moment at which it noticed their end.
        "timestamp": now // 10**9 + (_VICTIM_SECONDS if is_victim else 0),
        "nanoseconds": now,
        "class": public,
        "victim": is_victim,
    }
    part = Path(f"{path}.part")  # a rank that is killed meanwhile leaves no half of a file to read
    part.write_text(json.dumps(failure), encoding="utf-8")
    part.replace(path)


def scratch_folder() -> str | None:
    """The folder that the launcher has for this rank, and sees to if the rank is killed; None if nobody launched it."""
    path = os.environ.get(ERROR_FILE)
    return None if path is None or not Path(path).parent.is_dir() else str(Path(path).parent)


def stop_own_children() -> None:
    """End the processes that this rank has started, mainly compilers, which would continue for seconds without it.

    They are in its process group, if its launcher started it in a new session. Otherwise the group may have other
    processes, such as a shell's ``| tee``, and no process is ended.
    """
    if not is_launched() or os.getsid(0) != os.getpid():
        return
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)


def use_scratch_folder() -> None:
    """Create this process's temporary files in the launcher's folder for it, which is always removed.

    A signal may end the process while torch has a temporary file open, as it does when it compiles. The paths of
    Inductor's folders, which are temporary by default, do not change.
    """
    folder = scratch_folder()
    if folder is None:
        return
    from pipegraph.torch_private.inductor import keep_folders

    keep_folders()
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def exit_with_parent() -> None:
    """End this process when its launcher is gone: the process that called `launch`, or torchrun.

    A launcher that was killed cannot see to that, nor remove its folders, which are removed here.
    """
    launcher, *folders = os.environ.pop(LAUNCHER, "").split(os.pathsep)  # this process's own children do not inherit it
    if not launcher and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = int(launcher) if launcher else os.getppid()
    _follow(parent, tuple(folders))


@cache
def _follow(parent: int, folders: tuple[str, ...]) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(RuntimeFault.exit_code)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()


def _is_connection_lost(error: BaseException | None) -> bool:
    if error is None:
        return False
    from pipegraph.runtime.processes.group import ConnectionLost

    return isinstance(error, ConnectionLost)
