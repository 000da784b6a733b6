"""Stages whose kernels sleep instead of computing: for pipegraph's runtime, and for torch's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels import Forward


class SleepingKernels:
    """Kernels of one stage for pipegraph's runtime: they sleep, return zeros and fill in gradients of parameters."""

    def __init__(self, stage: nn.Module, seconds: float, input_gradients: Sequence[bool]) -> None:
        self._parameters = list(stage.parameters())
        self._forward, self._backward, self._input_gradients = seconds, 2 * seconds, input_gradients
        self._input = seconds if any(input_gradients) else 0.0

    def begin(self) -> None:
        pass

    def retrace(self) -> None:
        pass

    def prepare(self, *_: Any, **__: Any) -> None:
        pass

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        _sleep(self._forward)
        output = torch.zeros_like(inputs[0])
        loss = output[0, 0] if with_loss else None
        return Forward((output,), loss, output if differentiable else None, is_pure=True)

    def backward(self, saved: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        _sleep(self._backward)
        self.fill_gradients()
        return self._gradients(saved)

    def input_backward(self, saved: Tensor, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        _sleep(self._input)
        return self._gradients(saved)

    def weight_backward(self, saved: Tensor) -> None:
        _sleep(self._backward - self._input)
        self.fill_gradients()

    def fill_gradients(self) -> None:
        """Give each parameter a gradient, as the runtime expects of a step."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _gradients(self, saved: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(torch.zeros_like(saved) if needs_grad else None for needs_grad in self._input_gradients)


class SleepingInput(torch.autograd.Function):
    """Sleeps for F in the forward and for I in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        _sleep(seconds)
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return torch.zeros_like(gradient), None


class SleepingWeight(torch.autograd.Function):
    """Sleeps for W in the backward."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return torch.zeros_like(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """A stage for torch's runtime, which divides the autograd graph into I and W itself."""

    def __init__(self, seconds: float, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = SleepingInput.apply(x, self.seconds)  # type: ignore[no-untyped-call]
        factor = 1 if x.requires_grad else 2
        weight: Tensor = SleepingWeight.apply(self.weight, factor * self.seconds)  # type: ignore[no-untyped-call]
        return output + weight


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)
