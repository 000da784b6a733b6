"""A rank that fails or is killed: every other one stops within seconds and says which."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.runtime import ranks
from tests.runtime.packages import chain, write

SECONDS = 10.0


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
