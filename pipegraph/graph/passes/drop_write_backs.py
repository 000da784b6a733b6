"""Take out the second half of an augmented assignment to a part of a tensor."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.aliasing import is_view, written_by


def drop_write_backs(graph: fx.Graph) -> None:
    """Erase what Python adds to ``x[0] += y``: the sum, already written into ``x[0]``, is assigned to ``x[0]``.

    before:  a = select(x, 0, 0);  b = add_(a, y);  c = select(x, 0, 0);  copy_(c, b)
    after:   a = select(x, 0, 0);  b = add_(a, y);  c = select(x, 0, 0)
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        view, value = node.args[:2]
        if not isinstance(view, fx.Node) or not isinstance(value, fx.Node):
            continue
        before = node.prev.prev if node.prev is view else node.prev
        written = written_by(value)
        if value is before and written and is_view(view) and _call(view) == _call(written[0]):
            graph.erase_node(node)


def _call(node: fx.Node) -> object:
    return node.target, node.args, node.kwargs
