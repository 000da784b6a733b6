"""The spellings of operators: how a call of an operator becomes an expression of Python.

The column ``spelling`` of ``graph/operators.py`` names the spelling of an operator. ``x + y``, ``-x``, ``x.T`` and
``F.logsigmoid`` are read as they are, with any operator, attribute or function of the same arguments. Every other
spelling is a function, here in ``SPELLINGS``, in ``function_spellings`` or in ``pool_spellings``; it returns None for a
call that it cannot express. "F.name" needs no function, and ``operation`` writes ``x[indices] = y``.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.expressions.function_spellings import FUNCTION_SPELLINGS, Spelling, interpolate
from pipegraph.codegen.expressions.operator_call import OperatorCall
from pipegraph.codegen.expressions.pool_spellings import POOL_SPELLINGS
from pipegraph.codegen.expressions.reshapes import (
    expand_sizes,
    flatten_dims,
    reshape_sizes,
    shortest_reshape,
    squeezed_first,
)
from pipegraph.codegen.syntax.expressions import (
    ATOM,
    Attribute,
    Binary,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Slice,
    Subscript,
    TensorSubscript,
    literal,
    method,
    unary,
)
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.operators import operator_of

aten = torch.ops.aten


def spelling_function(spelling: str) -> Spelling | None:
    """The function of a spelling; None if it has none."""
    match spelling.split():
        case ["interpolate", mode, *options]:
            return partial(interpolate, mode=mode, antialias=bool(options))
        case ["x", symbol, "y"]:
            return partial(_binary, symbol=symbol)
        case ["y", symbol, "x"]:
            return partial(_binary, symbol=symbol, swapped=True)
        case ["-x" | "~x"]:
            return partial(_unary, symbol=spelling[0])
    if spelling.startswith("x.") and spelling.removeprefix("x.").isidentifier():
        return partial(_attribute, name=spelling.removeprefix("x."))
    if spelling.startswith(("torch.", "F.")) and spelling.split(".")[1].isidentifier() and spelling != "F.name":
        return partial(_renamed, name=spelling)
    return SPELLINGS.get(spelling)


# ---- operators -------------------------------------------------------------------------------------------------------


def _binary(operator: OperatorCall, symbol: str, swapped: bool = False) -> Expression | None:
    if set(operator.arguments) - {"self", "other", "exponent", "mat2"}:
        return None
    left_operand, right = map(operator.expression, operator.arguments.values())
    return Binary(symbol, right, left_operand) if swapped else Binary(symbol, left_operand, right)


def _unary(operator: OperatorCall, symbol: str) -> Expression:
    operand = operator.expression(operator.arguments["self"])
    if operand.within(ATOM).startswith(f"({symbol}"):
        return method(operand, operator.name)
    return unary(symbol, operand)


def _attribute(operator: OperatorCall, name: str) -> Expression:
    return Attribute(operator.expression(operator.arguments["self"]), name)


def _renamed(operator: OperatorCall, name: str) -> Expression:
    return operator.function(name, *operator.arguments.values())


# ---- subscripts ------------------------------------------------------------------------------------------------------


def _slice(operator: OperatorCall) -> Expression | None:
    start, end, step = (operator.arguments.get(name) for name in ("start", "end", "step"))
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    stop = None if end is None or end >= 2**62 else operator.expression(end)
    bounds = Slice(operator.expression(start) if start else None, stop, literal(step) if step is not None else None)
    return _subscript(operator, operator.arguments.get("dim", 0), bounds)


def _select(operator: OperatorCall) -> Expression:
    return _subscript(operator, operator.arguments["dim"], operator.expression(operator.arguments["index"]))


def _subscript(operator: OperatorCall, dim: int, index: Expression) -> Expression:
    """``x[:, index]``, or ``x[..., index]`` for the last of three or more dimensions; ``x[:, :n, index]`` of
    ``x[:, :n]``."""
    size = len(operator.shapes[0])
    owner, dims = operator.expression(operator.node.args[0]), [*range(size)]
    indices: list[Expression] = [Slice() for _ in dims]
    if isinstance(owner, TensorSubscript):
        inner = owner.of_dimensions(size)
        remaining_dims = [at for at, inner_index in enumerate(inner) if isinstance(inner_index, Slice)]
        if inner[remaining_dims[dim]] == Slice():
            owner, indices, dims = owner.owner, inner, remaining_dims
    indices[dims[dim]] = index
    while len(indices) > 1 and indices[-1] == Slice():
        indices.pop()
    leading_count = len(indices) - 1
    if leading_count >= 2 and leading_count == dims[-1] and indices[:-1] == [Slice()] * leading_count:
        indices[:-1] = [literal(...)]
    return TensorSubscript(owner, tuple(indices))


def index(operator: OperatorCall) -> Subscript | None:
    """``x[:, positions]``."""
    indices = [Slice() if node is None else _index(operator.expression(node)) for node in operator.arguments["indices"]]
    while indices and indices[-1] == Slice():
        indices.pop()
    return Subscript(operator.expression(operator.arguments["self"]), tuple(indices)) if indices else None


def _stack(operator: OperatorCall) -> Expression | None:
    """``[1, 0]`` for numbers that are a list of indices; any other stack is the function."""
    arguments = operator.arguments
    parts = [node for node in arguments["tensors"] if node.target is aten.full.default and not shape_of(node)]
    is_list = len(parts) == len(arguments["tensors"]) and "dim" not in arguments
    if not is_list or any(
        operator_of(user).spelling not in ("index", "x[indices] = y") for user in operator.node.users
    ):
        return None
    return literal([node.args[1] for node in parts])


def _index(value: Expression) -> Expression:
    """``[-1]`` for ``torch.full((1,), -1)``."""
    if not isinstance(value, FunctionCall) or value.function != Name("torch.full"):
        return value
    shape, number, *_ = value.arguments
    return Collection((number.value,), "[]") if shape.value == literal((1,)) else value


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reshape(operator: OperatorCall) -> Expression | None:
    """``x.unflatten(-1, (-1, 64))``, or ``x.view(…)`` with its sizes."""
    owner, *dim, sizes = operator.arguments.values()
    if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
        return None
    shape, new_shape = operator.shapes
    if dim:  # an unflatten in the model's source
        position = dim[0] % len(shape)
        sizes = [*shape[:position], *sizes, *shape[position + 1 :]]
    method_call = shortest_reshape(shape, new_shape, sizes)
    if method_call is None and (two := squeezed_first(shape, new_shape, sizes)) is not None:
        squeeze, (name, arguments) = two
        squeezed = operator.method(owner, "squeeze", *squeeze)
        return method(squeezed, name, *map(operator.expression, arguments))
    in_full: list[Any] = [*reshape_sizes(shape, new_shape, sizes)]
    name, arguments = method_call or (operator.name, in_full or [()])
    return operator.method(owner, name, *arguments)


def _flatten(operator: OperatorCall) -> Expression | None:
    arguments = operator.arguments
    if "out_dim" in arguments:
        return None
    dims = flatten_dims(arguments.get("start_dim", 0), arguments.get("end_dim", -1), operator.shapes[0])
    return operator.method(arguments["self"], "flatten", *dims)


def _expand(operator: OperatorCall) -> Expression:
    sizes: list[Any] = [*expand_sizes(*operator.shapes)]
    return operator.method(operator.arguments["self"], "expand", *(sizes or [()]))


def _split(operator: OperatorCall) -> Expression:
    """``x.split([2, 3], dim=1)``."""
    named = dict(operator.arguments)
    return operator.method(named.pop("self"), "split", named.pop("split_sizes"), **named)


SPELLINGS: dict[str, Spelling] = {
    **FUNCTION_SPELLINGS,
    **POOL_SPELLINGS,
    "slice": _slice,
    "select": _select,
    "index": index,
    "stack": _stack,
    "reshape": _reshape,
    "flatten": _flatten,
    "expand": _expand,
    "split": _split,
}
