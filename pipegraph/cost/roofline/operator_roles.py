"""How Inductor runs an ATen operation: not at all, in a loop that neighbours may share, or in a kernel of its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipegraph.graph.operators import Loop, operator_of
from pipegraph.kernels.graphs.division import is_view


class FusionRole(Enum):
    """How an operation runs."""

    VIEW = "not at all: its result is the memory of its input, or no tensor"
    CONSTANT = "where its result is read"
    ELEMENTWISE = "in a loop over the elements of its result, which neighbours may share"
    REDUCTION = "in a loop over the elements of its input, which neighbours may share"
    SCATTER = "in a loop over the elements of its source, once what it writes into has been made"
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
    """How a node that calls a function runs."""
    target = node.target
    if target is operator.getitem or is_view(node) or not tensors(node):
        return FusionRole.VIEW
    role = _ROLES.get(operator_of(node).loop)
    if role is not None:
        return role
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if torch.Tag.reduction in tags:
        return FusionRole.REDUCTION
    return FusionRole.ELEMENTWISE if torch.Tag.pointwise in tags else FusionRole.KERNEL


def function_of(node: fx.Node) -> str:
    """The name under which a profile may have the rate of its elements."""
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


def elements_of(node: fx.Node) -> int:
    """How many elements its loop passes over."""
    match role_of(node):
        case FusionRole.REDUCTION:
            return given_to(node).numel()
        case FusionRole.SCATTER:
            return tensors(source_of(node))[0].numel()
    passed = [node, *node.all_input_nodes] if operator_of(node).loop is Loop.WINDOW else [node]
    return max(value.numel() for each in passed for value in tensors(each))


def reduces_last(node: fx.Node) -> bool:
    """Whether a reduction goes along the last dimension, where memory lies in a row, or along all."""
    dims, rank = arguments_of(node).get("dim"), given_to(node).dim()
    if isinstance(dims, int):
        dims = [dims]
    return not dims or rank == 0 or rank - 1 in {dim % rank for dim in dims}


def source_of(scatter: fx.Node) -> fx.Node:
    """What a scatter writes somewhere."""
    named = arguments_of(scatter)
    names = ("src", "values", "source", "grad_output")
    return next((named[name] for name in names if name in named), scatter.all_input_nodes[-1])


def target_of(scatter: fx.Node) -> fx.Node | None:
    """What a scatter writes into a copy of; None where that is zeros."""
    target = arguments_of(scatter).get("self")
    return target if isinstance(target, fx.Node) else None


def arguments_of(node: fx.Node) -> Mapping[str, Any]:
    """The arguments by name, as far as the operation has names for them."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.kwargs
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def name_of(node: fx.Node) -> str:
    """``exp`` of ``aten.exp.default``."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def value_of(node: fx.Node) -> Any:
    """Its result, without memory."""
    return node.meta.get("val")


def given_to(node: fx.Node) -> Tensor:
    """The first tensor among its arguments."""
    return next(tensor for each in node.all_input_nodes for tensor in tensors(each))


def tensors(node: fx.Node) -> list[Tensor]:
    """The tensors of its result."""
    return [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]
