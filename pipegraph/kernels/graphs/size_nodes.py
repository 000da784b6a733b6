"""The nodes of a graph that compute sizes. They read sizes alone: every graph computes those that it needs again.

A size is never saved for the backward, and no tensor is kept because its size is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from pipegraph.kernels.symbolic.internals import evaluate, expression, is_symbolic
from pipegraph.kernels.symbolic.symbolic_sizes import SymbolicSizes


def is_size(node: fx.Node) -> bool:
    """Return whether a node is a size, or computed from sizes."""
    return is_symbolic(node.meta.get("val"))


def compute_from_sizes(graph: fx.Graph, sizes: SymbolicSizes) -> None:
    """Let every size in a graph be computed from the graph's first placeholders, the sizes, instead of from tensors."""
    placeholders = graph.find_nodes(op="placeholder")[: len(sizes)]
    of_tensors = [node for node in graph.nodes if is_size(node) and not all(map(is_size, node.all_input_nodes))]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for node in of_tensors:
        with graph.inserting_before(first):
            (value,) = size_nodes(graph, [node.meta["val"]], sizes, placeholders)
        if isinstance(value, fx.Node):
            node.replace_all_uses_with(value)
        for user in list(node.users):  # of a size that turned out to be a number
            user.args = fx.node.map_arg(user.args, partial(_instead, {node: value}))
            user.kwargs = fx.node.map_arg(user.kwargs, partial(_instead, {node: value}))
        graph.erase_node(node)


def size_nodes(
    graph: fx.Graph, values: Sequence[Any], sizes: SymbolicSizes, placeholders: Sequence[fx.Node]
) -> list[Any]:
    """Return sizes as arguments of a node: numbers, or nodes that are computed from the placeholders.

    Args:
        graph: to which the nodes are added, where it is inserting.
        values: numbers and symbolic values.
        sizes: their symbols.
        placeholders: of the graph, one for each symbol.
    """
    before = set(graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in zip(sizes.symbols, placeholders, strict=True)}
    found = [evaluate(expression(value), proxies) for value in values]
    for node in graph.nodes:
        if node not in before:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)
    return [each.node if isinstance(each, fx.Proxy) else each for each in found]


def _instead(values: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return values.get(node, node)
