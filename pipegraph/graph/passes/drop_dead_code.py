"""Take out operations that nothing reads."""

from __future__ import annotations

from torch import fx


def drop_dead_code(graph: fx.Graph) -> None:
    """Erase operations without readers; writes, and the state and inputs of the model, stay.

    before:  a = add(x, 1);  b = mul(x, 2);  return b
    after:   b = mul(x, 2);  return b
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and "writes" not in node.meta:
            graph.erase_node(node)
