"""A function of tensors as a graph of ATen operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels import internals


def trace_aten(function: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors into the graph of ATen operations that Inductor is given.

    Args:
        function: returns one tensor or a tuple of them.
        inputs: tensors of the shapes, dtypes and devices to trace for; their values are not read.
    """

    def outputs(*given: Tensor) -> list[Tensor]:
        made = function(*given)
        return list(made) if isinstance(made, tuple) else [made]

    with internals.fake_tensors(), torch.no_grad():
        arguments = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in inputs]
        module = internals.trace(outputs, arguments, internals.inductor_decompositions())
    module.graph.eliminate_dead_code()
    return module
