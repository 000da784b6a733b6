"""Stages changed by `parallelize_fn`: sharded over real processes, or otherwise."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pipegraph import Pipeline
from pipegraph.errors import PipegraphError
from tests.messages import missing, refused
from tests.runtime import ranks, sharded
from tests.runtime.packages import loss, write
from tests.runtime.pipelines import pipeline
from tests.runtime.sketches import chain, tied
from tests.slow import cases

# Four processes that trace, and compile, on a machine that may be busy with others.
TIMEOUT = 280.0
pytestmark = pytest.mark.timeout(300)


def folder_for(plan: str, path: Path) -> str:
    return str(write(sharded.perceptrons(15 if plan == "uneven" else 16), path / "perceptrons"))


@pytest.mark.parametrize(
    ("plan", "schedule", "kernels", "recompute"),
    [
        pytest.param("tensor parallel", "zb-h1", "eager", "min-cut", marks=pytest.mark.slow),
        ("tensor parallel", "1f1b", "autograd", "min-cut"),
        ("uneven", "zb-h1", "eager", "block"),
        pytest.param("uneven", "zb-h1", "inductor", "min-cut", marks=pytest.mark.slow),
        pytest.param("sequence parallel", "1f1b", "eager", "none", marks=pytest.mark.slow),
        ("sequence parallel", "zb-h1", "eager", "min-cut"),
    ],
)
def test_sharded_stages_train_as_the_whole_model(
    plan: str, schedule: str, kernels: str, recompute: str, tmp_path: Path
) -> None:
    """Two stages, each on two ranks; nothing is left to autograd."""
    arguments = (folder_for(plan, tmp_path), plan, schedule, kernels, recompute)
    assert ranks.run(sharded.train, 4, *arguments, timeout=TIMEOUT) == [[]] * 4


def test_fully_shard_is_left_to_autograd_and_says_so_once(tmp_path: Path) -> None:
    """Its shards of the batch are equal here, so that the mean over them is each one's gradient."""
    rank_warnings = ranks.run(
        sharded.train, 4, folder_for("fully_shard", tmp_path), "fully_shard", "zb-h1", "eager", timeout=TIMEOUT
    )
    for rank, (message,) in enumerate(rank_warnings):
        assert not missing(message, f"FSDPStage{rank // 2} cannot be traced", "fully_shard", "hooks")


REDUCE = ["all_reduce", "wait_tensor"]
GATHER = ["all_gather_into_tensor", "wait_tensor"]


@pytest.mark.parametrize("recompute", cases(["none", "min-cut", "block"], slow=("none", "block")))
def test_no_collective_is_lost_or_made_twice_by_division(recompute: str, tmp_path: Path) -> None:
    first, second = ranks.run(
        sharded.divided, 2, folder_for("tensor parallel", tmp_path), "tensor parallel", recompute, timeout=TIMEOUT
    )
    blocks, parts = first
    assert first == second
    assert blocks == 1  # also with styles of their own, equal layers are compiled once
    assert parts == {"F": [*REDUCE, *REDUCE, *GATHER], "I": REDUCE * 3, "W": [], "B": REDUCE * 3}


@pytest.mark.parametrize("plan", cases(["uneven", "sequence parallel"], slow=("uneven",)))
def test_ranks_divide_alike_and_compute_nothing_of_others_again(plan: str, tmp_path: Path) -> None:
    """In the second plan a backward reads what F has gathered: it is kept, also where all else is computed again."""
    folder = folder_for(plan, tmp_path)
    divisions = []
    for recompute in ("none", "block"):
        first, second = ranks.run(sharded.divided, 2, folder, plan, recompute, timeout=TIMEOUT / 2)
        assert first == second
        divisions.append(first[1])
    collectives, again = divisions
    assert again == collectives
    assert sorted(collectives["B"]) == sorted(collectives["I"] + collectives["W"])
    assert all(parts.count("wait_tensor") * 2 == len(parts) for parts in collectives.values())
    assert len(collectives["F"]) >= 4


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_a_stage_that_returns_a_dtensor_is_refused(kernels: str, tmp_path: Path) -> None:
    plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(use_local_output=False)}
    messages = ranks.run(sharded.wrongly_sharded, 4, folder_for("", tmp_path), plan, kernels, timeout=TIMEOUT)
    for message in messages[2:]:
        assert "output 0 of the stage is a DTensor" in message
        assert "use_local_output=True" in message


