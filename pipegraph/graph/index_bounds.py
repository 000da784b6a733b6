"""Which numbers may index a tensor, and the sizes at which a range of positions is longer than the table it indexes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from pipegraph.graph.nodes import shape_of
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import OpOverload, operator_name

aten = torch.ops.aten

# Operators with the arguments (tensor, dimension, index along it).
_ALONG = {"gather", "index_select", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"}


def index_bound(node: fx.Node) -> int | None:
    """The smallest exclusive upper bound over everything that an integer input indexes; None if it indexes nothing.

    Of a dynamic size it is the number at capture.
    """
    bounds: list[int] = []
    waiting, visited = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            bounds += _bounds(user, current)
            if operator_of(user).keeps_values and user not in visited:
                visited.add(user)
                waiting.append(user)
    return min(map(int, bounds), default=None)


def _bounds(user: fx.Node, index: fx.Node) -> list[int]:
    args: tuple[Any, ...] = user.args
    shape = shape_of(args[0]) if args and isinstance(args[0], fx.Node) else ()
    if not shape:
        return []
    if user.target is aten.embedding.default and args[1] is index:
        return [shape[0]]
    if user.target is aten.index.Tensor:
        return [shape[dim] for dim, dim_index in enumerate(args[1]) if dim_index is index]
    if len(args) > 2 and args[2] is index and _name(user) in _ALONG:
        return [shape[args[1]]]
    if user.target is aten.take_along_dim.default and args[1] is index and len(args) > 2:
        return [shape[args[2]]]
    if user.target is aten.one_hot.default and len(args) > 1 and args[1] > 0:
        return [args[1]]
    if user.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default) and args[1] is index:
        return [shape[min(1, len(shape) - 1)]]
    return []


class RangeLimit(NamedTuple):
    """A range of positions, ``torch.arange(tokens.shape[1])``, and the table that it indexes.

    Attributes:
        length: how many rows of the table are read, as an expression of dynamic sizes: the last position and 1.
        rows: how many rows the table has.
        node: what reads the table.
    """

    length: sympy.Expr
    rows: int
    node: fx.Node

    @property
    def relation(self) -> sympy.Basic:
        """The largest size for which the table has enough rows: ``tokens_1 <= 64``.

        It is ``True`` if the length is fixed, or is not a multiple of one size plus a constant.
        """
        sizes = tuple(self.length.free_symbols)
        if len(sizes) != 1 or not self.length.is_polynomial(*sizes) or sympy.degree(self.length, *sizes) != 1:
            return sympy.true
        factor, constant = self.length.coeff(*sizes), self.length.as_coeff_Add()[0]
        return sympy.Le(*sizes, (self.rows - constant) // factor) if factor > 0 else sympy.true


def range_limits(graph: fx.Graph) -> Iterator[RangeLimit]:
    """The tables of a fixed number of rows that ranges index, directly or moved by a number, ``positions + 2``.

    ``torch.export`` notes no such limit, because it depends on values.
    """
    for target, end in ((aten.arange.default, 0), (aten.arange.start, 1), (aten.arange.start_step, 1)):
        for start in graph.find_nodes(op="call_function", target=target):
            if start.args[2:] in ((), (1,)):  # in steps of 1
                yield from _limits_of(start, start.args[end])


def _limits_of(start: fx.Node, end: Any) -> Iterator[RangeLimit]:
    """The tables that a range to ``end`` indexes."""
    if not isinstance(end, int):
        return
    waiting = [(start, end.expression if isinstance(end, SymbolicSize) else sympy.Integer(end))]
    while waiting:
        current, length = waiting.pop()
        for user in current.users:
            for rows in _bounds(user, current):
                if not isinstance(rows, SymbolicSize):
                    yield RangeLimit(length, rows, user)
            if _keeps_all_values(user):
                waiting.append((user, length))
            elif user.target in (aten.add.Tensor, aten.add.Scalar) and user.args[0] is current:
                moved = user.args[1]
                if isinstance(moved, int) and not user.kwargs:
                    waiting.append((user, length + (moved.expression if isinstance(moved, SymbolicSize) else moved)))


def _keeps_all_values(node: fx.Node) -> bool:
    """Return whether every element of the first argument is one of the result, and no others are."""
    return operator_of(node).keeps_values and node.target not in (aten.slice.Tensor, aten.select.int)


def _name(node: fx.Node) -> str:
    return operator_name(node.target)[0] if isinstance(node.target, OpOverload) else ""
