"""The memory of sharded parameters: what the simulator says, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipegraph.schedule import build
from tests.runtime import mesh_memory, ranks
from tests.runtime.meshes import Shape
from tests.runtime.packages import write

SHARDS: Shape = {"pp": 2, "dp_shard": 2}


@pytest.mark.slow
def test_a_step_takes_what_the_simulator_says(tmp_path: Path) -> None:
    assert_as_simulated(tmp_path, (SHARDS, "interleaved-1f1b", 1))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_so_does_one_of_any_schedule(tmp_path: Path) -> None:
    """All stages of a rank stay whole."""
    replicas: Shape = {"dp_replicate": 2, "dp_shard": 2}
    cases = [(SHARDS, schedule, None) for schedule in ("1f1b", "zb-h1", "zb-v", "interleaved-1f1b")]
    assert_as_simulated(tmp_path, *cases, (replicas, "interleaved-1f1b", None), seconds=280)


def assert_as_simulated(path: Path, *cases: tuple[Shape, str, int | None], seconds: float = 110) -> None:
    arguments = []
    for shape, schedule, resident in cases:
        stages = build(schedule, 2, 4).stages // (1 if "pp" in shape else 2)
        package = path / str(stages)
        folder = package if package.exists() else write(mesh_memory.deep(stages), package)
        arguments.append((str(folder), shape, schedule, resident))
    for measurements in ranks.run(mesh_memory.measure, 4, arguments, timeout=seconds):
        assert isinstance(measurements, list), measurements
        for measurement, case in zip(measurements, cases, strict=True):
            measured, simulated = measurement["rest"]
            assert measured == simulated, case
            for name in ("evaluation", "step"):
                measured, simulated = measurement[name]
                assert 0.9 * simulated < measured < 1.05 * simulated, (name, case)
