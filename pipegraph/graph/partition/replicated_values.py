"""Values that a stage makes for itself instead of receiving them: masks, positions, rotary tables."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import fx

from pipegraph.graph.captured import BRANCH, Captured
from pipegraph.graph.nodes import value_bytes

# Making a value costs memory traffic on one device, sending it costs the link between two. Memory is faster than a link
# by 7 (NVLink 4: 450 GB/s of 3.35 TB/s) to 65 (InfiniBand NDR: 50 GB/s) on an H100 (NVIDIA's data sheets), and a sent
# value occupies both ends.
_MEMORY_PER_LINK_BYTE = 16


@lru_cache(maxsize=4)  # asked for once per split point
def parameter_free(captured: Captured) -> frozenset[fx.Node]:
    """The operations that depend on no parameter and no activation, and give the same result on every rank.

    An integer or boolean input of the model (token ids, an attention mask) is not an activation: every rank may
    receive it.
    """
    written = {node.meta["writes"] for node in captured.nodes if "writes" in node.meta}
    free: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            fixed = not node.meta["val"].is_floating_point()
        elif node.op == "get_attr":
            fixed = captured.state[node.target].kind != "parameter"
        else:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            fixed = (
                node.op == "call_function"
                and not random
                and BRANCH not in node.meta
                and free.issuperset(node.all_input_nodes)
            )
        if fixed and node.name not in written and "writes" not in node.meta:
            free.add(node)
    return frozenset(node for node in free if node.op == "call_function")


def replicated_operations(captured: Captured, values: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The operations that make those of ``values`` that are cheaper to make than to send, in the model's order."""
    chosen = {node for value in values for node in replication_of(captured, value)}
    return tuple(node for node in captured.nodes if node in chosen)


def replication_of(captured: Captured, value: fx.Node) -> frozenset[fx.Node]:
    """The operations that make ``value``, if a stage can make it for itself and that is cheaper than receiving it; none
    otherwise."""
    if value not in parameter_free(captured):
        return frozenset()
    budget = _MEMORY_PER_LINK_BYTE * value_bytes(value)
    operations: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in operations:
            operations.add(node)
            budget -= value_bytes(node)
            if budget < 0:
                return frozenset()
            waiting.extend(node.all_input_nodes)
    return frozenset(operations)
