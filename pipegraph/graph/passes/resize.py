"""Give a graph the sizes of other inputs than those it was traced at."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import sympy
import torch
from torch import fx

from pipegraph.graph.nodes import SIZES, shape_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.fake_tensors import fake_empty, fake_mode_of
from pipegraph.torch_private.pytrees import pytree


def resize(graph: fx.Graph, sizes: Mapping[sympy.Symbol, int]) -> None:
    """Give the values and arguments of a graph the sizes that follow from others of its inputs.

    Args:
        graph: is changed.
        sizes: those that change.
    """

    def resized(leaf: Any) -> Any:
        return SymbolicSize(leaf.expression, {**leaf.symbols, **sizes}) if isinstance(leaf, SymbolicSize) else leaf

    for node in graph.nodes:
        node.args, node.kwargs = pytree.tree_map(resized, (node.args, node.kwargs))
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            node.meta[SIZES] = tuple(map(resized, shape_of(node)))
            node.meta["val"] = _resized(value, tuple(map(int, node.meta[SIZES])))
        elif isinstance(value, (tuple, list)):
            read = {user.args[1] for user in node.users if user.target is operator.getitem}
            if len(read) < len(value):  # nothing says the sizes of the other parts
                node.meta["val"] = type(value)(_computed(node))
    for node in graph.nodes:
        if node.target is operator.getitem:  # the parts of a tuple say their sizes, the tuple does not
            source, index = node.args
            if isinstance(source.meta.get("val"), (tuple, list)):
                parts = list(source.meta["val"])
                parts[index] = node.meta["val"]
                source.meta["val"] = type(source.meta["val"])(parts)


def _computed(node: fx.Node) -> Any:
    """What an operation gives on fake tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    with torch.no_grad(), (fake_mode_of(tensors[0]) if tensors else None) or nullcontext():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _resized(value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a fake tensor with another shape; the gaps between its dimensions in memory scale with it."""
    if tuple(value.shape) == tuple(shape):
        return value
    strides = list(value.stride())
    inner: int | None = None
    for dim in sorted(range(value.dim()), key=lambda dim: (value.stride(dim), -dim)):
        if value.stride(dim) == 0:
            continue
        if inner is not None:
            extent = value.shape[inner] * value.stride(inner)
            strides[dim] = max(1, shape[inner] * strides[inner] * value.stride(dim) // max(extent, 1))
        inner = dim
    return fake_empty(value, shape, value.dtype, strides).requires_grad_(value.requires_grad)
