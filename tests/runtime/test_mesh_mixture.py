"""Meshes together with ties, skips, frozen parameters, recompute, dynamic sizes, clipping and a GradScaler."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

import pipegraph
from tests.runtime import checkpoint_ranks, mesh_mixture, ranks
from tests.runtime.meshes import Shape

TRAINED = [8.0, 4.0, 4.0]
"""the scale after each step: one is left out on every rank"""

Case = tuple[str, Shape, str, dict[str, Any]]
"""(model, mesh, schedule, options)"""

TP: dict[str, Any] = {"tp_plan": mesh_mixture.TP_PLAN}
EXPERTS: dict[str, Any] = {"tp_plan": mesh_mixture.EXPERT_PLAN}


def run(path: Path, *cases: Case, seconds: float = 110) -> list[list[Any]]:
    """What each rank reports of each case. All cases use the same processes, which are started once."""
    (count,) = {math.prod(shape.values()) for _, shape, _, _ in cases}
    arguments = []
    for model, shape, schedule, options in cases:
        stages = 4 if schedule == "zb-v" else 2
        package = path / f"{model}-{stages}"
        folder = str(package) if package.exists() else mesh_mixture.write(package, model, stages)
        copies = math.prod(shape.get(dimension, 1) for dimension in ("dp_replicate", "dp_shard"))
        arguments.append((folder, model, shape, schedule, (5, 4, 6, 4)[:copies], count - 1, options))
    outcomes: list[list[Any]] = ranks.run(mesh_mixture.train_each, count, arguments, timeout=seconds)
    assert all(isinstance(outcome, list) for outcome in outcomes), outcomes[0]
    return outcomes


def test_all_of_it_trains_as_the_whole_model(tmp_path: Path) -> None:
    sharded: Case = ("mixture", {"pp": 2, "dp_shard": 2}, "zb-v", {"recompute": "block", "resident": 1})
    assert run(tmp_path, sharded) == [[TRAINED]] * 4


@pytest.mark.slow  # tests/runtime/test_mesh.py has simpler models
def test_all_of_it_trains_under_tensor_parallelism(tmp_path: Path) -> None:
    assert run(tmp_path, ("mixture", {"pp": 2, "tp": 2}, "1f1b", TP)) == [[TRAINED]] * 4


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_dimensions(tmp_path: Path) -> None:
    cases: list[Case] = [
        ("mixture", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "1f1b", {}),
        ("mixture", {"pp": 2, "dp_replicate": 2, "tp": 2}, "zb-h1", {**TP, "recompute": "none"}),
        ("mixture", {"pp": 2, "dp_shard": 2, "tp": 2}, "zb-v", TP),
        # The dimension that is packed is not divided twice, which torch could not put together again.
        ("experts without bias", {"pp": 2, "dp_shard": 2, "tp": 2}, "1f1b", EXPERTS),
    ]
    assert run(tmp_path, *cases, seconds=580) == [[TRAINED] * len(cases)] * 8


@pytest.mark.slow  # the mixture as a whole has them, too
def test_packed_projections_and_experts(tmp_path: Path) -> None:
    """Their parameters are divided as transformers says. A packed bias cannot be divided twice."""
    twice: Case = ("experts", {"pp": 1, "dp_shard": 2, "tp": 2}, "interleaved-1f1b", EXPERTS)
    for refused, trained in run(tmp_path, twice, ("experts", {"pp": 2, "tp": 2}, "1f1b", EXPERTS)):
        assert re.search(r"^ArgumentError: .*dimension 0 of layers\.0\.fused\.bias as a packed one", refused), refused
        assert trained == TRAINED


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("experts", {"pp": 1, "tp": 2}),
        pytest.param("experts without bias", {"pp": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_packed_parameters_are_saved_in_their_places(model: str, shape: Shape, tmp_path: Path) -> None:
    """One process trains a step, a mesh reads and saves what that left: both have saved the same."""
    package = mesh_mixture.write(tmp_path / "package", model, 2)
    alone = pipegraph.Pipeline(package, "1f1b", 2, loss_fn=mesh_mixture.loss, kernels="eager")
    optimizer, tokens = torch.optim.AdamW(alone.parameters()), torch.arange(32).reshape(4, 8) % mesh_mixture.WORDS
    alone.step(tokens, target=tokens)
    optimizer.step()
    first = alone.save(tmp_path / "alone", optimizer, step=1)
    arguments = package, shape, str(first), str(tmp_path / "mesh")
    second, *_ = ranks.run(mesh_mixture.save_on_a_mesh, math.prod(shape.values()), *arguments)
    assert_close(checkpoint_ranks.content(Path(second)), checkpoint_ranks.content(first), rtol=0, atol=0)


@pytest.mark.slow
def test_transposed_experts_and_an_embedding_of_the_models_own(tmp_path: Path) -> None:
    plan = mesh_mixture.TRANSPOSED_PLAN
    styles = {"embed": "embedding_colwise", "layers.*.experts": "all_reduce"}
    plans = plan, {**plan, **styles}
    cases: list[Case] = [("transposed experts", {"pp": 2, "tp": 2}, "1f1b", {"tp_plan": tp_plan}) for tp_plan in plans]
    assert run(tmp_path, *cases) == [[TRAINED, TRAINED]] * 4


def test_a_plan_that_divides_what_the_model_takes_apart_is_refused(tmp_path: Path) -> None:
    """All shapes fit: one rank would have all gates, the other all ups."""
    packed = mesh_mixture.EXPERT_PLAN
    plans = {**packed, "layers.*.fused": "colwise"}, {**packed, "layers.*.experts.gate_up_proj": "colwise"}
    cases: list[Case] = [("experts", {"pp": 1, "tp": 2}, "interleaved-1f1b", {"tp_plan": plan}) for plan in plans]
    for fused, experts in run(tmp_path, *cases):
        assert re.search(r"^ArgumentError: .*layers\.0\.out of stage 0 takes other numbers", fused), fused
        assert re.search(r"^ArgumentError: .*layers\.0\.experts of stage 0 returns other numbers", experts), experts
        assert '"packed_colwise"' in experts


@pytest.mark.slow
def test_a_parameter_whose_gradient_is_a_share_is_an_error(tmp_path: Path) -> None:
    """A slope is whole on each rank, which uses it for its part of the features. With a style it is added up."""
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    summed = {**plan, "layers.*.slope": "replicated_with_grad_allreduce"}
    shape: Shape = {"pp": 2, "tp": 2}
    cases: list[Case] = [("slopes", shape, "1f1b", {"tp_plan": tp_plan}) for tp_plan in (plan, summed)]
    for refused, trained in run(tmp_path, *cases):
        assert re.search(r"PipegraphError: .*different gradients of layers\.\d\.slope\.weight", refused), refused
        assert trained == TRAINED
