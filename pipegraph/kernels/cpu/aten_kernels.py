"""Operations that compiled graphs leave to ATen's own kernels on a CPU, since those that Inductor writes are slower."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# Where channels are not innermost, Inductor looks at the elements of a window one by one, with a branch for each.
_SCHEMAS: dict[Any, str] = {
    aten.max_pool2d_with_indices.default: "(Tensor self, int[2] kernel_size, int[2] stride=[], int[2] padding=0, "
    "int[2] dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)",
    aten.max_pool2d_with_indices_backward.default: "(Tensor grad_output, Tensor self, int[2] kernel_size, "
    "int[2] stride, int[2] padding, int[2] dilation, bool ceil_mode, Tensor indices) -> Tensor",
}

_library = torch.library.Library("pipegraph", "FRAGMENT")


def _opaque(operation: Any, schema: str) -> Any:
    """Return an operation that does the same, and of which Inductor knows nothing."""
    name = operation.overloadpacket.__name__
    _library.define(name + schema)
    _library.impl(name, operation, "CPU")
    torch.library.register_fake(f"pipegraph::{name}", operation, lib=_library)
    return getattr(torch.ops.pipegraph, name).default


_OPAQUE = {operation: _opaque(operation, schema) for operation, schema in _SCHEMAS.items()}


def without_cpu_pools(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return a table of decompositions with which such operations stay whole on a CPU."""
    decompositions = {
        operation: partial(_whole_on_cpu, opaque, table.get(operation, lambda *args, **kwargs: NotImplemented))
        for operation, opaque in _OPAQUE.items()
    }
    return {**table, **decompositions}


def _whole_on_cpu(opaque: Any, decomposition: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    return (opaque if tensor.device.type == "cpu" else decomposition)(tensor, *args, **kwargs)
