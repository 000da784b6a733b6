"""Stages for the kernels, and what autograd says of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import StageKernels, make

x = torch.randn(4, 8)
tokens = torch.randint(0, 5, (4,))


class Function(nn.Module):
    """A stage made of a function of (the stage, its inputs) and some modules."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Layer(nn.Module):
    """A residual layer, with dropout where asked for."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16)
        self.dropout = nn.Dropout(p)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.silu(self.up(self.norm(x)))))


class Layers(nn.Module):
    def __init__(self, count: int = 3, p: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(p) for _ in range(count))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linear(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(8, 8) for name in names}


def assert_as_autograd(
    stage: nn.Module,
    inputs: Sequence[Any],
    *,
    needs_grad: Sequence[bool] | None = None,
    has_gradients: Sequence[bool] | None = None,
    kernels: str = "eager",
    recompute: str = "min-cut",
    divided: bool | None = None,
    microbatches: int = 3,
    tolerance: float = 1e-5,
    traced: bool = True,
) -> StageKernels:
    """Outputs, gradients and buffers equal autograd's, all microbatches in flight before the first backward.

    `needs_grad` says of each input whether its gradient is (by default, of floating-point ones), `has_gradients` of
    each output whether one comes. The backward is I and W if `divided`, else B; by default
    each for some of the microbatches.
    Random numbers are the same for both.
    """
    needs_grad = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs] if needs_grad is None else needs_grad
    reference = copy.deepcopy(stage)
    stage_kernels, expected = (
        make(name, module, needs_grad, (True,) * 8, **extra)
        for name, module, extra in (
            (kernels, stage, {"recompute": recompute}),
            ("autograd", reference, {}),
        )
    )
    batches = [
        [torch.randn_like(x) if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs]
        for _ in range(microbatches)
    ]
    forwards = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        forward = stage_kernels.forward(batch)
        torch.manual_seed(number)
        forwards.append((forward, expected.forward(batch)))
    for number, (forward, reference_forward) in enumerate(forwards):
        assert not any(isinstance(x, Tensor) and x.requires_grad for x in forward.outputs)
        assert_close(forward.outputs, reference_forward.outputs, rtol=tolerance, atol=tolerance)
        gradients = [
            torch.randn_like(output) if isinstance(output, Tensor) and output.is_floating_point() and has_grad else None
            for output, has_grad in zip(reference_forward.outputs, has_gradients or [True] * 8, strict=False)
        ]
        for_inputs = expected.backward(reference_forward.saved, gradients)
        if number % 2 == 0 if divided is None else divided:
            got = stage_kernels.input_backward(forward.saved, gradients)
            stage_kernels.weight_backward(forward.saved)
        else:
            got = stage_kernels.backward(forward.saved, gradients)
        assert [x is None for x in got] == [x is None for x in for_inputs]
        assert_close(got, for_inputs, rtol=tolerance, atol=tolerance)
    parameters, references = dict(stage.named_parameters()), dict(reference.named_parameters())
    assert {n: p.grad is None for n, p in parameters.items()} == {n: p.grad is None for n, p in references.items()}
    for name, parameter in parameters.items():
        assert_close(
            parameter.grad, references[name].grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert_close(dict(stage.named_buffers()), dict(reference.named_buffers()), rtol=tolerance, atol=tolerance)
    if traced:
        assert None not in stage_kernels.variants  # type: ignore[attr-defined]
    return stage_kernels


def step(kernels: Any, target: Any = None) -> Tensor:
    """A step of one microbatch: its loss."""
    kernels.begin()
    forward = kernels.forward((x,), target=target, with_loss=True)
    kernels.backward(forward.saved, (None, torch.ones(())))
    return forward.loss
