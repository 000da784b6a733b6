"""What would train nothing, or turn gradients around, is refused on every rank, and each says so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipegraph import Pipeline
from pipegraph.errors import ArgumentError, PipegraphError
from tests.messages import refused
from tests.runtime import ranks
from tests.runtime.packages import write
from tests.runtime.sketches import chain

X = torch.ones(4, 8)


def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
    return F.mse_loss(output, torch.zeros_like(output))


def start(package: str | Path) -> Pipeline:
    return Pipeline(package, "gpipe", 2, kernels="autograd", loss_fn=loss)


def step_in_inference_mode(rank: int, package: str, inside: int) -> str:
    pipe = start(package)
    pipe.step(X)
    try:
        with torch.inference_mode(rank == inside):
            pipe.step(X)
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("inside", [0, 1])
def test_inference_mode_on_one_rank_is_named_on_all(inside: int, tmp_path: Path) -> None:
    messages = ranks.run(step_in_inference_mode, 2, str(write(chain(2), tmp_path / "package")), inside)
    assert messages[inside].startswith("PipegraphError: step() under torch.inference_mode() would train nothing")
    assert f"rank {inside} failed: PipegraphError: step() under torch.inference_mode()" in messages[1 - inside]
    assert "killed" not in messages[1 - inside]


def test_a_pipeline_trains_after_a_step_in_inference_mode(tmp_path: Path) -> None:
    pipe = start(write(chain(2), tmp_path / "package"))
    with torch.inference_mode(), refused(PipegraphError, "step()", "torch.inference_mode()", advice="step() outside"):
        pipe.step(X)
    pipe.step(X)
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize(
    ("arguments", "problem", "advice"),
    [
        ((-1.0,), "max_norm cannot be -1.0", "max_norm=1.0"),
        ((math.nan,), "max_norm cannot be nan", "max_norm=1.0"),
        (("a",), "max_norm cannot be 'a'", "max_norm=1.0"),
        ((torch.tensor(-2.0),), "max_norm cannot be tensor(-2.)", "max_norm=1.0"),
        ((1.0, 0.0), "norm_type cannot be 0.0", "norm_type=2.0"),
        ((1.0, -2.0), "norm_type cannot be -2.0", "norm_type=2.0"),
        ((1.0, math.nan), "norm_type cannot be nan", "norm_type=2.0"),
    ],
)
def test_norms_that_are_none(arguments: tuple[Any, ...], problem: str, advice: str, tmp_path: Path) -> None:
    pipe = start(write(chain(2), tmp_path / "package"))
    pipe.step(X)
    gradients = [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    with refused(ArgumentError, problem, advice=advice):
        pipe.clip_grad_norm_(*arguments)
    assert all(torch.equal(parameter.grad, old) for parameter, old in zip(pipe.parameters(), gradients, strict=True))


@pytest.mark.parametrize(
    "arguments", [(0.0,), (math.inf,), (1,), (torch.tensor(0.1),), (0.1, "inf"), (0.1, math.inf), (0.1, 1)]
)
def test_norms_that_torch_takes(arguments: tuple[Any, ...], tmp_path: Path) -> None:
    pipe = start(write(chain(2), tmp_path / "package"))
    pipe.step(X)
    copies = [nn.Parameter(parameter.detach().clone()) for parameter in pipe.parameters()]
    for copy, parameter in zip(copies, pipe.parameters(), strict=True):
        copy.grad = None if parameter.grad is None else parameter.grad.clone()
    torch.testing.assert_close(pipe.clip_grad_norm_(*arguments), nn.utils.clip_grad_norm_(copies, *arguments))
    for copy, parameter in zip(copies, pipe.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, copy.grad)


def clip(rank: int, package: str, bad: int) -> str:
    pipe = start(package)
    pipe.step(X)
    try:
        pipe.clip_grad_norm_(math.nan if rank == bad else 1.0)
    except PipegraphError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_norm_of_one_rank_is_named_on_all(tmp_path: Path) -> None:
    messages = ranks.run(clip, 2, str(write(chain(2), tmp_path / "package")), 1)
    assert messages[1].startswith("ArgumentError: max_norm cannot be nan")
    assert "rank 1 failed: ArgumentError: max_norm cannot be nan" in messages[0]
