"""How values lie in memory, where that is not the model's to say."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def relax_attention_views(graph: fx.Graph) -> None:
    """graph → graph: a ``view`` of what attention gave becomes ``reshape``, which takes any layout.

    The kernel that attention calls decides how its result lies in memory, and another device, dtype or mode calls
    another one. A ``contiguous()`` in the model's code is not in the graph if it did nothing when it was captured.
    """
    for node in graph.nodes:
        if node.target is aten.view.default and _is_attention(node.args[0]):
            node.target = aten.reshape.default


def any_layout(node: fx.Node) -> Any:
    """The operation of a node, or for a ``view`` the ``reshape`` that takes any layout."""
    return aten.reshape.default if node.target is aten.view.default else node.target


def _is_attention(node: Any) -> bool:
    while node.target in (aten.transpose.int, aten.permute.default):
        node = node.args[0]
    return bool(node.target is aten.scaled_dot_product_attention.default)
