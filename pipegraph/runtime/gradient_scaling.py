"""`torch.amp.GradScaler` over several ranks: infinities in the gradients of one rank count on all of them.

loss_fn scales the loss on the rank of the last stage, and gradients come scaled to all. Each rank unscales its own.
Where one rank skipped its optimizer's step and another did not, the stages would belong to different models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from pipegraph.kernels.loss import objects_held_by
from pipegraph.runtime import internals

Largest = Callable[[torch.Tensor], None]
"""Overwrites a tensor with the largest of all ranks. Collective."""


def share_infinities(loss_fn: Any, device: torch.device, largest: Largest) -> None:
    """Make each `GradScaler` that a loss function uses agree with those of the other ranks.

    Its `unscale_` is then collective, and so is `step`, which calls it.
    """
    for scaler in objects_held_by(loss_fn):
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            _share(scaler, device, largest)


def _share(scaler: GradScaler, device: torch.device, largest: Largest) -> None:
    kind = type(scaler)

    def unscale(optimizer: Optimizer) -> None:
        scaler.scale(torch.zeros((), device=device))  # which makes the scale on ranks that compute no loss
        kind.unscale_(scaler, optimizer)
        found = internals.infinities_found(scaler, optimizer)
        most = torch.stack([each.to(device) for each in found]).max() if found else torch.zeros((), device=device)
        largest(most)
        for each in found:
            each.copy_(most)

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not internals.is_unscaled(scaler, optimizer):
            scaler.unscale_(optimizer)
        return kind.step(scaler, optimizer, *args, **kwargs)

    vars(scaler).update(unscale_=unscale, step=step)
