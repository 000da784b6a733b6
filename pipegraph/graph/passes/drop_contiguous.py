"""Take out ``contiguous()`` before an operation that copies anyway."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.nodes import any_layout, on_meta, replace_node
from pipegraph.graph.operators import View, operator_of


def drop_contiguous(graph: fx.Graph) -> None:
    """Take out ``.contiguous()`` if only reshapes read it, which copy if they have to.

    before:  a = contiguous(x);  b = view(a, [8, 512])       with x [8, 64, 8], transposed
    after:   b = reshape(x, [8, 512])
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.contiguous.default or len(node.args) > 1 or node.kwargs:
            continue
        users, source = list(node.users), node.args[0]
        if all(_copies_anyway(user, source) for user in users) and is_stable(node):
            for user in users:
                user.target = any_layout(user)
            replace_node(node, source)


def _copies_anyway(node: fx.Node, source: object) -> bool:
    """Return whether a reshape gives contiguous memory although what it reads is not."""
    if operator_of(node).view is not View.RESHAPE:
        return False
    assert isinstance(source, fx.Node)
    return bool(any_layout(node)(on_meta(source), *node.args[1:]).is_contiguous())
