"""Upper bounds for the values of integer inputs, from the sizes that they index."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipegraph.graph.internals import OpOverload, operator_name
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.operators import operator_of

aten = torch.ops.aten

# Operators with the arguments (tensor, dimension, index along it).
_INDEXED_ALONG = frozenset(
    {"gather", "index_select", "index_add", "index_copy", "scatter", "scatter_add", "scatter_reduce"}
)


def index_bound(node: fx.Node) -> int | None:
    """The smallest exclusive upper bound over everything that an integer input indexes; None if it indexes nothing.

    Of a size that varies it is the number at capture.
    """
    bounds: list[int] = []
    waiting, seen = [node], {node}
    while waiting:
        current = waiting.pop()
        for user in current.users:
            bounds += _bounds(user, current)
            if operator_of(user).keeps_values and user not in seen:
                seen.add(user)
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
        return [shape[dim] for dim, each in enumerate(args[1]) if each is index]
    if len(args) > 2 and args[2] is index and _name(user) in _INDEXED_ALONG:
        return [shape[args[1]]]
    if user.target is aten.take_along_dim.default and args[1] is index and len(args) > 2:
        return [shape[args[2]]]
    if user.target is aten.one_hot.default and len(args) > 1 and args[1] > 0:
        return [args[1]]
    if user.target in (aten.cross_entropy_loss.default, aten.nll_loss_nd.default) and args[1] is index:
        return [shape[min(1, len(shape) - 1)]]
    return []


def _name(node: fx.Node) -> str:
    return operator_name(node.target)[0] if isinstance(node.target, OpOverload) else ""
