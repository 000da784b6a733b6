"""Sizes: dimensions of tensors that may vary, and expressions of them."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Annotated, Final

from msgspec import Meta

from pipegraph.errors import PackageError, nearest
from pipegraph.package.json_file import Count, Entry

LONGEST_EXPRESSION: Final = 1000
"""Characters. A sum of this length is nested as deep as Python's recursion limit allows."""

Dimension = Count | Annotated[str, Meta(min_length=1, max_length=LONGEST_EXPRESSION)]
"""A number, or an expression of sizes: ``"seq // 4"``."""

BATCH: Final = "batch"
"""The size along which a batch is cut into microbatches."""

Condition = Annotated[str, Meta(min_length=1, max_length=LONGEST_EXPRESSION)]
"""A comparison of two expressions of sizes: ``"images_2 % 4 == 0"``."""

_COMPARISONS: Final[dict[type[ast.cmpop], Callable[[float, float], bool]]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_OPERATORS: Final[dict[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Final[dict[str, Callable[[float, float], float]]] = {"min": min, "max": max}
_ROUNDINGS: Final[dict[str, Callable[[float], int]]] = {
    "int": int,
    "round": round,
    "math.floor": math.floor,
    "math.ceil": math.ceil,
}


class Size(Entry, frozen=True):
    """A size: what it was at capture, and between what it may lie."""

    captured: Count
    min: Count = 0
    max: Count | None = None


def evaluate(dimension: int | str, sizes: Mapping[str, int]) -> int:
    """Return a dimension as a number.

    Args:
        dimension: a number, or an expression of names, numbers, parentheses, signs, ``+ - * / //``, ``%``, ``min`` and
            ``max``, and of whole numbers of fractions: ``int``, ``round``, ``math.floor`` and ``math.ceil``.
        sizes: name → number.

    Raises:
        PackageError: it is not such an expression, or names a size that is not among ``sizes``.
    """
    if isinstance(dimension, int):
        return dimension
    try:
        number = _evaluate(ast.parse(dimension.strip(), mode="eval").body, sizes)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        raise PackageError(f'"{dimension}" is not an expression of sizes') from None
    if number < 0 or not isinstance(number, int):
        raise PackageError(f'"{dimension}" is {number} with {dict(sizes)}')
    return number


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Return whether a condition holds. Raises PackageError if it is not a comparison, or names an unknown size."""
    try:
        match ast.parse(condition.strip(), mode="eval").body:
            case ast.Compare(left=left_operand, ops=[how], comparators=[right]) if type(how) in _COMPARISONS:
                return _COMPARISONS[type(how)](_evaluate(left_operand, sizes), _evaluate(right, sizes))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        pass
    raise PackageError(f'"{condition}" is not a comparison of sizes')


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> float:
    match node:
        case ast.Constant(value=value) if type(value) in (int, float):
            return value  # type: ignore[return-value]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, sizes)
        case ast.Name(id=name):
            if name not in sizes:
                names = ", ".join(sizes) or "none"
                raise PackageError(f'there is no size "{name}".{nearest(name, sizes)} There are: {names}')
            return sizes[name]
        case ast.BinOp(left=left_operand, op=how, right=right) if type(how) in _OPERATORS:
            return _OPERATORS[type(how)](_evaluate(left_operand, sizes), _evaluate(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=[first, *arguments], keywords=[]) if name in _FUNCTIONS:
            return reduce(_FUNCTIONS[name], (_evaluate(expression, sizes) for expression in (first, *arguments)))
        case ast.Call(func=function, args=[argument], keywords=[]) if ast.unparse(function) in _ROUNDINGS:
            return _ROUNDINGS[ast.unparse(function)](_evaluate(argument, sizes))
    raise ValueError(type(node).__name__)
