"""Through which values a gradient flows, and to which parameters not from every output."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipegraph.graph.aliasing import shared_memory, written_by
from pipegraph.graph.captured import BRANCH, Captured
from pipegraph.graph.nodes import label_of
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.pytrees import pytree


def mark_gradients(graph: fx.Graph) -> None:
    """Set ``meta["requires_grad"]`` and ``meta["cut_off"]`` of every operation.

    ``requires_grad``: a parameter's gradient flows through the value. ``cut_off``: only a ``no_grad`` block keeps one
    from it. State carries its own flag already; inputs of the model get no gradient. A write hands the flag on to all
    values in the same memory: ``z = torch.zeros(3)`` has a gradient after ``z[0] = x``.

    before:  h = linear(x, weight);  d = detach(h);  z = mul(d, h)
    after:   h = linear(x, weight)   # requires_grad
             d = detach(h)
             z = mul(d, h)           # requires_grad
    """
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            node.meta.setdefault("requires_grad", False)
            continue
        enabled = [settings[0] for kind, settings in node.meta["regions"] if kind == "grad"]
        inside = not enabled or enabled[-1]
        row = operator_of(node)
        node.meta["requires_grad"] = (
            inside
            and not row.detaches
            and not row.factory
            and _differentiable(node.meta["val"])
            and any(parent.meta["requires_grad"] or parent in written for parent in node.all_input_nodes)
        )
        if node.meta["requires_grad"] and written_by(node):
            written |= shared_memory(node, beyond_detach=False)
            for written_node in written:
                if written_node.op == "call_function" and _differentiable(written_node.meta["val"]):
                    written_node.meta["requires_grad"] = True
        parents = [parent.meta["requires_grad"] or parent.meta.get("cut_off", False) for parent in node.all_input_nodes]
        node.meta["cut_off"] = not inside and any(parents)


def _differentiable(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_differentiable(part) for part in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def untrained_parameters(captured: Captured) -> frozenset[str]:
    """The trainable parameters from which no gradient flows to some output of the model, by each of their names.

    A loss need not use all outputs, so that only the others get a gradient from every loss. What runs in one mode alone
    does not count.
    """
    labels = {label for label in pytree.tree_leaves(captured.outputs) if label is not None}
    returned = [node for node in captured.returned if label_of(node) in labels]
    outputs = [node for node in returned if node.meta.get("requires_grad", False)]
    reached = [_sources(output) for output in outputs]
    trained = set.intersection(*reached) if reached else set()
    names = captured.names_of
    return frozenset(
        name
        for entry in captured.state.values()
        if entry.kind == "parameter" and entry.requires_grad and entry.canonical not in trained
        for name in names[entry.canonical]
    )


def _sources(output: fx.Node) -> set[str]:
    """The state from which a gradient flows to a value."""
    state_names: set[str] = set()
    visited = {output}
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr":
            state_names.add(str(node.target))
        elif BRANCH not in node.meta:
            new = [arg for arg in node.all_input_nodes if arg not in visited and arg.meta.get("requires_grad", False)]
            visited.update(new)
            waiting += new
    return state_names
