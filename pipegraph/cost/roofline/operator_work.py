"""How Inductor runs an ATen operator: not at all, in a loop that neighbours may share, or in a kernel; and its work.

The floating-point operations of a kernel are by torch's formulas (`torch.utils.flop_counter`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from pipegraph.graph.operators import Loop, operator_of
from pipegraph.kernels.graphs.division import is_view
from pipegraph.torch_private.operators import OpOverload, operator_name, schema_arguments
from pipegraph.torch_private.pytrees import pytree

Sizes = dict[str, float]
"""m, n, k; length and head_dim; flops: what tables of a profile may be over."""


class FusionRole(Enum):
    """How an operator runs."""

    VIEW = "not at all: its result is the memory of its input, or not a tensor"
    CONSTANT = "where its result is read"
    ELEMENTWISE = "in a loop over the elements of its result, which neighbours may share"
    REDUCTION = "in a loop over the elements of its input, which neighbours may share"
    SCATTER = "in a loop over the elements of its source, after the loop that makes what it writes into"
    KERNEL = "in a separate kernel"


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
    return max(value.numel() for operand in passed for value in result_tensors(operand))


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
    return next(tensor for argument in node.all_input_nodes for tensor in result_tensors(argument))


def result_tensors(node: fx.Node) -> list[Tensor]:
    """Return the tensors of a node's result."""
    return [leaf for leaf in pytree.tree_leaves(value_of(node)) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class KernelWork:
    """The floating-point operations of a kernel, with the kind, dtype and sizes by which a profile has its rate.

    ``computed`` is the part of ``flops`` that is computed. By convention a causal attention is counted whole, and it
    computes about half: it skips what it masks.
    """

    kind: str
    dtype: str
    flops: int
    sizes: Mapping[str, float]
    computed: float = 1.0


def kernel_work(node: fx.Node) -> KernelWork | None:
    """Return what a node computes; None if it has no formula, or no elements."""
    formula = _formula(node)
    if formula is None:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    flops = int(formula(*args, **kwargs, out_val=value_of(node)))
    if not flops:
        return None
    named = fx.map_arg(dict(named_arguments(node)), value_of)
    if named.get("groups", 1) > 1 and "output_mask" in named:
        flops = _grouped_convolution_backward(named)
    side = (flops / 2) ** (1 / 3)
    cube = "matmul", {"m": side, "n": side, "k": side, "length": side, "head_dim": side}
    kind, sizes = _kind_and_sizes(name_of(node), named, value_of(node)) or cube
    # Causal: of the square scores half, and the diagonal.
    computed = 0.5 + 0.5 / sizes["length"] if named.get("is_causal") else 1.0
    return KernelWork(kind, profile_dtype(first_argument(node)), flops, {**sizes, "flops": flops}, computed)


def is_uncounted(node: fx.Node) -> bool:
    """Return whether a node may compute a lot without a formula that says how much: only its bytes are counted."""
    return role_of(node) is FusionRole.KERNEL and _formula(node) is None and operator_of(node).loop is not Loop.MEMORY


def profile_dtype(tensor: Tensor) -> str:
    """Return the name that profiles have for a dtype; for float32 it depends on the precision that torch allows."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float32" and torch.get_float32_matmul_precision() != "highest":
        return "tfloat32"
    return "float8" if name.startswith("float8") else name


def _formula(node: fx.Node) -> Any:
    packet = getattr(node.target, "overloadpacket", node.target)
    like = operator_of(node).flops_like
    if packet is torch.ops.aten._grouped_mm:
        return _grouped_product
    return flop_registry.get(getattr(torch.ops.aten, like) if like else packet)


def _grouped_product(first: Tensor, second: Tensor, *args: object, **kwargs: object) -> int:
    """Operations of a product of matrices per group of rows or columns, as in a mixture of experts.

    The groups share out the rows of ``first`` [rows, k] (times ``second`` [groups, k, n]), the columns of ``second``
    [k, columns] (for ``first`` [groups, m, k]), or k if both have two dimensions. torch has no formula.
    """
    if first.dim() == 3 and second.dim() == 2:
        return 2 * first.shape[1] * second.numel()
    return 2 * first.numel() * second.shape[-1]


def _kind_and_sizes(name: str, named: Mapping[str, Any], result: Any) -> tuple[str, Sizes] | None:
    """The kind of kernel and its sizes; None for an operator whose arguments are not known by name."""
    backward = "_backward" if "backward" in name else ""
    if "weight" in named:
        return f"convolution{backward}", _convolution_sizes(named, result)
    if "query" in named and "key" in named:
        length, head_dim = named["key"].shape[-2], named["query"].shape[-1]
        sizes = {"m": named["query"].shape[-2], "n": length, "k": head_dim, "length": length, "head_dim": head_dim}
        return f"attention{backward}", sizes
    for first, second in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if first in named and second in named:
            left_operand, right_operand = named[first], named[second]
            kind = "batched_matmul" if left_operand.dim() == 3 else "matmul"
            return kind, {"m": left_operand.shape[-2], "n": right_operand.shape[-1], "k": left_operand.shape[-1]}
    return None


def _grouped_convolution_backward(named: Mapping[str, Any]) -> int:
    """Operations of a forward, for each gradient of image and weight that is wanted.

    torch's formula takes each group's weight gradient over the channels of all groups: 65 forwards for 64 groups.
    """
    sizes = _convolution_sizes(named, None)
    return round(2 * sizes["m"] * sizes["n"] * sizes["k"]) * named["groups"] * sum(named["output_mask"][:2])


def _convolution_sizes(named: Mapping[str, Any], result: Any) -> Sizes:
    """Sizes of the product of matrices that the forward of a convolution, or of one of its groups, is."""
    weight, groups = named["weight"], named.get("groups", 1)
    images, results = named.get("input", named.get("self")), named.get("grad_output", result)
    window = math.prod(weight.shape[2:])
    if named.get("transposed"):
        channels = images.shape[1]
        return {"m": images.numel() // channels, "n": weight.shape[1] * window, "k": channels // groups}
    channels = results.shape[1]
    return {"m": results.numel() // channels, "n": channels // groups, "k": weight.shape[1] * window}
