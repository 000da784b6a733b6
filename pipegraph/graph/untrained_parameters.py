"""Parameters that the model itself does not always train, though they require a gradient."""

from __future__ import annotations

from torch import fx

from pipegraph.graph.captured import BRANCH, Captured


def untrained_parameters(captured: Captured) -> frozenset[str]:
    """The trainable parameters from which no gradient flows to some output of the model, by each of their names.

    A loss need not use all outputs, so that only the others get a gradient from every loss. What runs in one mode alone
    does not count.
    """
    (end,) = captured.graph.find_nodes(op="output")
    outputs = [node for node in end.all_input_nodes if node.meta.get("requires_grad", False)]
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
    found: set[str] = set()
    seen = {output}
    waiting = [output]
    while waiting:
        node = waiting.pop()
        if node.op == "get_attr":
            found.add(str(node.target))
        elif BRANCH not in node.meta:
            new = [each for each in node.all_input_nodes if each not in seen and each.meta.get("requires_grad", False)]
            seen.update(new)
            waiting += new
    return found
