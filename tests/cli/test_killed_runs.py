"""A run under ``torchrun --max-restarts 3`` whose ranks are killed ends as the one that nobody killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.killed_runs.__main__ import MODEL, write_package
from benchmarks.killed_runs.killed_run import STEPS, Kill, run

KILLS = [Kill(0, "start", 0, 0.5), Kill(1, "saving", 30, 0.002), Kill(0, "step", 150, 0.001)]


@pytest.mark.slow
@pytest.mark.timeout(400)  # four starts of two processes, on a busy machine
def test_a_run_goes_on_by_itself(tmp_path: Path) -> None:
    package, environment = write_package(tmp_path), {"OMP_NUM_THREADS": "1"}
    alone = run(package, MODEL, tmp_path / "alone", [], environment)
    assert (alone.code, len(alone.losses)) == (0, STEPS), alone.output
    ended = run(package, MODEL, tmp_path / "killed", KILLS, environment)
    assert (ended.code, ended.struck) == (0, KILLS), ended.output
    assert ended.losses == alone.losses
