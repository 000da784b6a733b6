"""How far the clocks of ranks are apart."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.world import ClockOffset, measure_offset
from tests.runtime import ranks

AHEAD = (0, 3_600_000_000_000, -5_000_000_000)  # nanoseconds that the clock of each rank is ahead of this machine's


def shifted(rank: int, folder: str) -> ClockOffset:
    group = Group(dist.FileStore(f"{folder}/clock", 3), rank, range(3), torch.device("cpu"), 30.0)
    offset = measure_offset(group, rank, range(3), lambda: time.time_ns() + AHEAD[rank])
    dist.barrier()
    return offset


def test_the_offset_is_found_within_the_error_that_is_told(tmp_path: Path) -> None:
    offsets = ranks.run(shifted, 3, str(tmp_path))
    assert offsets[0] == ClockOffset(0, 0)
    for rank in (1, 2):
        assert abs(offsets[rank].offset_ns + AHEAD[rank]) <= offsets[rank].error_ns < 50_000_000


def test_drift_adds_to_the_error() -> None:
    assert ClockOffset(100, 10).until(ClockOffset(140, 30)) == ClockOffset(120, 70)
