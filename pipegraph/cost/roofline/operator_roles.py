"""How Inductor runs an ATen operator: not at all, in a loop that neighbours may share, or in a kernel of its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.graph.internals import OpOverload, operator_name, pytree, schema_arguments
from pipegraph.graph.operators import Loop, operator_of
from pipegraph.kernels.graphs.division import is_view


class FusionRole(Enum):
    """How an operator runs."""

    VIEW = "not at all: its result is the memory of its input, or no tensor"
    CONSTANT = "where its result is read"
    ELEMENTWISE = "in a loop over the elements of its result, which neighbours may share"
    REDUCTION = "in a loop over the elements of its input, which neighbours may share"
    SCATTER = "in a loop over the elements of its source, after the loop that makes what it writes into"
    KERNEL = "in a kernel of its own"


_ROLES: dict[Loop | None, FusionRole] = {
    Loop.CONSTANT: FusionRole.CONSTANT,
    Loop.ELEMENTWISE: FusionRole.ELEMENTWISE,
    Loop.RANDOM: FusionRole.ELEMENTWISE,
    Loop.GATHER: FusionRole.ELEMENTWISE,
    Loop.WINDOW: FusionRole.ELEMENTWISE,
    Loop.REDUCTION: FusionRole.REDUCTION,
    Loop.SCATTER: FusionRole.SCATTER,
}


def role_of(node: fx.Node) -> FusionRole:
    """Return how a node that calls a function runs."""
    if node.target is operator.getitem or is_view(node) or not result_tensors(node):
        return FusionRole.VIEW
    role = _ROLES.get(operator_of(node).loop)
    if role is not None:
        return role
    tags = node.target.tags if isinstance(node.target, OpOverload) else ()
    if torch.Tag.reduction in tags:
        return FusionRole.REDUCTION
    return FusionRole.ELEMENTWISE if torch.Tag.pointwise in tags else FusionRole.KERNEL


def rate_name(node: fx.Node) -> str:
    """Return the name under which a profile may have the rate of a node's elements."""
    name, row = name_of(node), operator_of(node)
    if row.rate:
        return row.rate
    if row.loop in (Loop.RANDOM, Loop.WINDOW, Loop.SCATTER):
        return row.loop.name.lower()
    if role_of(node) is FusionRole.REDUCTION:
        return "sum" if reduces_last(node) else "sum across"
    if name == "pow":
        exponent = node.args[1]
        # Powers of whole and half numbers are products and roots.
        return "mul" if isinstance(exponent, int | float) and float(2 * exponent).is_integer() else "pow"
    return name


def loop_elements(node: fx.Node) -> int:
    """Return how many elements a node's loop passes over."""
    match role_of(node):
        case FusionRole.REDUCTION:
            return first_argument(node).numel()
        case FusionRole.SCATTER:
            return result_tensors(scatter_source(node))[0].numel()
    passed = [node, *node.all_input_nodes] if operator_of(node).loop is Loop.WINDOW else [node]
    return max(value.numel() for each in passed for value in result_tensors(each))


def reduces_last(node: fx.Node) -> bool:
    """Return whether a reduction goes along all dimensions or the last one, whose elements are neighbours in memory."""
    dims, rank = named_arguments(node).get("dim"), first_argument(node).dim()
    if isinstance(dims, int):
        dims = [dims]
    return not dims or rank == 0 or rank - 1 in {dim % rank for dim in dims}


def scatter_source(scatter: fx.Node) -> fx.Node:
    """Return what a scatter writes at an index."""
    named = named_arguments(scatter)
    names = ("src", "values", "source", "grad_output")
    return next((named[name] for name in names if name in named), scatter.all_input_nodes[-1])


def scatter_target(scatter: fx.Node) -> fx.Node | None:
    """Return the tensor that a scatter copies and writes into; None if it writes into zeros."""
    target = named_arguments(scatter).get("self")
    return target if isinstance(target, fx.Node) else None


def named_arguments(node: fx.Node) -> Mapping[str, Any]:
    """Return a node's arguments by name, as far as its operator has names for them."""
    if not isinstance(node.target, OpOverload):
        return node.kwargs
    names = [argument.name for argument in schema_arguments(node.target)]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def name_of(node: fx.Node) -> str:
    """Return ``exp`` for ``aten.exp.default``."""
    if isinstance(node.target, OpOverload):
        return operator_name(node.target)[0]
    return str(getattr(node.target, "__name__", node.target))


def value_of(node: fx.Node) -> Any:
    """Return a node's result, without memory."""
    return node.meta.get("val")


def first_argument(node: fx.Node) -> Tensor:
    """Return the first tensor among a node's arguments."""
    return next(tensor for each in node.all_input_nodes for tensor in result_tensors(each))


def result_tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensors of a node's result."""
    return [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
