"""Of which operations graphs are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipegraph.kernels import internals

convolution_backward: Any = torch.ops.aten.convolution_backward.default

Gradients = Sequence[Tensor | None]
"""Of the input, the weight and the bias of a convolution."""


def decompositions(inductor: bool) -> Mapping[Any, Any]:
    """What is taken apart before a graph is divided: what Inductor wants to be, and what has a part in both I and W."""
    table = internals.inductor_decompositions() if inductor else {}
    other = table.get(convolution_backward, _as_it_is)
    return {**table, convolution_backward: partial(_separate_gradients, other)}


def _as_it_is(*args: Any) -> Any:
    return NotImplemented


def _separate_gradients(other: Callable[..., Any], *args: Any, **kwargs: Any) -> Gradients:
    """The gradient of a convolution's input by itself, for I, and those of its weight and bias, for W.

    Libraries compute the two by kernels of their own in any case, so that this costs nothing.
    """
    *rest, (of_input, of_weight, of_bias) = args
    if not of_input or not (of_weight or of_bias):
        found: Gradients = other(*args, **kwargs)
        return found
    first, _, _ = convolution_backward(*rest, (True, False, False))
    _, second, third = convolution_backward(*rest, (False, of_weight, of_bias))
    return first, second, third
