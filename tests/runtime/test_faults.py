"""A rank that fails or is killed: every other one stops within seconds and says which."""

from __future__ import annotations

import random
import re
import shutil
import threading
import time
from pathlib import Path
from unittest import TestCase

import pytest
import torch
from torch.distributed import HashStore

import pipegraph.runtime.processes.world
from pipegraph.errors import RuntimeFault
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.processes.rank_grid import single
from pipegraph.runtime.processes.world import World
from pipegraph.schedule import Schedule, build, lower
from tests.messages import missing, refused
from tests.runtime import rank_functions, ranks
from tests.runtime.packages import write
from tests.runtime.sketches import chain

TIMEOUT = 8.0  # of a rank that hangs: longer than a busy machine keeps a healthy one from its work


def assert_stopped(message: str, rank: int, verb: str = "stopped") -> None:
    """The message says that the rank stopped in an action, or in the next step, for which it waited for the others."""
    assert re.search(rf"^rank {rank} {verb} in (stage {rank}, action |step\(\) or evaluate\(\))", message), message


# With `keep` a process stays alive until all have noticed, so that nobody notices another's end instead.


@pytest.mark.parametrize(("failing", "in_forward", "keep"), [(0, True, True), (2, True, False), (1, False, True)])
def test_a_rank_that_raises_is_named_by_all(failing: int, in_forward: bool, keep: bool, tmp_path: Path) -> None:
    folder = str(write(chain(3), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.fail, 3, folder, "raise", failing, in_forward, keep)
    action = f"{failing}{'F' if in_forward else 'B'}2"
    origin = f"rank {failing} failed in stage {failing}, action {action}, microbatch 2: ValueError: broken on purpose"
    for rank, (message, seconds, again) in enumerate(outcomes):
        assert origin in message, message
        assert_stopped(message, rank, "failed" if rank == failing else "stopped")
        assert "<-- ERROR HERE" in message or "in step() or evaluate()" in message
        assert seconds < ranks.NO_HANG_SECONDS
        assert "stopped at an earlier failure" in again
        assert origin in again


@pytest.mark.parametrize(
    ("failing", "store", "keep"), [(0, "tcp", True), (1, "file", True), (3, "tcp", False)], ids=str
)
def test_a_rank_that_is_killed_is_named_by_all(failing: int, store: str, keep: bool, tmp_path: Path) -> None:
    """With rank 0 goes the store that it hosts: then nobody can read who was first, and all still name rank 0."""
    folder = str(write(chain(4), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.fail, 4, folder, "kill", failing, True, keep, store=store)
    assert outcomes[failing] is None
    for rank, outcome in enumerate(outcomes):
        if rank != failing:
            message, seconds, again = outcome
            assert f"rank {failing}" in message, message
            assert "is gone" in message
            assert_stopped(message, rank)
            assert seconds < ranks.NO_HANG_SECONDS
            assert f"rank {failing}" in again


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_rank_that_raises_at_any_action_is_named_by_all(schedule: str, tmp_path: Path) -> None:
    failing, position, action = _anywhere(schedule)
    folder = str(write(chain(3), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.break_at, 3, folder, schedule, "raise", failing, position, TIMEOUT)
    origin = f"rank {failing} failed in stage {failing}, action {action}, microbatch "
    for rank, (message, seconds, _) in enumerate(outcomes):
        assert origin in message, message
        assert_stopped(message, rank, "failed" if rank == failing else "stopped")
        assert seconds < ranks.NO_HANG_SECONDS


@pytest.mark.parametrize(("how", "schedule"), [("kill", "gpipe"), ("kill", "zb-h1"), ("stop", "1f1b")])
def test_a_rank_that_dies_or_hangs_at_any_action_is_named_by_all(how: str, schedule: str, tmp_path: Path) -> None:
    failing, position, action = _anywhere(schedule)
    folder = str(write(chain(3), tmp_path / "chain"))
    arguments = folder, schedule, how, failing, position, TIMEOUT
    outcomes = ranks.run(rank_functions.break_at, 3, *arguments, hung=failing if how == "stop" else None)
    assert outcomes[failing] is None
    for rank, outcome in enumerate(outcomes):
        if rank != failing:
            message, seconds, at = outcome
            assert_stopped(message, rank)
            assert f"rank {failing}" in message, (message, action, at)
            assert seconds < ranks.NO_HANG_SECONDS + (TIMEOUT if how == "stop" else 0)


@pytest.mark.slow
def test_a_rank_that_hangs_with_the_store_stops_all(tmp_path: Path) -> None:
    """Nobody can tell who hangs, as rank 0 hosts the store: each says for whom it waited itself."""
    folder = str(write(chain(3), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.break_at, 3, folder, "1f1b", "stop", 0, 9, TIMEOUT, store="tcp", hung=0)
    for rank, (message, seconds, _) in enumerate(outcomes[1:], start=1):
        assert message.startswith(f"rank {rank} stopped in stage {rank}, action "), message
        assert ", waiting for rank " in message
        assert "store" in message
        assert seconds < ranks.NO_HANG_SECONDS + TIMEOUT


@pytest.mark.parametrize("waits", [True, False], ids=["in waiting", "in starting"])
def test_a_message_that_cannot_be_sent_ends_the_step_of_every_rank(waits: bool, tmp_path: Path) -> None:
    folder = str(write(chain(2), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.fail_to_send, 2, folder, waits)
    origin = "rank 0 failed in stage 0, action 0SEND_F2, microbatch 2: TypeError: no such message"
    for rank, (message, seconds) in enumerate(outcomes):
        assert origin in message, message
        assert message.startswith(origin) if rank == 0 else not assert_stopped(message, 1)
        assert seconds < ranks.NO_HANG_SECONDS


@pytest.mark.parametrize(
    ("call", "named"), [("clip_grad_norm_()", "clip_grad_norm_()"), ("save()", "save() or load()")]
)
def test_a_call_that_a_rank_leaves_out_is_named(call: str, named: str, tmp_path: Path) -> None:
    folder = str(write(chain(2), tmp_path / "chain"))
    message, seconds = ranks.run(rank_functions.skip_a_call, 2, folder, call, 3.0)[0]
    assert f"rank 0 waited for rank 1 in {named}: no answer" in message, message
    assert "Every rank has to make this call." in message
    assert seconds < ranks.NO_HANG_SECONDS + 2 * 3


def test_a_rank_that_dies_in_a_collective_is_named_by_all(tmp_path: Path) -> None:
    folder = str(write(chain(3), tmp_path / "chain"))
    outcomes = ranks.run(rank_functions.die_in_a_collective, 3, folder, 1)
    for rank in (0, 2):
        message, seconds = outcomes[rank]
        assert message.startswith(f"rank {rank} stopped in gather(): "), message
        assert message.endswith("No word from rank 1: it is gone."), message
        assert seconds < ranks.NO_HANG_SECONDS


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:14260: Connection reset by peer. …", "closed"),
        ("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation", "within 2 s"),
        ("[/gloo/transport/tcp/pair.cc:144] no such device", "no such device"),
        ("[enforce fail at /gloo/transport/tcp/pair.cc:456] op.nbytes. 36 vs 16.", None),
        ("input tensor has to be contiguous", None),
    ],
)
def test_only_lost_connections_are_lost_connections(said: str, why: str | None) -> None:
    kind, match = (RuntimeError, re.escape(said)) if why is None else (ConnectionLost, why)
    with pytest.raises(kind, match=match), lost_connections(1):
        raise RuntimeError(said)


def _anywhere(schedule: str) -> tuple[int, int, str]:
    """A rank, the position of one of its actions, and the action: others in each run, so that in time all are tried."""
    lowered: Schedule = lower(build(schedule, 3, 4))
    draw = random.Random()
    failing = draw.randrange(3)
    row = lowered.actions[failing]
    position = draw.choice([at for at, action in enumerate(row) if action.sends or not action.kind.is_transfer])
    return failing, position, str(row[position])


def test_a_rank_whose_weights_are_missing_stops_all_while_they_are_loading(tmp_path: Path) -> None:
    folder = write(chain(3), tmp_path / "chain")
    shutil.copytree(folder, f"{folder}-elsewhere")
    Path(f"{folder}-elsewhere", "stage-1.safetensors").unlink()
    messages = ranks.run(rank_functions.build, 3, str(folder), ["1f1b"] * 3, 1)
    assert messages[1].startswith("PackageError: ")
    for rank in (0, 2):
        assert messages[rank].startswith(f"RuntimeFault: rank {rank} stopped: rank 1 failed: PackageError: ")
        assert "stage-1.safetensors is missing: stage 1 needs it" in messages[rank]


def test_ranks_with_different_schedules_are_refused(tmp_path: Path) -> None:
    messages = ranks.run(rank_functions.build, 2, str(write(chain(2), tmp_path / "chain")), ["gpipe", "1f1b"])
    for message in messages:
        assert not missing(
            message, "ArgumentError", 'schedule is "1f1b" on rank 1', '"gpipe" on rank 0', "Try: the same"
        )


def test_too_few_processes_are_refused(tmp_path: Path) -> None:
    messages = ranks.run(rank_functions.build, 2, str(write(chain(3), tmp_path / "chain")), ["1f1b"] * 2)
    for message in messages:
        assert not missing(message, "ScheduleError", "3 stages on 3 ranks", "2 processes", "--nproc-per-node 3")


def test_ranks_that_make_different_calls_or_lack_a_loss_are_told(tmp_path: Path) -> None:
    """Elsewhere gradients that a rank does not wait for are taken for those of its next step."""
    by_rank = ranks.run(rank_functions.other_calls, 2, str(write(chain(2), tmp_path / "chain")))
    for message, _ in by_rank:
        assert not missing(
            message, "call 2, an evaluation, on rank 0", "call 2, a step, on rank 1", "Try: the same calls"
        )
    first, last = (message for _, message in by_rank)
    assert not missing(last, "1f1b", "loss", "Try: Pipeline(…, loss_fn=…)")
    assert first.startswith("rank 0 stopped in step() or evaluate(), waiting for rank 1: ")
    assert f"rank 1 failed: PipegraphError: {last}" in first


def test_a_watching_rank_stops_when_another_has_failed() -> None:
    """As with NCCL, where no connection breaks."""
    store, closed = HashStore(), threading.Event()
    failing, watching = (FaultGuard(rank, single(2), store) for rank in range(2))
    watching.watch(closed.set)
    failed = refused(RuntimeFault, "rank 1 stopped: rank 0 failed: ValueError: broken")
    with TestCase().assertLogs() as logged, failed as raised, watching:
        _fail(failing, closed)
    assert isinstance(raised.value.__cause__, ConnectionLost)  # so that the launcher blames the other rank
    assert watching.has_failed
    assert "rank 0 failed: ValueError: broken on purpose" in "".join(logged.output)
    with refused(RuntimeFault, "earlier failure", "rank 1 stopped: rank 0"), watching:
        raise AssertionError("not reached")


def _fail(failing: FaultGuard, noticed: threading.Event) -> None:
    with pytest.raises(ValueError, match="broken on purpose"), failing:
        raise ValueError("broken on purpose")
    assert noticed.wait(ranks.NO_HANG_SECONDS)


def test_nobody_watches_when_all_is_done() -> None:
    store, threads = HashStore(), threading.active_count()
    guard = FaultGuard(0, single(2), store)
    guard.watch(guard.close)
    guard.close()
    assert not guard.has_failed
    deadline = time.monotonic() + ranks.NO_HANG_SECONDS
    while threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class NcclLike:
    """A backend that writes down how it is ended."""

    def __init__(self, ends: list[str]) -> None:
        self._ends = ends

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self._ends.append("abort")

    def shutdown(self) -> None:
        self._ends.append("shutdown")


@pytest.mark.parametrize(
    ("abort", "hangs", "expected"),
    [
        (False, False, ["synchronize", "shutdown", "shutdown"]),
        (False, True, ["synchronize", "abort", "abort"]),
        (True, False, ["abort", "abort"]),
    ],
    ids=["done", "done, but a peer is gone", "failed"],
)
def test_what_nccl_has_on_its_way_is_lost_only_after_a_failure(
    abort: bool, hangs: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []
    released = threading.Event()

    def synchronize(device: torch.device) -> None:
        ends.append("synchronize")
        if hangs:
            released.wait()

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(pipegraph.runtime.processes.world, "_CLOSING_SECONDS", 0.2)
    world = World.__new__(World)
    world._mesh, world._lines = None, []
    world.device, world._groups = torch.device("cuda:0"), [Group.__new__(Group) for _ in range(2)]
    for group in world._groups:
        group._backend = NcclLike(ends)
    world.close(abort)
    world.close(abort=True)  # what is closed stays closed
    released.set()
    assert ends == expected
