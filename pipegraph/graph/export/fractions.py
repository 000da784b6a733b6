"""Whether an integer that a model computes from fractions of sizes is what its symbolic expression says.

torch combines the numbers of an expression: ``int(n * 0.3 * 0.7)`` becomes ``TruncToInt(0.21 * n)``. Python rounds
after each operation: of 300 the model takes 62, and the expression 63. With one operation, or with operations that are
exact in floats, both are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, Final

import sympy
import torch
from torch import fx

from pipegraph.graph.symbolic_size import ROUNDINGS

_LARGEST: Final = 2**20
"""Numerators and denominators up to this one leave sums and products of them with sizes exact in float64."""


def is_exact(node: fx.Node) -> bool:
    """Return whether the operations on fractions that compute a symbolic integer may be combined."""
    operations = list(_operations(node))
    return len(operations) <= 1 or all(map(_is_exact_operation, operations))


def has_fraction(expression: sympy.Basic) -> bool:
    """Return whether an expression has a float that no function rounds to an integer."""
    if type(expression).__name__ in ROUNDINGS:
        return False
    return bool(getattr(expression, "is_Float", False)) or any(map(has_fraction, expression.args))


def _operations(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the operations whose results are fractions, from a symbolic integer back to the integers before it."""
    waiting, visited = list(node.all_input_nodes), set[fx.Node]()
    while waiting:
        current = waiting.pop()
        if current in visited or not isinstance(current.meta.get("val"), torch.SymFloat):
            continue
        visited.add(current)
        waiting += current.all_input_nodes
        if current.target is not torch.sym_float:
            yield current


def _is_exact_operation(node: fx.Node) -> bool:
    if node.target in (operator.add, operator.sub, operator.mul):
        return all(isinstance(argument, fx.Node) or _is_short(argument) for argument in node.args)
    if node.target is operator.truediv:
        divisor: Any = node.args[1]
        return isinstance(divisor, (int, float)) and divisor != 0 and _is_short(1 / divisor) and _is_short(divisor)
    return False


def _is_short(number: Any) -> bool:
    """Return whether a float has few bits: 0.75, and not 0.3."""
    numerator, denominator = float(number).as_integer_ratio()
    return abs(numerator) <= _LARGEST and denominator <= _LARGEST
