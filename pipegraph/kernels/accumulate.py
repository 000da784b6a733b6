"""Adding to `.grad`, as `Tensor.backward` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pipegraph.kernels.joint import with_strides
from pipegraph.kernels.sharded import is_sharded, layout, local, rebuilt


def accumulate(found: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add (parameter, gradient) pairs. A parameter's first gradient becomes its `.grad` itself, without a copy.

    A gradient shares memory with nothing else, unless it stands there twice, or among those `shared`. That of a DTensor
    is its local tensor, in the placements of the parameter, and so is the sum.
    """
    sums: list[Tensor] = []
    added: list[Tensor] = []
    given = set(map(id, shared))
    for parameter, gradient in found:
        if parameter.grad is None:
            own = gradient.clone() if id(gradient) in given else gradient
            given.add(id(gradient))
            parameter.grad = rebuilt(with_strides(own, local(parameter)), parameter) if is_sharded(parameter) else own
        elif not is_sharded(parameter) or layout(parameter.grad) == layout(parameter):
            sums.append(local(parameter.grad))
            added.append(gradient)
        else:  # someone else put a gradient there, in another layout
            parameter.grad = parameter.grad + rebuilt(gradient, parameter)
    if sums:
        torch._foreach_add_(sums, added)
