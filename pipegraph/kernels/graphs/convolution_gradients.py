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


def separate_gradients(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Gradients:
    """Compute the gradient of a convolution's input, for I, apart from those of its weight and bias, for W.

    This costs nothing: libraries compute the two by separate kernels anyway. ``compute`` is what computes one of them.
    """
    *operands, (of_input, of_weight, of_bias) = args
    if not of_input or not (of_weight or of_bias):
        gradients: Gradients = compute(*args, **kwargs)
        return gradients
    first, _, _ = convolution_backward(*operands, (True, False, False))
    _, second, third = convolution_backward(*operands, (False, of_weight, of_bias))
    return first, second, third


def join_gradients(module: fx.GraphModule) -> None:
    """Let one call compute what several with the same arguments compute of the gradients of a convolution.

    A graph of both I and W reads the gradient of the output once then. If two calls read it, Inductor writes it twice:
    once as it is computed, and once in the order that convolutions want.
    """
    first: dict[Any, fx.Node] = {}
    for node in module.graph.find_nodes(op="call_function", target=convolution_backward):
        args: Any = node.args
        *arguments, mask = args
        first_call = first.setdefault(tuple(map(_hashable, arguments)), node)
        if first_call is not node:
            first_args: Any = first_call.args
            masks = zip(first_args[-1], mask, strict=True)
            values = zip(first_call.meta["val"], node.meta["val"], strict=True)
            first_call.args = (*arguments, [in_first or in_second for in_first, in_second in masks])
            first_call.meta["val"] = tuple(val if first_val is None else first_val for first_val, val in values)
            _move_results(node, first_call)
    module.recompile()


def _move_results(node: fx.Node, first_call: fx.Node) -> None:
    """Let what reads the results of a call read those of an earlier one."""
    for item in list(node.users):
        with node.graph.inserting_after(first_call):
            moved = node.graph.call_function(operator.getitem, (first_call, item.args[1]))
        moved.meta = item.meta
        item.replace_all_uses_with(moved)
        node.graph.erase_node(item)
    node.graph.erase_node(node)


def _hashable(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument
