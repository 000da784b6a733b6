"""`torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer


def infinities_found(scaler: GradScaler, optimizer: Optimizer) -> list[torch.Tensor]:
    """For each device 1.0 if `unscale_` found an infinity in an optimizer's gradients, else 0.0.

    `step` and `update` read these tensors. Only subclasses in torch reduce them over ranks, and over one group alone.
    """
    return list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def unscaling_of_parts(scaler: GradScaler, part_of: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """A method for a scaler, under its name, by which `unscale_` takes the parts of DTensors that `part_of` gives.

    It takes all gradients of an optimizer in one operation, for which torch mixes DTensors neither with other tensors
    nor with those of another mesh. Torch's own subclasses override the same method.
    """
    unscale_gradients = type(scaler)._unscale_grads_

    def part(parameter: torch.Tensor) -> torch.Tensor:
        if parameter.grad is None or not hasattr(parameter, "placements"):
            return parameter
        local_gradient = part_of(parameter.grad)
        stand_in = local_gradient.detach()
        stand_in.grad = local_gradient
        return stand_in

    def unscale(optimizer: Any, *args: Any) -> Any:
        groups = [{"params": list(map(part, group["params"]))} for group in optimizer.param_groups]
        return unscale_gradients(scaler, SimpleNamespace(param_groups=groups), *args)  # type: ignore[arg-type]

    return {"_unscale_grads_": unscale}


def is_unscaled(scaler: GradScaler, optimizer: Optimizer) -> bool:
    """Return whether `unscale_` has been called for the gradients that an optimizer has now."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"].name == "UNSCALED")
