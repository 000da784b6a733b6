"""One call for all gradients of a convolution: where I and W are computed together, two calls are one again."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

convolution_backward: Any = torch.ops.aten.convolution_backward.default


def join_gradients(module: fx.GraphModule) -> None:
    """Let one call compute what several with the same arguments compute of the gradients of a convolution.

    One that returns the input's gradient is for I, one that returns those of weight and bias for W. A graph of both
    reads the gradient of the output once then. If two calls read it, Inductor writes it twice: once as it is computed,
    and once in the order that convolutions want.
    """
    graph, first = module.graph, dict[Any, fx.Node]()
    for node in graph.find_nodes(op="call_function", target=convolution_backward):
        *arguments, mask = node.args
        key = tuple(map(_hashable, arguments))
        earlier = first.setdefault(key, node)
        if earlier is node:
            continue
        *_, before = earlier.args
        earlier.args = (*arguments, [one or other for one, other in zip(before, mask, strict=True)])  # type: ignore
        earlier.meta["val"] = tuple(
            one if one is not None else other for one, other in zip(earlier.meta["val"], node.meta["val"], strict=True)
        )
        _move_results(graph, node, earlier)
    module.recompile()


def _move_results(graph: fx.Graph, node: fx.Node, earlier: fx.Node) -> None:
    """Let what reads the results of a call read those of an earlier one."""
    for item in list(node.users):
        with graph.inserting_after(earlier):
            moved = graph.call_function(operator.getitem, (earlier, item.args[1]))
        moved.meta = item.meta
        item.replace_all_uses_with(moved)
        graph.erase_node(item)
    graph.erase_node(node)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
