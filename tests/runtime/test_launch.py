"""Ranks as processes: if one fails, one error names it, and nothing else is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pipegraph import schedule
from pipegraph.errors import PackageError, PipegraphError, RuntimeFault, ScheduleError
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.processes.launch import check_processes, launch
from pipegraph.runtime.processes.launched_rank import record_failure
from tests.messages import refused

CHILD = """
import os, sys, time
from pipegraph.errors import PackageError, RuntimeFault
from pipegraph.runtime.processes.launched_rank import exit_with_parent, record_failure
exit_with_parent()
rank, line = int(os.environ["RANK"]), sys.argv[1]
print(f"rank {rank} starts", file=sys.stderr, flush=True)
def fail(error):
    record_failure(error)
    sys.exit(error.exit_code)
if rank == 1:
    exec(line)
elif line != "pass":
    time.sleep(60)
"""
NO_HANG_SECONDS = 50.0  # rank 0 of these would sleep for 60


@pytest.fixture
def child(tmp_path: Path) -> Path:
    file = tmp_path / "child.py"
    file.write_text(CHILD)
    return file


def test_success_passes_on_what_was_said(child: Path, capfd: pytest.CaptureFixture[str]) -> None:
    environment, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    launch([str(child), "pass"], 2)
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "rank 0 starts\nrank 1 starts\n")
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.parametrize(
    ("line", "kind", "parts"),
    [
        ("fail(PackageError('torn'))", PackageError, ["rank 1: torn"]),
        ("fail(RuntimeFault('rank 1, stage 1: torn'))", RuntimeFault, ["rank 1, stage 1: torn"]),
        ("os._exit(7)", RuntimeFault, ["rank 1", "code 7", "rank 1 starts"]),
        ("os.kill(os.getpid(), 9)", RuntimeFault, ["rank 1", "SIGKILL"]),
        ("raise ValueError('torn')", RuntimeFault, ["rank 1", "ValueError: torn"]),
    ],
)
def test_failure_is_raised_as_the_child_raised_it(
    child: Path, line: str, kind: type[PipegraphError], parts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    start = time.monotonic()
    with refused(kind, *parts):
        launch([str(child), line], 2)
    assert time.monotonic() - start < NO_HANG_SECONDS
    assert capfd.readouterr() == ("", "")


LATE = """
import os, sys, time
from pipegraph.errors import RuntimeFault
from pipegraph.runtime.processes.group import ConnectionLost
from pipegraph.runtime.processes.launched_rank import record_failure
error = RuntimeFault("rank 0 stopped: rank 1 is gone")
error.__cause__ = ConnectionLost(1, "its connection closed")
if os.environ["RANK"] == "0":
    record_failure(error)
    open(sys.argv[1], "w").close()
    os._exit(4)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
time.sleep(1)  # as an interpreter may take that has imported much
os._exit(7)
"""


def test_the_rank_that_failed_first_is_named_though_it_ends_last(tmp_path: Path) -> None:
    file = tmp_path / "late.py"
    file.write_text(LATE)
    with refused(RuntimeFault, "rank 1", "code 7"):
        launch([str(file), str(tmp_path / "recorded")], 2)


def test_torchrun_does_not_blame_a_rank_that_another_one_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error = RuntimeFault("rank 0 stopped: rank 1 is gone")
    error.__cause__ = ConnectionLost(1, "its connection closed")
    record_failure(error)
    victim = ProcessFailure(local_rank=0, pid=1, exitcode=4, error_file=str(tmp_path / "error.json"))
    killed = ProcessFailure(local_rank=1, pid=2, exitcode=-9, error_file="")
    assert ChildFailedError("run", {0: victim, 1: killed}).get_first_failure() == (1, killed)


STOPPED = """
import os, signal, sys
from pipegraph.runtime.processes.launched_rank import record_failure
from pipegraph.runtime.processes.world import join_world
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    join_world(None, "cpu", 1.0)
except Exception as error:
    record_failure(error)
    os._exit(4)
