"""The floating-point operations of an ATen kernel, by torch's formulas (`torch.utils.flop_counter`), and its sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from pipegraph.cost.roofline.operator_roles import (
    FusionRole,
    first_argument,
    name_of,
    named_arguments,
    role_of,
    value_of,
)
from pipegraph.graph.operators import Loop, operator_of

Sizes = dict[str, float]
"""m, n, k; length and head_dim; flops: what tables of a profile may be over."""


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
    grouped = _GROUPED.get(str(node.target).rpartition(".")[0])
    return grouped or flop_registry.get(getattr(torch.ops.aten, like) if like else packet)


def _grouped_product(one: Tensor, other: Tensor, *args: object, **kwargs: object) -> int:
    """Operations of a product of matrices per group of rows or columns, as in a mixture of experts.

    The groups share out the rows of ``one`` [rows, k] (times ``other`` [groups, k, n]), the columns of ``other``
    [k, columns] (for ``one`` [groups, m, k]), or k if both have two dimensions. torch has no formula.
    """
    if one.dim() == 3 and other.dim() == 2:
        return 2 * one.shape[1] * other.numel()
    return 2 * one.numel() * other.shape[-1]


def _grouped_gradients(one: Tensor, other: Tensor, *args: object, **kwargs: object) -> int:
    """Operations of both gradients of such a product."""
    return 2 * _grouped_product(one, other)


# The operators of transformers, for dtypes that torch's does not take, exist once transformers is imported.
_GROUPED = {
    "aten._grouped_mm": _grouped_product,
    "transformers.grouped_mm_fallback": _grouped_product,
    "transformers.grouped_mm_fallback_backward": _grouped_gradients,
}


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
            one, other = named[first], named[second]
            kind = "batched_matmul" if one.dim() == 3 else "matmul"
            return kind, {"m": one.shape[-2], "n": other.shape[-1], "k": one.shape[-1]}
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
