"""The memory of sharded parameters: what the simulator says, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime import mesh_memory, ranks
from tests.runtime.packages import write


@pytest.mark.parametrize(
    ("schedule", "resident"),
    [
        ("interleaved-1f1b", 1),
        pytest.param("interleaved-1f1b", None, marks=pytest.mark.slow),
        pytest.param("zb-v", None, marks=pytest.mark.slow),
    ],
)
def test_a_step_takes_what_the_simulator_says(schedule: str, resident: int | None, tmp_path: Path) -> None:
    folder = str(write(mesh_memory.deep(4), tmp_path / "deep"))
    for found in ranks.run(mesh_memory.measure, 4, folder, schedule, resident, timeout=110):
        assert isinstance(found, dict), found
        measured, simulated = found["rest"]
        assert measured == simulated
        for name in ("evaluation", "step"):
            measured, simulated = found[name]
            assert 0.9 * simulated < measured < 1.05 * simulated, name
