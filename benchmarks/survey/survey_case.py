"""A model of the survey: how it is built, and inputs of any size for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.torch_private.pytrees import pytree

Size = tuple[int, ...]
Inputs = tuple[tuple[Any, ...], dict[str, Any]]

BATCH = 3
TOKENS: tuple[Size, ...] = ((13,), (7,), (19,))
"""The length at capture, and two others."""


@dataclass(frozen=True)
class SurveyCase:
    """A model, and what its caller passes.

    Attributes:
        origin: where its class comes from.
        build: makes the model with random weights.
        inputs: (batch, size) → positional and keyword arguments.
        sizes: the length, or height and width, at capture, and two others; empty if the batch alone varies.
    """

    name: str
    origin: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, Size], Inputs]
    sizes: tuple[Size, ...] = ()

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in training mode, the same at each call.

        A little noise is added to its parameters: many models begin with factors of 0 or 1, which would hide errors
        in other parts.
        """
        torch.manual_seed(0)
        model = self.build().train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
        # A cast to float32 would drop the imaginary part of complex parameters.
        return model if dtype == torch.float32 else model.to(dtype)

    def arguments(self, batch: int = BATCH, index: int = 0) -> Inputs:
        """Positional and keyword arguments of ``batch`` rows, at one of the case's sizes."""
        torch.manual_seed(1)
        return self.inputs(batch, self.sizes[index] if self.sizes else ())


def token_numbers(vocabulary: int) -> Callable[[int, Size], Inputs]:
    """Makes token numbers [batch, length] as the only argument."""
    return lambda batch, size: ((torch.randint(vocabulary, (batch, *size)),), {})


def images(channels: int = 3) -> Callable[[int, Size], Inputs]:
    """Makes images [batch, channels, height, width] as the only argument."""
    return lambda batch, size: ((torch.randn(batch, channels, *size),), {})


def rows(*width: int) -> Callable[[int, Size], Inputs]:
    """Makes [batch, *size, *width] as the only argument."""
    return lambda batch, size: ((torch.randn(batch, *size, *width),), {})


def floats_to(dtype: torch.dtype, inputs: Inputs) -> Inputs:
    """The same inputs with floating-point tensors in another dtype."""

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(cast, inputs)
    return args, kwargs
