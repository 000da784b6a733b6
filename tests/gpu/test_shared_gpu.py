"""Several ranks that share one GPU, over gloo: pipelines train as the whole model. Other dimensions need NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime import mesh_transformers, ranks

pytestmark = pytest.mark.timeout(300)

TOLERANCE = 2e-5
"""Products of a GPU add up in another order for each size."""


@pytest.mark.parametrize(("schedule", "kernels"), [("zb-v", "eager"), ("interleaved-1f1b", "inductor")])
def test_pipelines(schedule: str, kernels: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = mesh_transformers.write(tmp_path / "package", "llama, tied", 4)
    arguments = folder, {"pp": 2}, schedule, kernels, "llama, tied", "cuda:0", TOLERANCE
    outcomes = ranks.run(mesh_transformers.train, 2, *arguments, timeout=280, method="spawn")
    assert outcomes == ["equal", "equal"], outcomes


def test_other_dimensions_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = mesh_transformers.write(tmp_path / "package", "llama", 2)
    arguments = folder, {"pp": 1, "dp_shard": 2}, "1f1b", "eager", "llama", "cuda:0"
    for message in ranks.run(mesh_transformers.train, 2, *arguments, timeout=280, method="spawn"):
        assert "does not serve tensors on a GPU along dp_shard" in message
