"""Modes, gradients and frozen parameters as a model has them, and advice for what a pipeline cannot do."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from pipegraph import PipegraphError, Pipeline
from tests.runtime.packages import write
from tests.runtime.sketches import chain


@pytest.fixture
def pipe(tmp_path: Path) -> Pipeline:
    folder = write(chain(2), tmp_path / "chain")
    return Pipeline(folder, microbatches=2, kernels="eager", loss_fn=lambda output, _: output.square().mean())


def test_modes_are_switched_and_returned(pipe: Pipeline) -> None:
    assert pipe.training
    assert pipe.eval() is pipe
    assert not any(module.training for stage in pipe.stages.values() for module in stage.modules())
    assert pipe.train() is pipe
    assert all(module.training for stage in pipe.stages.values() for module in stage.modules())
    assert pipe.eval(torch.ones(4, 8)).shape == (4, 8)
    assert pipe.training  # a forward does not switch the mode


def test_gradients_are_reset(pipe: Pipeline) -> None:
    pipe.step(torch.ones(4, 8))
    pipe.zero_grad(set_to_none=False)
    gradients = [parameter.grad for parameter in pipe.parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_frozen_parameters_get_no_gradient(pipe: Pipeline) -> None:
    first = next(iter(dict(pipe.named_parameters())))
    assert pipe.requires_grad_(False) is pipe
    with pytest.raises(PipegraphError):
        pipe.step(torch.ones(4, 8))
    dict(pipe.named_parameters())[first].requires_grad_()
    pipe.step(torch.ones(4, 8))
    assert [name for name, parameter in pipe.named_parameters() if parameter.grad is not None] == [first]


def test_to_returns_the_pipeline_if_nothing_would_change(pipe: Pipeline) -> None:
    assert pipe.to("cpu") is pipe
    assert pipe.to(torch.device("cpu"), non_blocking=True) is pipe


@pytest.mark.parametrize(
    ("call", "advice"),
    [
        (lambda pipe: pipe.to("cuda:0"), "device="),
        (lambda pipe: pipe.to(torch.bfloat16), "precision="),
        (lambda pipe: pipe.to(dtype=torch.float64), "precision="),
        (lambda pipe: pipe(torch.ones(4, 8)), "pipe.step("),
        (copy.deepcopy, "Pipeline(pipe.package"),
    ],
)
def test_what_a_pipeline_cannot_do_says_what_does_it(pipe: Pipeline, call: object, advice: str) -> None:
    with pytest.raises(PipegraphError) as caught:
        call(pipe)  # type: ignore[operator]
    assert advice in caught.value.advice
