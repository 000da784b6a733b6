"""Meshes together with ties, skips, frozen parameters, recompute, sizes that vary, clipping and a GradScaler."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.runtime import mesh_mixture, ranks
from tests.runtime.meshes import Shape


@pytest.mark.parametrize(
    ("shape", "schedule", "options"),
    [
        ({"pp": 2, "dp_shard": 2}, "zb-v", {"recompute": "block", "resident": 1}),
        ({"pp": 2, "tp": 2}, "1f1b", {"tp_plan": mesh_mixture.TP_PLAN}),
        pytest.param({"pp": 2, "dp_replicate": 2}, "zb-h1", {"recompute": "none"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "1f1b", {}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "dp_shard": 2, "tp": 2}, "zb-v", {"tp_plan": mesh_mixture.TP_PLAN}, marks=pytest.mark.slow
        ),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else each,
)
@pytest.mark.timeout(240)
def test_all_of_it_trains_as_the_whole_model(
    shape: Shape, schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    assert_trained(tmp_path, "mixture", shape, schedule, options)


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-v", marks=pytest.mark.slow)])
def test_packed_projections_and_experts(schedule: str, tmp_path: Path) -> None:
    """Their parameters are divided as transformers says."""
    assert_trained(tmp_path, "experts", {"pp": 2, "tp": 2}, schedule, {"tp_plan": mesh_mixture.EXPERT_PLAN})


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_shards_of_packed_projections(tmp_path: Path) -> None:
    """The dimension that is packed is not divided twice, which torch could not put together again."""
    shape, options = {"pp": 2, "dp_shard": 2, "tp": 2}, {"tp_plan": mesh_mixture.EXPERT_PLAN}
    assert_trained(tmp_path, "experts without bias", shape, "1f1b", options)


def test_a_packed_bias_that_would_be_divided_twice_is_refused(tmp_path: Path) -> None:
    folder, shape = mesh_mixture.write(tmp_path / "experts", "experts", 2), {"pp": 1, "dp_shard": 2, "tp": 2}
    given = (folder, "experts", shape, "interleaved-1f1b", (4, 4), 0, {"tp_plan": mesh_mixture.EXPERT_PLAN})
    for said in ranks.run(mesh_mixture.train, 4, *given):
        assert re.search(r"^ArgumentError: .*dimension 0 of layers\.0\.fused\.bias as a packed one", said), said


def test_a_parameter_whose_gradient_is_a_share_is_an_error(tmp_path: Path) -> None:
    """A slope is whole on each rank, which uses it for its part of the features. With a style it is added up."""
    folder = mesh_mixture.write(tmp_path / "slopes", "slopes", 2)
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    given = (folder, "slopes", {"pp": 2, "tp": 2}, "1f1b", (5,), 0, {"tp_plan": plan})
    for said in ranks.run(mesh_mixture.train, 4, *given):
        assert re.search(r"PipegraphError: .*different gradients of layers\.\d\.slope\.weight", said), said
    plan["layers.*.slope"] = "replicated_with_grad_allreduce"
    assert ranks.run(mesh_mixture.train, 4, *given) == [[8.0, 4.0, 4.0]] * 4


def assert_trained(path: Path, model: str, shape: Shape, schedule: str, options: dict[str, Any]) -> None:
    folder = mesh_mixture.write(path / model, model, 4 if schedule == "zb-v" else 2)
    count, copies = math.prod(shape.values()), math.prod(shape.get(each, 1) for each in ("dp_replicate", "dp_shard"))
    rows = (5, 4, 6, 4)[:copies]
    given = (folder, model, shape, schedule, rows, count - 1, options)
    said = ranks.run(mesh_mixture.train, count, *given, timeout=220)
    assert said == [[8.0, 4.0, 4.0]] * count, said[0]
