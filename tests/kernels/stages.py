"""Stages for the kernels, and what autograd says of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from pipegraph.kernels import StageKernels, make


class Function(nn.Module):
    """A stage made of a function of (the stage, its inputs) and some modules."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


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
    divided: bool = True,
    microbatches: int = 3,
    tolerance: float = 1e-5,
    traced: bool = True,
) -> StageKernels:
    """Outputs, gradients and buffers equal autograd's, all microbatches in flight before the first backward.

    `wanted` says of each input whether its gradient is (by default, of floating-point ones), `given` of each output
    whether one comes. Random numbers are the same for both.
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
    for ours, theirs in forwards:
        assert not any(isinstance(x, Tensor) and x.requires_grad for x in ours.outputs)
        assert_close(ours.outputs, theirs.outputs, rtol=tolerance, atol=tolerance)
        gradients = [
            torch.randn_like(output) if isinstance(output, Tensor) and output.is_floating_point() and comes else None
            for output, comes in zip(theirs.outputs, given or [True] * 8, strict=False)
        ]
        for_inputs = expected.backward(theirs.saved, gradients)
        if divided:
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
