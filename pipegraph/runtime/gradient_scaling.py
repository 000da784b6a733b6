"""`torch.amp.GradScaler` over several ranks: infinities in the gradients of one rank count on all of them.

loss_fn scales the loss on the rank of the last stage, and gradients come scaled to all. Each rank unscales its own.
Where one rank skipped its optimizer's step and another did not, the stages would belong to different models.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from pipegraph.kernels.loss import objects_held_by
from pipegraph.runtime import internals
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.world import World


def share_infinities(loss_fn: Any, world: World, guard: FaultGuard) -> None:
    """Make each `GradScaler` that a loss function uses agree with those of the other ranks.

    Its `unscale_` is then collective, and so is `step`, which calls it.
    """
    for scaler in objects_held_by(loss_fn):
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            _share(scaler, world, guard)


def _share(scaler: GradScaler, world: World, guard: FaultGuard) -> None:
    kind, device = type(scaler), world.device

    def unscale(optimizer: Optimizer) -> None:
        scaler.scale(torch.zeros((), device=device))  # which makes the scale on ranks that compute no loss
        kind.unscale_(scaler, optimizer)
        found = internals.infinities_found(scaler, optimizer)
        most = torch.stack([each.to(device) for each in found]).max() if found else torch.zeros((), device=device)
        with guard:
            world.everyone().all_reduce(most, ReduceOp.MAX)
        for each in found:
            each.copy_(most)

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not internals.is_unscaled(scaler, optimizer):
            scaler.unscale_(optimizer)
        return kind.step(scaler, optimizer, *args, **kwargs)

    vars(scaler).update(unscale_=unscale, step=step)
