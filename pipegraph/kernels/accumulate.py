"""Adding to `.grad`, as `Tensor.backward` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def accumulate(found: Iterable[tuple[Tensor, Tensor]], shared: Sequence[Tensor | None] = ()) -> None:
    """Add (parameter, gradient) pairs. A parameter's first gradient becomes its `.grad` itself, without a copy.

    A gradient shares memory with nothing else, unless it stands there twice, or among those `shared`.
    """
    sums: list[Tensor] = []
    added: list[Tensor] = []
    given = set(map(id, shared))
    for parameter, gradient in found:
        if parameter.grad is not None:
            sums.append(parameter.grad)
            added.append(gradient)
        else:
            parameter.grad = gradient.clone() if id(gradient) in given else gradient
            given.add(id(gradient))
    if sums:
        torch._foreach_add_(sums, added)
