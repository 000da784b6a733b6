"""Hooks that a model has when it is captured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph
from pipegraph.errors import CaptureError

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


@pytest.mark.parametrize(
    ("add", "what"),
    [
        (lambda each: each[2].weight.register_hook(halve), r"the parameter 2.weight has a hook"),
        (
            lambda each: each[2].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(0.5)),
            r"the parameter 2.weight has a hook",
        ),
        (lambda each: each[2].register_full_backward_hook(lambda *_: None), r"2 has a hook for its backward"),
        (lambda each: each[2].register_full_backward_pre_hook(lambda *_: None), r"2 has a hook for its backward"),
        (lambda each: each.register_full_backward_hook(lambda *_: None), r"Sequential has a hook for its backward"),
    ],
)
def test_hooks_of_a_backward_are_refused(add: Callable[[nn.Sequential], object], what: str) -> None:
    hooked = model()
    add(hooked)
    with pytest.raises(CaptureError, match=rf"{what}(.|\n)*at .*test_hooks.py:\d+\nTry: .*parallelize_fn"):
        pipegraph.capture(hooked, (X,))


def test_forward_hooks_are_in_the_graph(tmp_path: Path) -> None:
    hooked = model()
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 2)
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(hooked, (X,)), points=["2"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, kernels="autograd")
    torch.testing.assert_close(pipe.eval(X), hooked(X).detach())


def test_the_cure_is_one(tmp_path: Path) -> None:
    """A hook on the stage's parameter is called for every microbatch, and scales what they add up."""
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model(), (X,)), points=["2"]), tmp_path / "out")

    def add(stage: nn.Module) -> None:
        for name, parameter in stage.named_parameters():
            if name == "2.weight":
                parameter.register_hook(halve)

    pipe = pipegraph.Pipeline(
        package, microbatches=2, kernels="autograd", loss_fn=F.mse_loss, parallelize_fn=add, schedule="gpipe"
    )
    pipe.step(X, target=torch.ones(4, 8))
    expected = model()
    expected[2].weight.register_hook(halve)
    F.mse_loss(expected(X), torch.ones(4, 8)).backward()
    torch.testing.assert_close(pipe.stages[1].get_parameter("2.weight").grad, expected[2].weight.grad)
