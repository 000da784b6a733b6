"""Gradients of convolutions: two calls, of which I has one and W the other, and one call where both are computed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

convolution_backward: Any = torch.ops.aten.convolution_backward.default

Gradients = Sequence[Tensor | None]
"""Of the input, the weight and the bias of a convolution."""


def separate_gradients(other: Callable[..., Any], *args: Any, **kwargs: Any) -> Gradients:
    """Compute the gradient of a convolution's input, for I, apart from those of its weight and bias, for W.

    This costs nothing: libraries compute the two by separate kernels anyway. ``other`` is what computes one of them.
    """
    *rest, (of_input, of_weight, of_bias) = args
    if not of_input or not (of_weight or of_bias):
        gradients: Gradients = other(*args, **kwargs)
        return gradients
    first, _, _ = convolution_backward(*rest, (True, False, False))
    _, second, third = convolution_backward(*rest, (False, of_weight, of_bias))
    return first, second, third


def join_gradients(module: fx.GraphModule) -> None:
    """Let one call compute what several with the same arguments compute of the gradients of a convolution.

    A graph of both I and W reads the gradient of the output once then. If two calls read it, Inductor writes it twice:
    once as it is computed, and once in the order that convolutions want.
    """
    first: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=convolution_backward):
        own: Any = node.args
        *arguments, mask = own
        earlier = first.setdefault(tuple(map(_hashable, arguments)), node)
        if earlier is not node:
            before: Any = earlier.args
            masks = zip(before[-1], mask, strict=True)
            values = zip(earlier.meta["val"], node.meta["val"], strict=True)
            earlier.args = (*arguments, [one or other for one, other in masks])
            earlier.meta["val"] = tuple(other if one is None else one for one, other in values)
            _move_results(node, earlier)
    module.recompile()


def _move_results(node: fx.Node, earlier: fx.Node) -> None:
    """Let what reads the results of a call read those of an earlier one."""
    for item in list(node.users):
        with node.graph.inserting_after(earlier):
            moved = node.graph.call_function(operator.getitem, (earlier, item.args[1]))
        moved.meta = item.meta
        item.replace_all_uses_with(moved)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
