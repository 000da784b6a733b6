"""Custom autograd Functions: those whose backward export would lose are refused, others are captured in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipegraph
from pipegraph.errors import CaptureError, path_from_here
from tests.codegen.parity import differences, split
from tests.messages import refused


class Doubled(torch.autograd.Function):
    """A function with a custom backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 100


class Rounded(torch.autograd.Function):
    """A straight-through estimator, whose forward has a derivative of zero."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Squared(torch.autograd.Function):
    """A backward that is the derivative of the forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x**2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * x * gradient, None


class Apply(nn.Module):
    def __init__(self, function: Any, *arguments: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.function, self.arguments = function, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function.apply(self.a(x), *self.arguments))


@pytest.mark.parametrize("function", [Doubled, Rounded])
def test_a_backward_that_would_be_lost_is_refused(function: Any) -> None:
    applied = vars(torch.autograd.Function)["apply"]
    with pytest.raises(CaptureError) as caught:
        pipegraph.capture(Apply(function), (torch.ones(2, 4),))
    problem, place, advice = str(caught.value).splitlines()
    assert f"the backward of {function.__name__}" in problem
    assert place.startswith(f"  at {path_from_here(__file__)}:") and "self.function.apply(self.a(x)" in place
    assert "register_autograd" in advice and "allow_derivative=True" in advice
    assert vars(torch.autograd.Function)["apply"] is applied


def test_the_derivative_is_taken_if_it_is_allowed() -> None:
    captured = pipegraph.capture(Apply(Doubled), (torch.ones(2, 4),), allow_derivative=True)
    assert str(captured.nodes[1].target) == "aten.mul.Tensor"


def test_a_backward_that_is_the_derivative_is_captured_in_silence(tmp_path: Path) -> None:
    model, x = Apply(Squared, 0.5), torch.randn(2, 4)
    rng_state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package = split(tmp_path, model, (x,), cut="b")
    assert torch.equal(torch.random.get_rng_state(), rng_state)
    assert differences(package, model, (x,)) == []


class Checkpointed(Apply):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def test_a_checkpoint_around_one_takes_no_gradient_away(tmp_path: Path) -> None:
    """torch.export takes all that follows to be without gradients."""
    model, x = Checkpointed(Squared, 0.5), torch.randn(2, 4)
    assert pipegraph.capture(model, (x,)).nodes[-1].meta["requires_grad"]
    assert differences(split(tmp_path, model, (x,), cut="b"), model, (x,)) == []


class Twice(Apply):
    """Applies a Function to an input of the model, which needs no gradient, and then to an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function.apply(x, *self.arguments))


def test_an_application_without_gradients_says_nothing_about_the_next() -> None:
    with refused(CaptureError, "Twice", "Doubled", "test_custom_functions.py:", advice="allow_derivative=True"):
        pipegraph.capture(Twice(Doubled), (torch.ones(2, 4),))


def test_a_function_of_large_tensors_is_tried_on_small_ones() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(2**15, 2**15), Apply(Squared, 0.5)), torch.ones(2**15, 2**15)
        model[1].a, model[1].b = nn.Identity(), nn.Identity()
    assert "aten.pow.Tensor_Scalar" in {str(node.target) for node in pipegraph.capture(model, (x,)).nodes}


class Of256(Squared):
    """Runs at one size only, which is larger than those on which Functions are tried first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        assert x.shape[-1] == 256
        return Squared.forward(ctx, x, scale)


class InFloat32(Squared):
    """Cannot be compared, which is another problem than a backward that differs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        assert x.dtype == torch.float32, "a kernel of float32"
        return Squared.forward(ctx, x, scale)


def applied_to_256(function: Any) -> nn.Module:
    model = Apply(function, 0.5)
    model.a, model.b = nn.Linear(4, 256), nn.Linear(256, 4)
    return model


def test_a_function_that_cannot_be_made_smaller_is_tried_at_its_size() -> None:
    captured = pipegraph.capture(applied_to_256(Of256), (torch.ones(3, 4),))
    assert "aten.pow.Tensor_Scalar" in {str(node.target) for node in captured.nodes}


def test_a_function_that_cannot_be_compared_is_refused_with_the_reason() -> None:
    with refused(CaptureError, "Apply", "InFloat32", "a kernel of float32", advice="allow_derivative=True"):
        pipegraph.capture(applied_to_256(InFloat32), (torch.ones(3, 4),))
