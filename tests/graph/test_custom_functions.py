"""Custom autograd Functions: one whose backward export would lose is one operation, others are traced through."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipegraph
from pipegraph.errors import CaptureError
from pipegraph.graph.captured import Captured
from pipegraph.graph.custom_functions import applied_function
from pipegraph.torch_private.fake_tensors import is_fake
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


class Clipped(torch.autograd.Function):
    """A backward that is the derivative of the forward unless the gradient is large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-5, 5)


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


def functions_in(captured: Captured) -> list[type]:
    return [applied.function for node in captured.nodes if (applied := applied_function(node.target)) is not None]


@pytest.mark.parametrize("function", [Doubled, Rounded, Clipped])
def test_a_backward_that_is_not_the_derivative_is_kept(function: Any, tmp_path: Path) -> None:
    applied = vars(torch.autograd.Function)["apply"]
    model, x = Apply(function), torch.randn(2, 4)
    assert functions_in(pipegraph.capture(model, (x,))) == [function]
    assert vars(torch.autograd.Function)["apply"] is applied
    assert differences(split(tmp_path, model, (x,), cut="b"), model, (x,)) == []


class Alias(nn.Module):
    """Has what applies a Function from before."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.apply_function = nn.Linear(4, 4), nn.Linear(4, 4), function.apply

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.apply_function(self.a(x)))


@pytest.mark.parametrize("function", [Doubled, Rounded])
def test_a_function_that_is_applied_under_another_name(function: Any, tmp_path: Path) -> None:
    model, x = Alias(function), torch.randn(2, 4)
    assert functions_in(pipegraph.capture(model, (x,))) == [function]
    assert differences(split(tmp_path, model, (x,), cut="b"), model, (x,)) == []


def test_a_backward_that_is_the_derivative_is_captured_in_silence(tmp_path: Path) -> None:
    model, x = Apply(Squared, 0.5), torch.randn(2, 4)
    rng_state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        package = split(tmp_path, model, (x,), cut="b")
    assert torch.equal(torch.random.get_rng_state(), rng_state)
    assert functions_in(pipegraph.capture(model, (x,))) == []
    assert differences(package, model, (x,)) == []


class Checkpointed(Apply):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize(("function", "arguments"), [(Squared, (0.5,)), (Doubled, ())])
def test_a_checkpoint_around_one_takes_no_gradient_away(function: Any, arguments: Any, tmp_path: Path) -> None:
    """torch.export takes all that follows to be without gradients."""
    model, x = Checkpointed(function, *arguments), torch.randn(2, 4)
    assert pipegraph.capture(model, (x,)).nodes[-1].meta["requires_grad"]
    assert differences(split(tmp_path, model, (x,), cut="b"), model, (x,)) == []


class Twice(Apply):
    """Applies a Function to an input of the model, which needs no gradient, and then to an activation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.function.apply(x, *self.arguments))


def test_an_application_without_gradients_says_nothing_about_the_next() -> None:
    assert functions_in(pipegraph.capture(Twice(Doubled), (torch.ones(2, 4),))) == [Doubled, Doubled]


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
    """Cannot be compared in another dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        assert x.dtype == torch.float32, "a kernel of float32"
        return Squared.forward(ctx, x, scale)


class OnTheGpu(Squared):
    """Cannot be run on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        assert is_fake(x), "a kernel for GPUs"
        return Squared.forward(ctx, x, scale)


def applied_to_256(function: Any) -> nn.Module:
    model = Apply(function, 0.5)
    model.a, model.b = nn.Linear(4, 256), nn.Linear(256, 4)
    return model


def test_a_function_that_cannot_be_made_smaller_is_tried_at_its_size() -> None:
    captured = pipegraph.capture(applied_to_256(Of256), (torch.ones(3, 4),))
    assert "aten.pow.Tensor_Scalar" in {str(node.target) for node in captured.nodes}


def test_a_function_of_one_dtype_is_tried_in_that() -> None:
    assert functions_in(pipegraph.capture(applied_to_256(InFloat32), (torch.ones(3, 4),))) == []


