"""Take out changes of shape that change nothing."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.internals import is_view
from pipegraph.graph.nodes import any_layout, replace_node, shape_of
from pipegraph.graph.operators import View, operator_of


def cancel_views(graph: fx.Graph) -> None:
    """Take out a reshape to the shape that is there, and two views of which the second undoes the first.

    before:  a = transpose(x, 1, 2);  b = transpose(a, 1, 2);  c = view(b, [8, 64])      with x [8, 64]
    after:   x in the place of c
    """
    for node in list(graph.nodes):
        view, before = operator_of(node).view, node.args[0] if node.args else None
        if view is None or not isinstance(before, fx.Node):
            continue
        if view is View.RESHAPE and shape_of(before) == shape_of(node):
            same = before
        elif operator_of(before).view is not None and _is_undone(before, node):
            same = before.args[0]  # type: ignore[assignment]
        else:
            continue
        if is_stable(node):
            replace_node(node, same)


def _is_undone(first: fx.Node, second: fx.Node) -> bool:
    """Return whether every element is where it was before the first view."""
    if shape_of(first.args[0]) != shape_of(second):
        return False
    tensor = torch.empty(shape_of(first.args[0]), device="meta")
    after = any_layout(second)(any_layout(first)(tensor, *first.args[1:]), *second.args[1:])
    return bool(after.shape == tensor.shape and after.stride() == tensor.stride() and is_view(after))
