"""Take out the checks that ``torch.export`` adds."""

from __future__ import annotations

from torch import fx

from pipegraph.graph.operators import operator_of


def drop_assertions(graph: fx.Graph) -> None:
    """Erase assertions: they keep values alive and say nothing to a reader.

    before:  _assert_tensor_metadata(x, None, None, torch.float32);  y = to(x, torch.float64)
    after:   y = to(x, torch.float64)
    """
    for node in reversed(graph.nodes):
        if operator_of(node).check:
            graph.erase_node(node)
