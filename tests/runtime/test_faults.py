"""A rank that fails or is killed: every other one stops within seconds and says which."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from pipegraph.schedule import Schedule, build, lower
from tests.runtime import ranks
from tests.runtime.packages import chain, write

SECONDS = 10.0
TIMEOUT = 8.0  # of a rank that hangs: longer than a busy machine keeps a healthy one from its work


# In each test `keep` keeps the processes alive until all have noticed, so that nobody is told by another's end.


@pytest.mark.parametrize(("failing", "in_forward", "keep"), [(0, True, True), (2, True, False), (1, False, True)])
def test_a_rank_that_raises_is_named_by_all(failing: int, in_forward: bool, keep: bool, tmp_path: Path) -> None:
    folder = str(write(chain(3), tmp_path / "chain"))
    said = ranks.run(ranks.fail, 3, folder, "raise", failing, in_forward, keep)
    action = f"{failing}{'F' if in_forward else 'B'}2"
    origin = f"rank {failing} failed in stage {failing}, action {action}, microbatch 2: ValueError: broken on purpose"
    for rank, (message, seconds, again) in enumerate(said):
        assert origin in message, message
        assert message.startswith(f"rank {rank} {'failed' if rank == failing else 'stopped'} in stage {rank}, action ")
        assert "<-- ERROR HERE" in message
        assert seconds < SECONDS
        assert "stopped at an earlier failure" in again
        assert origin in again


@pytest.mark.parametrize(
    ("failing", "store", "keep"), [(0, "tcp", True), (1, "file", True), (3, "tcp", False)], ids=str
)
def test_a_rank_that_is_killed_is_named_by_all(failing: int, store: str, keep: bool, tmp_path: Path) -> None:
    """With rank 0 goes the store that it hosts: then nobody can read who was first, and all still name rank 0."""
    folder = str(write(chain(4), tmp_path / "chain"))
    said = ranks.run(ranks.fail, 4, folder, "kill", failing, True, keep, store=store)
    assert said[failing] is None
    for rank, outcome in enumerate(said):
        if rank != failing:
            message, seconds, again = outcome
            assert f"rank {failing}" in message, message
            assert "is gone" in message
            assert message.startswith(f"rank {rank} stopped in stage {rank}, action ")
            assert seconds < SECONDS
            assert f"rank {failing}" in again


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_rank_that_raises_at_any_action_is_named_by_all(schedule: str, tmp_path: Path) -> None:
    failing, position, action = _anywhere(schedule)
    folder = str(write(chain(3), tmp_path / "chain"))
    said = ranks.run(ranks.break_at, 3, folder, schedule, "raise", failing, position, TIMEOUT)
    origin = f"rank {failing} failed in stage {failing}, action {action}, microbatch "
    for rank, (message, seconds, at) in enumerate(said):
        assert origin in message, message
        verb = "failed" if rank == failing else "stopped"
        assert message.startswith(f"rank {rank} {verb} in stage {rank}, action "), (message, at)
        assert seconds < SECONDS


@pytest.mark.parametrize(("how", "schedule"), [("kill", "gpipe"), ("kill", "zb-h1"), ("stop", "1f1b")])
def test_a_rank_that_dies_or_hangs_at_any_action_is_named_by_all(how: str, schedule: str, tmp_path: Path) -> None:
    failing, position, action = _anywhere(schedule)
    folder = str(write(chain(3), tmp_path / "chain"))
    said = ranks.run(
        ranks.break_at, 3, folder, schedule, how, failing, position, TIMEOUT, hung=failing if how == "stop" else None
    )
    assert said[failing] is None
    for rank, outcome in enumerate(said):
        if rank != failing:
            message, seconds, at = outcome
            assert message.startswith(f"rank {rank} stopped in stage {rank}, action "), (message, action)
            assert ", waiting for rank " in message, message
            assert f"rank {failing}" in message.split("waiting for")[1], (message, action, at)
            assert seconds < SECONDS + (TIMEOUT if how == "stop" else 0)


def test_a_rank_that_hangs_with_the_store_stops_all(tmp_path: Path) -> None:
    """Nobody can tell who hangs, as rank 0 hosts the store: each says for whom it waited itself."""
    folder = str(write(chain(3), tmp_path / "chain"))
    said = ranks.run(ranks.break_at, 3, folder, "1f1b", "stop", 0, 9, TIMEOUT, store="tcp", hung=0)
    for rank, (message, seconds, _) in enumerate(said[1:], start=1):
        assert message.startswith(f"rank {rank} stopped in stage {rank}, action "), message
        assert ", waiting for rank " in message
        assert "the process group's store does not answer either" in message.casefold()
        assert seconds < SECONDS + TIMEOUT


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
    said = ranks.run(ranks.build, 3, str(folder), ["1f1b"] * 3, 1)
    assert said[1].startswith("PackageError: ")
    for rank in (0, 2):
        assert said[rank].startswith(f"RuntimeFault: rank {rank} stopped: rank 1 failed: PackageError: ")
        assert "stage-1.safetensors is missing: stage 1 needs it" in said[rank]


def test_a_wrong_batch_is_refused_by_every_rank(tmp_path: Path) -> None:
    said = ranks.run(ranks.evaluate, 2, str(write(chain(2), tmp_path / "chain")))
    expected = (
        "BatchError: x has the shape [2, 8]: 2 rows for 2 microbatches. The plan's microbatch is 2 rows: "
        "pass 4 rows, or microbatches=1."
    )
    assert said == [expected, expected]


def test_ranks_with_different_schedules_are_refused(tmp_path: Path) -> None:
    said = ranks.run(ranks.build, 2, str(write(chain(2), tmp_path / "chain")), ["gpipe", "1f1b"])
    for message in said:
        assert message.startswith("ScheduleError: the ranks were given different packages, schedules")


def test_too_few_processes_are_refused(tmp_path: Path) -> None:
    said = ranks.run(ranks.build, 2, str(write(chain(3), tmp_path / "chain")), ["1f1b"] * 2)
    assert (
        said
        == [
            "ScheduleError: 1f1b runs the package's 3 stages on 3 ranks, and 2 processes were started. "
            "Start 3 (--nproc-per-node 3), or run without torchrun: one process then holds all stages."
        ]
        * 2
    )
