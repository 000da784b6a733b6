"""The loss of the last stage, and what is refused as one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import PipegraphError
from pipegraph.kernels.interface import Loss


def scalar_loss(loss: Loss | None, outputs: tuple[Tensor, ...], target: Any) -> Tensor:
    """The loss, of no dimensions; PipegraphError where it is none, or would train nothing."""
    if loss is None:
        raise PipegraphError("a loss was asked of a stage that has none: give Pipeline a loss_fn.")
    found = loss(outputs, target)
    trained = torch.is_grad_enabled() and any(map(requires_grad, outputs))
    if trained and isinstance(found, Tensor) and not found.requires_grad:
        raise PipegraphError(
            "loss_fn returned a tensor without a gradient, so nothing would be trained.\n"
            "Try: compute it from the output with tensor operations, without detach() or no_grad."
        )
    if not isinstance(found, Tensor) or found.dim() != 0:
        given = f"a tensor of shape {list(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise PipegraphError(f"loss_fn(output, target) returned {given}; a step needs one number: take its mean.")
    return found


def check_gradients(outputs: tuple[Any, ...], comes: tuple[bool, ...]) -> None:
    """PipegraphError where an output needs a gradient that never comes."""
    for position, (output, expected) in enumerate(zip(outputs, comes, strict=False)):
        if not expected and requires_grad(output):
            raise PipegraphError(
                f"output {position} of the stage needs a gradient, and pipeline.json says that none comes back "
                f"(requires_grad false): what made it would not be trained. Were its parameters frozen when the "
                f"model was split? Freeze them, or split the model again with them trainable."
            )


def requires_grad(output: Any) -> bool:
    """Whether a gradient can reach it."""
    return isinstance(output, Tensor) and output.requires_grad
