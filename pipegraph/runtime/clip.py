"""Clipping by the norm of all gradients of a pipeline."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipegraph.runtime.group import Group


def clip_grad_norm(
    parameters: Sequence[nn.Parameter],
    counted: Sequence[nn.Parameter],
    max_norm: float,
    norm_type: float,
    group: Group | None,
    device: torch.device,
) -> Tensor:
    """Scale the gradients of `parameters` so that the norm of all ranks' together is at most `max_norm`.

    The norm, before scaling, is returned. It is taken over what each rank of `group` has `counted`, so that a weight
    with copies on several ranks is counted once and scaled on all of them.
    """
    gradients = [parameter.grad for parameter in counted if parameter.grad is not None]
    total = torch.nn.utils.get_total_norm(gradients, norm_type).to(device, torch.float32)
    if group is not None and math.isinf(norm_type):
        group.all_reduce(total, dist.ReduceOp.MAX)
    elif group is not None:
        total = total**norm_type
        group.all_reduce(total)
        total = total ** (1 / norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return total
