"""The strides that a tensor is to have."""

from __future__ import annotations

import torch
from torch import Tensor


def with_strides(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient with the strides of `value`, which the graphs were traced for."""
    if gradient.stride() == value.stride():
        return gradient
    made = torch.empty_strided(value.shape, value.stride(), dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)