class Written(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.round_()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Called(torch.autograd.Function):
    """Takes a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Counted(torch.autograd.Function):
    """Returns a number as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x.round(), 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (OnTheGpu, (0.5,), "a kernel for GPUs"),
        (Written, (), "writes into its arguments"),
        (Called, (torch.round,), "builtin_function"),
        (Counted, (), "other than tensors"),
    ],
)
def test_a_function_that_no_operator_can_be_is_refused(function: Any, arguments: tuple[Any, ...], reason: str) -> None:
    parts = ("Apply", function.__name__, reason, "test_custom_functions.py:", "self.function.apply(self.a(x)")
    with refused(CaptureError, *parts, advice="register_autograd"):
        pipegraph.capture(Apply(function, *arguments), (torch.ones(3, 4),))


def test_without_gradients_it_is_traced_through() -> None:
    model = Apply(Called, torch.round).requires_grad_(False)
    assert functions_in(pipegraph.capture(model, (torch.ones(3, 4),))) == []


class Cut(torch.autograd.Function):
    """The derivative where its argument is small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-20, 20)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reversed(torch.autograd.Function):
    """The derivative for one number alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def test_what_is_the_derivative_for_some_arguments_is_not_for_others() -> None:
    assert functions_in(pipegraph.capture(Apply(Cut), (torch.ones(2, 4),))) == [Cut]
    model = nn.Sequential(Apply(Reversed, 1.0), Apply(Reversed, -1.0), Apply(Reversed, 1.0))
    captured = pipegraph.capture(model, (torch.ones(2, 4),))
    assert functions_in(captured) == [Reversed]


# ---- rows ------------------------------------------------------------------------------------------------------------


class Weighted(torch.autograd.Function):
    """A product with a weight, the gradient of which is a sum over the rows; a tenth of the gradient of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t() / 10, x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class MeanOverRows(Weighted):
    """The same, with a mean in place of the sum."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weight = Weighted.backward(ctx, gradient)
        return of_input, of_weight / gradient.shape[0]


class Centred(torch.autograd.Function):
    """The forward mixes rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0, keepdim=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Drawn(torch.autograd.Function):
    """Rounds up or down by chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class OfRows(nn.Module):
    """Applies a Function to rows, in the order of a merged dimension and in others."""

    def __init__(self, function: Any, form: str = "plain", has_weight: bool = False) -> None:
        super().__init__()
        self.linear, self.function, self.form = nn.Linear(4, 4), function, form
        self.weight = nn.Parameter(torch.randn(4, 4)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        arguments = () if self.weight is None else (self.weight,)
        if self.form == "merged":
            return self.function.apply(h.flatten(0, 1), *arguments).view_as(x)
        if self.form == "second":
            return self.function.apply(h.transpose(0, 1), *arguments).transpose(0, 1)
        return self.function.apply(h, *arguments)


@pytest.mark.parametrize(
    ("function", "has_weight", "mixes"),
    [(Rounded, False, False), (Weighted, True, False), (MeanOverRows, True, True), (Drawn, False, False)],
)
@pytest.mark.parametrize("form", ["plain", "merged", "second"])
def test_the_rows_of_a_function_are_tried(function: Any, has_weight: bool, mixes: bool, form: str) -> None:
    mixes &= form != "second"  # the mean is over another dimension there
    report = pipegraph.capture(OfRows(function, form, has_weight), (torch.randn(3, 5, 4),)).batch
    assert report.proof == "rules"
    assert [operator.operator for operator in report.mixing] == ([function.__name__] if mixes else [])
    assert [operator.operator for operator in report.per_microbatch] == (
        ["random numbers"] if function is Drawn else []
    )


def test_a_forward_that_mixes_rows_is_named_with_its_line() -> None:
    (operator,) = pipegraph.capture(OfRows(Centred), (torch.randn(3, 5, 4),)).batch.mixing
    assert operator.operator == "Centred" and operator.line.startswith("test_custom_functions.py:")
    assert not pipegraph.capture(OfRows(Centred, "second"), (torch.randn(3, 5, 4),)).batch.mixing
