"""Constants of a graph as Python source."""

from __future__ import annotations

import math
from typing import Any

import torch

from pipegraph.codegen.names.identifiers import literal_text


def literal(value: Any) -> str:
    """Source text that evaluates to ``value`` with only ``torch`` imported.

    Raises:
        TypeError: the value is of a kind that an ATen argument never has.
    """
    if value is None or isinstance(value, (bool, int)):
        return str(value)
    if isinstance(value, float):
        return repr(value).replace("e+", "e") if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if isinstance(value, str):
        return literal_text(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    raise TypeError(f"no literal for {type(value).__name__}")
