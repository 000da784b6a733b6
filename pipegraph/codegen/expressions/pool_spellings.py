"""The spellings of operators with another form in ``torch.nn.functional``: of pools and bags, which return indices as
well, and of products of groups."""

from __future__ import annotations

import operator as python_operator
from collections.abc import Sequence
from typing import Any

import sympy

from pipegraph.codegen.expressions.function_spellings import Spelling
from pipegraph.codegen.expressions.operator_call import OperatorCall
from pipegraph.codegen.syntax.expressions import Collection, Expression, call
from pipegraph.graph.symbolic_size import SymbolicSize

# The names that arguments have in torch.nn.functional, if they have others there.
_RENAMED = {"random_samples": "_random_samples"}
_MODES = ("sum", "mean", "max")


def _reads_first(operator: OperatorCall) -> bool:
    """Return whether only the first result is read."""
    return all(user.target is python_operator.getitem and user.args[1] == 0 for user in operator.node.users)


def _call(operator: OperatorCall, name: str, positional: Sequence[Any], **named: Any) -> Expression:
    expressions = {keyword: operator.expression(value) for keyword, value in named.items()}
    return call(f"F.{name}", *map(operator.expression, positional), **expressions)


def _max_pool(operator: OperatorCall) -> Expression:
    """``F.adaptive_max_pool2d(x, 3)``, with ``return_indices=True`` if the indices are read."""
    named = {_RENAMED.get(name, name): _short(value) for name, value in operator.arguments.items()}
    positional = [named.pop(name) for name in ("self", "kernel_size", "output_size") if name in named]
    if "kernel_size" in operator.arguments and "output_size" in operator.arguments:
        named = {"output_size": positional.pop(), **named}
    name = operator.name.removesuffix("_with_indices")
    if _reads_first(operator):
        return Collection((_call(operator, name, positional, **named),), "()")
    return _call(operator, name, positional, **named, return_indices=True)


def _short(value: Any) -> Any:
    """``3`` for ``[3, 3]``, and a tuple for any other list."""
    if not isinstance(value, list) or not value:
        return value
    is_uniform = all(size == value[0] for size in value) and not any(isinstance(size, SymbolicSize) for size in value)
    return value[0] if is_uniform else tuple(value)


def _max_unpool(operator: OperatorCall) -> Expression | None:
    """``F.max_unpool2d(x, indices, 2)``, with ``output_size=…`` if that is no multiple of the size of ``x``.

    The operator has no windows: any do that lead to its output size.
    """
    arguments = operator.arguments
    shape, _ = operator.shapes
    sizes = list(arguments["output_size"])
    pairs = list(zip(shape[-len(sizes) :], sizes, strict=True))
    windows = [int(size) // int(input_size) for input_size, size in pairs]
    if not all(int(size) % int(input_size) < window for (input_size, size), window in zip(pairs, windows, strict=True)):
        return None  # the function takes no such size
    exact = (_is_multiple(size, input_size, window) for (input_size, size), window in zip(pairs, windows, strict=True))
    named = {} if all(exact) else {"output_size": tuple(sizes)}
    return _call(operator, operator.name, [arguments["self"], arguments["indices"], _short(windows)], **named)


def _is_multiple(size: int, base: int, window: int) -> bool:
    """Return whether one size is always so many times another one."""
    total, unit = (term.expression if isinstance(term, SymbolicSize) else sympy.Integer(term) for term in (size, base))
    return bool(sympy.simplify(total - unit * window) == 0)


def _embedding_bag(operator: OperatorCall) -> Expression | None:
    """``F.embedding_bag(tokens, weight, offsets, mode="sum")``, if only the bags are read."""
    named = dict(operator.arguments)
    if not _reads_first(operator):
        return None
    positional = [named.pop(name) for name in ("indices", "weight", "offsets")]
    mode, ignored = _MODES[named.pop("mode", 0)], named.pop("padding_idx", None)
    named = {"mode": mode, **{name: value for name, value in named.items() if value not in (None, False)}}
    named |= {"padding_idx": ignored} if ignored is not None and ignored >= 0 else {}
    return Collection((_call(operator, "embedding_bag", positional, **named),), "()")


def _grouped_mm(operator: OperatorCall) -> Expression:
    """``F.grouped_mm(x, weight, offs=offsets)``."""
    named = dict(operator.arguments)
    return _call(operator, "grouped_mm", [named.pop("self"), named.pop("mat2")], **named)


POOL_SPELLINGS: dict[str, Spelling] = {
    "max_pool": _max_pool,
    "max_unpool": _max_unpool,
    "embedding_bag": _embedding_bag,
    "grouped_mm": _grouped_mm,
}
