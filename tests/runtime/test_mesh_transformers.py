"""Small models of transformers over meshes, by the plans of tensor parallelism that transformers has for them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.runtime import mesh_transformers, ranks
from tests.runtime.meshes import Shape

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize(
    ("model", "schedule", "kernels"),
    [
        ("llama", "1f1b", "eager"),
        pytest.param("llama, tied", "zb-v", "eager", marks=pytest.mark.slow),
        pytest.param("llama, tied", "1f1b", "inductor", marks=pytest.mark.slow),
        pytest.param("llama", "zb-v", "inductor", marks=pytest.mark.slow),
    ],
)
def test_all_dimensions(model: str, schedule: str, kernels: str, tmp_path: Path) -> None:
    assert_trained(tmp_path, model, {"pp": 2, "dp_shard": 2, "tp": 2}, schedule, kernels)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "schedule"), [("qwen3_moe", "zb-v"), ("mixtral", "1f1b")])
def test_experts(model: str, schedule: str, tmp_path: Path) -> None:
    """Packed projections of all experts, a router that every rank has whole, and norms of heads."""
    assert_trained(tmp_path, model, {"pp": 2, "tp": 2}, schedule, "eager")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kernels"), [("glm4_moe_lite", "eager"), ("gemma2", "eager"), ("gemma2", "inductor")]
)
def test_latent_attention_and_scaled_embeddings(model: str, kernels: str, tmp_path: Path) -> None:
    assert_trained(tmp_path, model, {"pp": 2, "tp": 2}, "zb-v", kernels)


def assert_trained(path: Path, model: str, shape: Shape, schedule: str, kernels: str) -> None:
    pytest.importorskip("transformers")
    folder = mesh_transformers.write(path / "package", model, 4 if schedule == "zb-v" else 2)
    count = math.prod(shape.values())
    outcomes = ranks.run(mesh_transformers.train, count, folder, shape, schedule, kernels, model, timeout=380)
    assert outcomes == ["equal"] * count, outcomes[0]
