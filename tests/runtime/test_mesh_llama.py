"""A small Llama on 8 processes, 2 along each of pp, dp_shard and tp, by transformers' own plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime import mesh_llama, ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("schedule", "stages", "kernels", "tied"),
    [("1f1b", 2, "eager", False), ("zb-v", 4, "eager", True), ("zb-v", 4, "inductor", False)],
)
def test_it_trains_as_the_whole_model(schedule: str, stages: int, kernels: str, tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = mesh_llama.write(tmp_path / "llama", stages, tied)
    shape = {"pp": 2, "dp_shard": 2, "tp": 2}
    said = ranks.run(mesh_llama.train, 8, folder, shape, schedule, kernels, tied, timeout=280)
    assert said == ["equal"] * 8, said[0]
