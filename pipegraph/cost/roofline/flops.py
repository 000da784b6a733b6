"""The floating-point operations of a node, by torch's formulas (`torch.utils.flop_counter`), and how fast such go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pipegraph.cost.roofline.operator_roles import FusionRole, arguments_of, given_to, name_of, role_of, value_of
from pipegraph.graph.nodes import on_meta
from pipegraph.graph.operators import Loop, operator_of

aten = torch.ops.aten


@dataclass(frozen=True)
class KernelWork:
    """The floating-point operations of a kernel: their kind and dtype, and the sizes that tables may have as axes.

    ``done`` is the part of ``flops`` that is computed: about half, where a causal attention skips what it masks. By
    convention they are counted whole.
    """

    kind: str
    dtype: str
    flops: int
    sizes: Mapping[str, float]
    done: float = 1.0


def work_of(node: fx.Node) -> KernelWork | None:
    """What a node computes; None where it has no formula, or no elements."""
    formula = _formula(node)
    if formula is None:
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    flops = int(formula(*args, **kwargs, out_val=value_of(node)))
    if not flops:
        return None
    named = fx.map_arg(dict(arguments_of(node)), value_of)
    if named.get("groups", 1) > 1 and "output_mask" in named:
        flops = _grouped_backward(named)
    side = (flops / 2) ** (1 / 3)
    cube = "matmul", {"m": side, "n": side, "k": side, "length": side, "head_dim": side}
    kind, sizes = _sizes(name_of(node), named, value_of(node)) or cube
    # Of the square scores of a causal attention, half and the diagonal.
    done = 0.5 + 0.5 / sizes["length"] if named.get("is_causal") else 1.0
    return KernelWork(kind, dtype_of(given_to(node)), flops, {**sizes, "flops": flops}, done)


def is_uncounted(node: fx.Node) -> bool:
    """Whether it may compute a lot, and nothing says how much: its bytes alone are counted."""
    return role_of(node) is FusionRole.KERNEL and _formula(node) is None and operator_of(node).loop is not Loop.MEMORY


def dtype_of(tensor: Tensor) -> str:
    """The name that profiles have for a dtype; of float32, with the precision that torch allows its products."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "float32" and torch.get_float32_matmul_precision() != "highest":
        return "tfloat32"
    return "float8" if name.startswith("float8") else name


def _formula(node: fx.Node) -> Any:
    packet = getattr(node.target, "overloadpacket", node.target)
    like = operator_of(node).flops_like
    grouped = _GROUPED.get(getattr(node.target, "_name", ""))
    return grouped or flop_registry.get(getattr(aten, like) if like else packet)


def _grouped_product(one: Tensor, other: Tensor, *args: object, **kwargs: object) -> int:
    """Those of a product of matrices for each group of rows or columns, as a mixture of experts has it; torch has no
    formula.

    The groups share out the rows of ``one`` [rows, k] (times ``other`` [groups, k, n]), the columns of ``other``
    [k, columns] (for ``one`` [groups, m, k]), or k, where both have two dimensions.
    """
    if one.dim() == 3 and other.dim() == 2:
        return 2 * one.shape[1] * other.numel()
    return 2 * one.numel() * other.shape[-1]


def _grouped_gradients(one: Tensor, other: Tensor, *args: object, **kwargs: object) -> int:
    """Those of both gradients of such a product."""
    return 2 * _grouped_product(one, other)


# By the operators' names: those of transformers, for dtypes that torch's does not take, are there once it is imported.
_GROUPED = {
    "aten::_grouped_mm": _grouped_product,
    "transformers::grouped_mm_fallback": _grouped_product,
    "transformers::grouped_mm_fallback_backward": _grouped_gradients,
}


def _sizes(name: str, named: Mapping[str, Any], result: Any) -> tuple[str, dict[str, float]] | None:
    """(kind, sizes); None for an operation whose arguments are not known by name."""
    backward = "_backward" if "backward" in name else ""
    if "weight" in named:
        return f"convolution{backward}", _convolution(named, result)
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


def _grouped_backward(named: Mapping[str, Any]) -> int:
    """Those of the forward, for each of the gradients of image and weight that is wanted.

    torch's formula takes each group's weight gradient over the channels of all groups: 65 forwards for 64 groups.
    """
    sizes = _convolution(named, None)
    return round(2 * sizes["m"] * sizes["n"] * sizes["k"]) * named["groups"] * sum(named["output_mask"][:2])


def _convolution(named: Mapping[str, Any], result: Any) -> dict[str, float]:
    """The sizes of the product of matrices that the forward of a convolution, or of one of its groups, is."""
    weight, groups = named["weight"], named.get("groups", 1)
    images, results = named.get("input", named.get("self")), named.get("grad_output", result)
    window = math.prod(weight.shape[2:])
    if named.get("transposed"):
        channels = images.shape[1]
        return {"m": images.numel() // channels, "n": weight.shape[1] * window, "k": channels // groups}
    channels = results.shape[1]
    return {"m": results.numel() // channels, "n": channels // groups, "k": weight.shape[1] * window}


def flops_of(nodes: Iterable[fx.Node]) -> list[int]:
    """Floating-point operations of each node. One of equal nodes is run on meta tensors under torch's counter, so that
    a composite operation (``linear``, attention) counts as what it is made of. Elementwise work counts as zero, as
    there."""
    counted: dict[str, int] = {}
    found: list[int] = []
    for node in nodes:
        key = f"{node.target} {fx.map_arg((node.args, node.kwargs), _form)}"
        if key not in counted:
            counted[key] = _flops(node)
        found.append(counted[key])
    return found


def _form(node: fx.Node) -> Any:
    """A value as text: equal for values that look the same."""
    value = node.meta.get("val")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}" if isinstance(value, torch.Tensor) else str(value)


def _flops(node: fx.Node) -> int:
    leaves = [leaf for leaf in node.all_input_nodes if isinstance(leaf.meta.get("val"), torch.Tensor)]
    if not any(leaf.meta["val"].is_floating_point() for leaf in leaves) or not callable(node.target):
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    counter = FlopCounterMode(display=False)
    try:
        with counter, torch.no_grad():
            node.target(*args, **{name: value for name, value in kwargs.items() if name != "device"})
    except (RuntimeError, NotImplementedError, TypeError):
        return 0  # no meta kernel: such an operation has no formula in the registry either
    return int(counter.get_total_flops())


def value_bytes(node: fx.Node) -> int:
    """Size of a value that crosses."""
    value = node.meta["val"]
    return int(value.numel() * value.element_size())
