"""Gradients as autograd lays them out, added to `.grad` as `Tensor.backward` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.kernels import internals
from pipegraph.kernels.sharded import is_sharded, layout, local, rebuilt
from pipegraph.kernels.symbolic.symbolic_sizes import same


def with_strides(tensor: Tensor, strides: Sequence[Any]) -> Tensor:
    """Return the tensor with the strides that graphs were traced for: a copy if it has others."""
    if same(tensor.stride(), strides):
        return tensor
    copy = torch.empty_strided(tensor.shape, list(strides), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def accumulate(pairs: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add gradients to the `.grad` of parameters.

    A parameter's first gradient becomes its `.grad` without a copy, if it has the parameter's strides, which optimizers
    and others rely on.

    Args:
        pairs: (parameter, gradient). The gradient of a DTensor is its local tensor, in the parameter's placements. A
            gradient shares its memory with no other tensor, unless it comes twice or is `shared`.
        shared: tensors that others hold too.
    """
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    taken = set(map(id, shared))
    for parameter, gradient in pairs:
        if parameter.grad is None:
            own = _laid_out(gradient, local(parameter))
            if id(own) in taken:
                own = own.clone()
            taken.add(id(own))
            parameter.grad = rebuilt(own, parameter)
        elif not is_sharded(parameter) or layout(parameter.grad) == layout(parameter):
            sums.append(local(parameter.grad))
            addends.append(gradient)
        else:  # the user put a gradient there, in another layout
            parameter.grad = parameter.grad + rebuilt(gradient, parameter)
    if sums:
        internals.add_all(sums, addends)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
