"""Let casts of rotary tables and the like follow the dtype of the buffer behind them."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE

aten = torch.ops.aten

FOLLOWS_BUFFER = "follows_buffer"
"""Key of a node's metadata: it is a cast that says something although it changed nothing at capture."""


def tie_casts_to_buffers(graph: fx.Graph) -> None:
    """Turn the last cast of a value that is computed from buffers alone into ``value.type_as(buffer)``, if it is a cast
    that follows the model's dtype. Casts before it are how the value is computed, in the precision that the model asks
    for.

    A model casts its tables to the dtype of its activations, ``cos.to(x.dtype)``. In a converted model the table's
    buffer has that dtype as well, and is there without an activation. Without marks of `mark_dtypes`, a cast to the
    value's own dtype is taken for one that follows.

    before:  a = cos(table);  b = to(a, torch.float32)       with a float32 buffer ``table``
    after:   a = cos(table);  b = type_as(a, table)          # follows_buffer
    """
    buffers = values_of_buffers(graph)
    leads_to_cast: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in buffers:
            continue
        last = not any(user in leads_to_cast for user in node.users)
        if not _follows(node):
            leads_to_cast |= set() if last else {node}
            continue
        leads_to_cast.add(node)
        buffer = buffers[node]
        if last and buffer is not None and _dtypes(buffer) == _dtypes(node):
            with graph.inserting_before(node):
                cast = graph.call_function(aten.type_as.default, (node.args[0], buffer))
            cast.meta = {**node.meta, FOLLOWS_BUFFER: True, RELATIVE_DTYPE: True}
            node.replace_all_uses_with(cast)
            graph.erase_node(node)


def _follows(node: fx.Node) -> bool:
    """Return whether it is a cast of a float to a dtype that follows the model's."""
    if node.target not in (aten.to.dtype, aten.to.dtype_layout) or not isinstance(node.args[0], fx.Node):
        return False
    if OTHER_DTYPE in node.meta:
        return RELATIVE_DTYPE in node.meta
    before, after = node.args[0].meta["val"], node.meta["val"]
    return bool(after.is_floating_point() and before.dtype == after.dtype)


def _dtypes(node: fx.Node) -> tuple[torch.dtype, torch.dtype | None]:
    """The dtypes of a value in the model as it is and in a converted one."""
    return node.meta["val"].dtype, node.meta.get(OTHER_DTYPE)


def values_of_buffers(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """The values that depend on no parameter and no activation → a buffer of floats that each depends on, if any."""
    found: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if not node.meta["val"].is_floating_point():
                found[node] = None
        elif node.op == "get_attr":
            if node.meta["kind"] != "parameter":
                found[node] = node if node.meta["val"].is_floating_point() else None
        elif node.op == "call_function" and all(parent in found for parent in node.all_input_nodes):
            origins = (found[parent] for parent in node.all_input_nodes)
            found[node] = next((origin for origin in origins if origin is not None), None)
    return found
