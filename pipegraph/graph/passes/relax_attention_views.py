"""Let views of attention's result take any layout of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def relax_attention_views(graph: fx.Graph) -> None:
    """Turn a ``view`` of attention's result into ``reshape``, which takes any layout.

    The kernel that attention calls decides how its result lies in memory, and another device, dtype or mode calls
    another one. A ``contiguous()`` in the model's code is not in the graph if it did nothing at capture.

    before:  a = scaled_dot_product_attention(q, k, v);  b = transpose(a, 1, 2);  c = view(b, [2, 8, 512])
    after:   a = scaled_dot_product_attention(q, k, v);  b = transpose(a, 1, 2);  c = reshape(b, [2, 8, 512])
    """
    for node in graph.nodes:
        if node.target is aten.view.default and _is_attention(node.args[0]):
            node.target = aten.reshape.default


def _is_attention(node: Any) -> bool:
    while node.target in (aten.transpose.int, aten.permute.default):
        node = node.args[0]
    return bool(node.target is aten.scaled_dot_product_attention.default)
