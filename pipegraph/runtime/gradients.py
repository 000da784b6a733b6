"""Gradients over all ranks: clipping by the norm of all of them, and infinities that count on every rank.

With `torch.amp.GradScaler`, loss_fn scales the loss on the rank of the last stage, and gradients come scaled to all.
Each rank unscales its own. Where one rank skipped its optimizer's step and another did not, the stages would belong to
different models.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ReduceOp
from torch.optim import Optimizer

from pipegraph.errors import ArgumentError
from pipegraph.kernels.loss import objects_held_by
from pipegraph.kernels.sharded import is_sharded, layout, local, number_of_each_rank
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.rank_grid import DIMENSIONS
from pipegraph.runtime.processes.world import World
from pipegraph.torch_private.amp import infinities_found, is_unscaled, unscaling_of_parts


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: Group | None,
    device: torch.device,
    copies: int = 1,
) -> Tensor:
    """Scale the gradients of `parameters` so that the norm of those of all ranks together is at most `max_norm`.

    Args:
        counted: the parameters whose gradients this rank adds to the norm. A weight with copies on several ranks is
            counted by one of them and scaled by all. Of a DTensor all shards are counted.
        group: all ranks, which call this together; None in a plain process.
        copies: how many ranks of the group hold the same stages as this one, itself included: whole, or a part each.

    Returns:
        The norm before scaling. Its dtype is that of this rank's gradients, and at least float32; between ranks, which
        may have different dtypes, it is added in float64.
    """
    norms = [_norm(counted_parameters, norm_type, device, copies) for counted_parameters in _by_layout(counted)]
    total = torch.nn.utils.get_total_norm(norms, norm_type).to(device, torch.float64)
    if group is not None and math.isinf(norm_type):
        total = group.greatest(total)
    elif group is not None:
        total = total**norm_type
        group.all_reduce(total)
        total = total ** (1 / norm_type)
    total = total.to(_dtype(parameters))
    for layout_parameters in _by_layout(parameters):
        torch.nn.utils.clip_grads_with_norm_(layout_parameters, max_norm, total)
    return total


def checked_norm(max_norm: object, norm_type: object) -> tuple[float, float]:
    """The bound, and the p of the norm. Raises ArgumentError if they would turn gradients around, or make them NaN."""
    bound, p = _number(max_norm), _number(norm_type)
    if not bound >= 0:
        raise ArgumentError(
            f"max_norm cannot be {max_norm!r}: it is the norm that gradients may have, from 0 on.", "max_norm=1.0."
        )
    if not p > 0:
        raise ArgumentError(
            f"norm_type cannot be {norm_type!r}: it is the p of a p-norm, which is positive, or infinity.",
            "norm_type=2.0, or math.inf.",
        )
    return bound, p


def _number(value: Any) -> float:
    """The number that torch would take this for; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _by_layout(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """The parameters with gradients, apart by layout: an operation does not take DTensors of different layouts."""
    by_layout: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_layout.setdefault((layout(parameter.grad) or ())[:2], []).append(parameter)
    return list(by_layout.values())


def _dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    dtypes = {parameter.grad.dtype.to_real() for parameter in parameters if parameter.grad is not None}
    return reduce(torch.promote_types, dtypes, torch.float32)


def _norm(parameters: Sequence[nn.Parameter], norm_type: float, device: torch.device, copies: int) -> Tensor:
    """What gradients of one layout add to the norm: over all ranks that hold a shard, or this rank's part of that.

    If the group has copies, each rank adds what it holds, so often that all of them together add every shard once.
    """
    gradients: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
    is_greatest = math.isinf(norm_type)
    if copies == 1 and not is_greatest:
        norm: Any = torch.nn.utils.get_total_norm(gradients, norm_type)
        total_norm: Tensor = norm.full_tensor() if is_sharded(norm) else norm
        return total_norm.to(device, torch.float64)
    parts = [part for part in map(local, gradients) if part.numel()]  # nothing has no greatest number
    local_norm = torch.nn.utils.get_total_norm(parts, norm_type).to(device, torch.float64)
    if is_greatest:
        return number_of_each_rank(local_norm, gradients[0]).max() if copies == 1 else local_norm
    return local_norm * (_shards(gradients[0]) / copies) ** (1 / norm_type)


def _shards(gradient: Any) -> int:
    """On how many ranks the parts of a DTensor are; 1 for another tensor."""
    if not is_sharded(gradient):
        return 1
    placed = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in placed if not placement.is_replicate())


def share_infinities(loss_fn: Any, world: World, guard: FaultGuard, owner: object) -> None:
    """Make each `GradScaler` that a loss function uses agree with those of the other ranks, as long as `owner` lives.

    Its `unscale_` is then collective, and so is `step`, which calls it.
    """
    for scaler in objects_held_by(loss_fn):
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            shared = _shared_methods(scaler, world, guard)
            vars(scaler).update(shared)
            weakref.finalize(owner, _take_back, scaler, shared).atexit = False


def _take_back(scaler: GradScaler, shared: Mapping[str, Any]) -> None:
    """Let a scaler have the methods of its class again, but for those that another pipeline has given it since."""
    attributes = vars(scaler)
    for name in [name for name, method in shared.items() if attributes.get(name) is method]:
        del attributes[name]


def _shared_methods(scaler: GradScaler, world: World, guard: FaultGuard) -> dict[str, Any]:
    kind, device = type(scaler), world.device

    def unscale(optimizer: Optimizer) -> None:
        scaler.scale(torch.zeros((), device=device))  # which makes the scale on ranks that compute no loss
        kind.unscale_(scaler, optimizer)
        flags = infinities_found(scaler, optimizer)
        most = torch.stack([flag.to(device) for flag in flags]).max() if flags else torch.zeros((), device=device)
        with guard:
            world.along(*DIMENSIONS).all_reduce(most, ReduceOp.MAX)
        for flag in flags:
            flag.copy_(most)

    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_unscaled(scaler, optimizer):
            scaler.unscale_(optimizer)
        return kind.step(scaler, optimizer, *args, **kwargs)

    return {"unscale_": unscale, "step": step, **unscaling_of_parts(scaler, local)}