"""


def test_a_rank_that_is_stopped_before_the_ranks_meet_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipegraph.runtime.processes.launch._STOP_SECONDS", 0.5)
    file = tmp_path / "stopped.py"
    file.write_text(STOPPED)
    with refused(RuntimeFault, "rank 1 did not come", "1 s", "rank 0", advice="timeout"):
        launch([str(file)], 2)


@pytest.mark.parametrize("line", ["os.kill(os.getpid(), 19)", "time.sleep(60)"])
def test_a_rank_that_is_stopped_after_the_others_have_ended_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.setattr("pipegraph.runtime.processes.launch._STOP_SECONDS", 0.5)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    file = tmp_path / "ended.py"
    file.write_text(f"import os, time\nif os.environ['RANK'] == '1':\n    {line}\n")
    with refused(RuntimeFault, "rank 1 did not end", "1 s", advice="timeout"):
        launch([str(file)], 3, timeout=1.0)
    assert _running(file) == 0
    assert list((tmp_path / "temporary").iterdir()) == []


def test_children_end_with_their_parent(child: Path, tmp_path: Path) -> None:
    start = f"import pipegraph.runtime.processes.launch as here; here.launch([{str(child)!r}, 'time.sleep(60)'], 2)"
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    stops = [signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    parents = [
        subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.DEVNULL, env=environment) for _ in stops
    ]
    try:
        _wait_until(lambda: _running(child) == 2 * len(stops))
        for parent, stop in zip(parents, stops, strict=True):
            parent.send_signal(stop)
            code = parent.wait(20)
            assert code == (-stop if stop is signal.SIGKILL else 128 + stop)
            alive = sum(parent.poll() is None for parent in parents)
            _wait_until(lambda: _running(child) == 2 * alive)  # noqa: B023 - it is called at once
        assert list(temporary.iterdir()) == []
    finally:
        for parent in parents:
            parent.kill()


def test_ranks_of_torchrun_end_when_it_is_killed(child: Path) -> None:
    start = f"import subprocess, sys; subprocess.run([sys.executable, {str(child)!r}, 'time.sleep(60)'])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "1", "RANK": "1"}
    torchrun = subprocess.Popen([sys.executable, "-c", start], stderr=subprocess.PIPE, env=environment)
    try:
        assert torchrun.stderr is not None
        assert torchrun.stderr.readline() == b"rank 1 starts\n"  # by now it looks after its parent
        assert _running(child) == 1
        torchrun.kill()
        torchrun.wait()
        _wait_until(lambda: _running(child) == 0)
    finally:
        torchrun.kill()
        torchrun.communicate()


def test_what_a_killed_rank_leaves_is_removed(child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    line = (
        "import tempfile; from pipegraph.runtime.processes.launched_rank import scratch_folder; "
        "print(tempfile.mkdtemp(dir=scratch_folder()), file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    )
    with refused(RuntimeFault, "rank 1", "SIGKILL", "/temporary/", advice="memory"):
        launch([str(child), line], 2)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_a_killed_rank_has_started_ends(child: Path, tmp_path: Path) -> None:
    started = tmp_path / "started.py"
    started.write_text("import time; time.sleep(100)")
    line = f"import subprocess; subprocess.Popen([sys.executable, {str(started)!r}]); os.kill(os.getpid(), 9)"
    with refused(RuntimeFault, "rank 1", "SIGKILL", advice="memory"):
        launch([str(child), line], 2)
    _wait_until(lambda: _running(started) == 0, 5)


def test_a_rank_that_fails_ends_what_it_has_started(child: Path) -> None:
    line = (
        "import subprocess; from pipegraph.runtime.processes.launched_rank import stop_own_children; "
        "started = subprocess.Popen(['sleep', '100']); stop_own_children(); "
        "fail(RuntimeFault(f'rank 1: it ended with {started.wait(5)}'))"
    )
    with refused(RuntimeFault, "rank 1", "-15"):
        launch([str(child), line], 2)


def test_who_shares_a_group_without_a_launcher_lives_on() -> None:
    line = (
        "import os, subprocess; from pipegraph.runtime.processes.launched_rank import stop_own_children; "
        "os.setpgid(0, 0); beside = subprocess.Popen(['sleep', '100']); stop_own_children(); "
        "print(beside.poll()); beside.kill(); beside.wait()"
    )
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "None\n"


def test_temporary_files_of_a_rank_are_removed_with_it(
    child: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    line = (
        "import tempfile; from pipegraph.runtime.processes.launched_rank import use_scratch_folder; "
        "use_scratch_folder(); print(tempfile.mkdtemp(), file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
    )
    with refused(RuntimeFault, "rank 1", "SIGKILL", "/temporary/", advice="memory"):
        launch([str(child), line], 2)
    (cache_folder,) = temporary.iterdir()
    assert cache_folder.name.startswith("torchinductor_")  # Inductor's cache, which the next process uses


@pytest.mark.parametrize("is_imported", [False, True])
def test_headers_that_inductor_compiled_are_found_by_the_next_run(is_imported: bool, tmp_path: Path) -> None:
    """They are in the temporary folder that all runs share, not in the rank's own, whenever Inductor is imported."""
    shared, rank_folder = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    rank_folder.mkdir()
    calls = ["from pipegraph.runtime.processes import launched_rank; launched_rank.use_scratch_folder()"]
    calls.insert(0 if is_imported else 1, "from torch._inductor import codecache")
    line = "; ".join([*calls, "import tempfile; print(codecache._HEADER_DIR, tempfile.gettempdir(), sep='\\n')"])
    environment = {**os.environ, "TMPDIR": str(shared), "TORCHELASTIC_ERROR_FILE": str(rank_folder / "error.json")}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, env=environment, check=True)
    headers, temporary = done.stdout.split()
    assert shared in Path(headers).parents
    assert temporary == str(rank_folder)


def test_processes_that_can_run_a_schedule() -> None:
    built = schedule.build("1f1b", 4, 8)
    check_processes(built, 1)
    check_processes(built, 4)
    with refused(ScheduleError, "3 processes", "4 stages", "1f1b", advice="--nproc 4"):
        check_processes(built, 3)
    with refused(ScheduleError, "1 process", "4 stages", "1f1b", advice="--nproc-per-node 4"):
        check_processes(built, 1, launched=True)


def _running(child: Path) -> int:
    """Living processes that run this very file."""
    count = 0
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            count += process.read_bytes().split(b"\0")[1:2] == [str(child).encode()]
        except OSError:
            continue  # it has ended
    return count


def _wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.1)
