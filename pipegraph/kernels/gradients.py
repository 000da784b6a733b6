"""The strides that a tensor is to have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipegraph.kernels.sharded import is_sharded, layout, local, rebuilt


def with_strides(gradient: Tensor, value: Tensor) -> Tensor:
    """The gradient with the strides of `value`, which the graphs were traced for."""
    if gradient.stride() == value.stride():
        return gradient
    made = torch.empty_strided(value.shape, value.stride(), dtype=gradient.dtype, device=gradient.device)
    return made.copy_(gradient)


def accumulate(found: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add (parameter, gradient) pairs. A parameter's first gradient becomes its `.grad` itself, without a copy, unless
    its strides are not those of the parameter, which everyone takes for granted.

    A gradient shares memory with nothing else, unless it stands there twice, or among those `shared`. That of a DTensor
    is its local tensor, in the placements of the parameter, and so is the sum.
    """
    sums: list[Tensor] = []
    added: list[Tensor] = []
    given = set(map(id, shared))
    for parameter, gradient in found:
        if parameter.grad is None:
            own = _laid_out(gradient, local(parameter))
            if id(own) in given:
                own = own.clone()
            given.add(id(own))
            parameter.grad = rebuilt(own, parameter)
        elif not is_sharded(parameter) or layout(parameter.grad) == layout(parameter):
            sums.append(local(parameter.grad))
            added.append(gradient)
        else:  # someone else put a gradient there, in another layout
            parameter.grad = parameter.grad + rebuilt(gradient, parameter)
    if sums:
        torch._foreach_add_(sums, added)


def _laid_out(gradient: Tensor, parameter: Tensor) -> Tensor:
    if gradient.is_sparse or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
