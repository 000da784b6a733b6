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
    wanted: Sequence[bool] | None = None,
    given: Sequence[bool] | None = None,
    kernels: str = "eager",
    recompute: str = "min-cut",
    divided: bool | None = None,
    microbatches: int = 3,
    tolerance: float = 1e-5,
    traced: bool = True,
) -> StageKernels:
    """Outputs, gradients and buffers equal autograd's, all microbatches in flight before the first backward.

    `wanted` says of each input whether its gradient is (by default, of floating-point ones), `given` of each output
    whether one comes. The backward is I and W if `divided`, else B; by default each for some of the microbatches.
    Random numbers are the same for both.
    """
    wanted = [isinstance(x, Tensor) and x.is_floating_point() for x in inputs] if wanted is None else wanted
    reference = copy.deepcopy(stage)
    found, expected = (
        make(name, module, wanted, (True,) * 8, **extra)
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
        ours = found.forward(batch)
        torch.manual_seed(number)
        forwards.append((ours, expected.forward(batch)))
    for number, (ours, theirs) in enumerate(forwards):
        assert not any(isinstance(x, Tensor) and x.requires_grad for x in ours.outputs)
        assert_close(ours.outputs, theirs.outputs, rtol=tolerance, atol=tolerance)
        gradients = [
            torch.randn_like(output) if isinstance(output, Tensor) and output.is_floating_point() and comes else None
            for output, comes in zip(theirs.outputs, given or [True] * 8, strict=False)
        ]
        for_inputs = expected.backward(theirs.saved, gradients)
        if number % 2 == 0 if divided is None else divided:
            got = found.input_backward(ours.saved, gradients)
            found.weight_backward(ours.saved)
        else:
            got = found.backward(ours.saved, gradients)
        assert [x is None for x in got] == [x is None for x in for_inputs]
        assert_close(got, for_inputs, rtol=tolerance, atol=tolerance)
    own, theirs_ = dict(stage.named_parameters()), dict(reference.named_parameters())
    assert {n: p.grad is None for n, p in own.items()} == {n: p.grad is None for n, p in theirs_.items()}
    for name, parameter in own.items():
        assert_close(
            parameter.grad, theirs_[name].grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert_close(dict(stage.named_buffers()), dict(reference.named_buffers()), rtol=tolerance, atol=tolerance)
    if traced:
        assert None not in found.variants  # type: ignore[attr-defined]
    return found


def step(kernels: Any, target: Any = None) -> Tensor:
    """A step of one microbatch: its loss."""
    kernels.begin()
    forward = kernels.forward((x,), target=target, with_loss=True)
    kernels.backward(forward.saved, (None, torch.ones(())))
    return forward.loss
