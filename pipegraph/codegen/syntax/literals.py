"""Constants of a graph as expressions."""

from __future__ import annotations

import math
from typing import Any

import torch

from pipegraph.codegen.syntax.expressions import Collection, Expression, Literal, Name, call, string


def literal(value: Any) -> Expression:
    """The expression that evaluates to ``value`` with only ``torch`` imported; an expression is its own.

    Raises:
        TypeError: the value is of a kind that an ATen argument never has.
    """
    if isinstance(value, Expression):
        return value
    if value is None or value is ...:
        return Literal("None" if value is None else "...")
    if isinstance(value, (bool, int)):
        return Literal(str(value), is_number=True)
    if isinstance(value, float):
        if not math.isfinite(value):
            return call("float", string(str(value)))
        return Literal(repr(value).replace("e+", "e"), is_number=True)
    if isinstance(value, complex):
        return call("complex", literal(value.real), literal(value.imag))
    if isinstance(value, str):
        return string(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Name(str(value))
    if isinstance(value, torch.device):
        return call("torch.device", string(str(value)))
    if isinstance(value, (tuple, list)):
        return Collection(tuple(map(literal, value)), "()" if isinstance(value, tuple) else "[]")
    raise TypeError(f"no literal for {type(value).__name__}")
