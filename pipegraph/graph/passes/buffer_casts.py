"""Casts of what is computed from buffers alone, such as rotary tables, follow the buffer's dtype.

A model casts its tables to the dtype of its activations, ``cos.to(x.dtype)``. In the graph that is a cast to a fixed
dtype and, where the table has this dtype already, one that does nothing; after ``.to(torch.bfloat16)`` it would be
missing. The table's own buffer is then bfloat16 as well, and needs no activation to be at hand.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from pipegraph.graph.captured import StateEntry

aten = torch.ops.aten

FOLLOWS_BUFFER = "follows_buffer"
"""Marks such a cast in the metadata of a node: it says something, though it changes nothing as captured."""


def tie_casts_to_buffers(graph: fx.Graph, state: Mapping[str, StateEntry]) -> None:
    """Turn the last cast of each such value, where it is one to its own dtype, into ``value.type_as(buffer)``.

    Casts before it are how the table is computed, in the precision that the model asks for.
    """
    buffers = _buffers(graph, state)
    leads_to_cast: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in buffers:
            continue
        last = not any(user in leads_to_cast for user in node.users)
        if not _keeps_dtype(node):
            leads_to_cast |= set() if last else {node}
            continue
        leads_to_cast.add(node)
        like = buffers[node]
        if last and like is not None and like.meta["val"].dtype == node.meta["val"].dtype:
            with graph.inserting_before(node):
                cast = graph.call_function(aten.type_as.default, (node.args[0], like))
            cast.meta = {**node.meta, FOLLOWS_BUFFER: True}
            node.replace_all_uses_with(cast)
            graph.erase_node(node)


def _keeps_dtype(node: fx.Node) -> bool:
    """Whether it is a cast of a float to the dtype that it has."""
    if node.target not in (aten.to.dtype, aten.to.dtype_layout) or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]
    return bool(after.is_floating_point() and before.dtype == after.dtype)


def _buffers(graph: fx.Graph, state: Mapping[str, StateEntry]) -> dict[fx.Node, fx.Node | None]:
    """The values that depend on no parameter and no activation, and a buffer of floats that each depends on, if any."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if not node.meta["val"].is_floating_point():
                found[node] = None
        elif node.op == "get_attr":
            if state[node.target].kind != "parameter":
                found[node] = node if state[node.target].dtype.is_floating_point else None
        elif node.op == "call_function" and all(parent in found for parent in node.all_input_nodes):
            origins = (found[parent] for parent in node.all_input_nodes)
            found[node] = next((origin for origin in origins if origin is not None), None)
    return found