def test_copies_of_a_tied_weight_that_are_sharded_differently_are_refused(tmp_path: Path) -> None:
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    messages = ranks.run(sharded.wrongly_sharded, 4, folder_for("", tmp_path), plan, "eager", timeout=TIMEOUT)
    for rank, message in enumerate(messages):
        layout = "S(0) over 2 ranks" if rank >= 2 else "whole on every rank"
        assert not missing(message, "parallelize_fn", layout, "embed.weight of stage 0, head.weight of stage 1")


def step(folder: Path, **options: Any) -> Pipeline:
    pipe = pipeline(folder, microbatches=2, loss_fn=loss, **options)
    inputs = torch.ones(4, 5, dtype=torch.int64) if "tied" in folder.name else torch.ones(4, 8)
    pipe.step(inputs, target=torch.zeros(4))
    return pipe


@pytest.mark.parametrize("kernels", ["eager", "autograd"])
def test_what_it_froze_is_not_trained(kernels: str, tmp_path: Path) -> None:
    def freeze(stage: nn.Module) -> None:
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("bias" not in name)

    pipe = step(write(chain(2), tmp_path / "chain"), kernels=kernels, parallelize_fn=freeze)
    for name, parameter in pipe.named_parameters():
        assert (parameter.grad is None) == ("bias" in name)


def test_what_it_returned_is_the_stage(tmp_path: Path) -> None:
    class Doubled(nn.Module):
        def __init__(self, stage: nn.Module) -> None:
            super().__init__()
            for name, child in stage.named_children():
                setattr(self, name, child)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (layer,) = self.children()
            return 2 * layer(x)

    folder = write(chain(1), tmp_path / "chain")
    pipe = step(folder, kernels="eager", parallelize_fn=Doubled)
    assert isinstance(pipe.stages[0], Doubled)
    layer = pipeline(folder, microbatches=2, loss_fn=loss).stages[0].layer0
    torch.testing.assert_close(pipe.eval(torch.ones(4, 8)), 2 * layer(torch.ones(4, 8)).detach())


def test_parameters_that_it_replaced_are_tied_again(tmp_path: Path) -> None:
    def replace(stage: nn.Module) -> None:
        for module in stage.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))

    pipe = step(write(tied(), tmp_path / "tied"), parallelize_fn=replace)
    assert pipe.stages[0].embed.weight is pipe.stages[2].output.weight
    assert len(list(pipe.parameters())) == 2


@pytest.mark.parametrize(
    ("parallelize_fn", "parts", "advice"),
    [
        (lambda stage: "stage", ["str", "stage 0"], "return a module"),
        (nn.Sequential, ["stage 0", "missing ['layer0.bias', ", "added ['0.layer0.bias', "], "in place"),
    ],
)
def test_what_it_must_not_return_is_refused(parallelize_fn: Any, parts: list[str], advice: str, tmp_path: Path) -> None:
    with refused(PipegraphError, *parts, advice=advice):
        step(write(chain(1), tmp_path / "chain"), parallelize_fn=parallelize_fn)


def test_it_is_called_once_for_each_stage(tmp_path: Path) -> None:
    stage_names: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(write(chain(3), tmp_path / "chain"), parallelize_fn=lambda stage: stage_names.append(type(stage).__name__))
    assert stage_names == ["Stage0", "Stage1", "Stage2"]
