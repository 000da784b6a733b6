"""How Inductor runs an ATen operation: not at all, in a loop that neighbours may share, or in a kernel of its own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from pipegraph.kernels.graphs.division import is_view


class FusionRole(Enum):
    """How an operation runs."""

    VIEW = "not at all: its result is the memory of its input, or no tensor"
    CONSTANT = "where its result is read"
    ELEMENTWISE = "in a loop over the elements of its result, which neighbours may share"
    REDUCTION = "in a loop over the elements of its input, which neighbours may share"
    SCATTER = "in a loop over the elements of its source, once what it writes into has been made"
    KERNEL = "in a kernel of its own"


_CONSTANTS = {"full", "zeros", "ones", "empty", "empty_strided", "arange", "iota", "scalar_tensor", "full_like", "eye"}
_CONSTANTS |= {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like"}
_CONSTANTS |= {"new_empty_strided", "inductor_seed", "inductor_seeds", "inductor_lookup_seed"}

# What torch does not tag as pointwise although it passes over its result element by element.
_COPIES = {"cat", "stack", "copy", "_to_copy", "constant_pad_nd", "repeat", "flip", "roll", "tril", "triu"}
_COPIES |= {"slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter", "lift_fresh_copy"}
_RANDOM = {"rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "native_dropout", "inductor_random"}
_RANDOM |= {"inductor_randint"}
GATHERS = {"index", "_unsafe_index", "_unsafe_masked_index", "embedding", "gather", "index_select"}
"""They read of their first argument no more than they return."""

# Windows over the pixels of an image.
_WINDOWS = {"_low_memory_max_pool_with_offsets", "_low_memory_max_pool_offsets_to_indices", "max_pool2d_with_indices"}
_WINDOWS |= {"max_pool2d_with_indices_backward", "avg_pool2d", "avg_pool2d_backward", "_adaptive_avg_pool2d"}
_WINDOWS |= {"_adaptive_avg_pool2d_backward", "upsample_nearest2d", "upsample_nearest2d_backward"}
_WINDOWS |= {"upsample_bilinear2d", "upsample_bilinear2d_backward"}

# What torch does not tag as a reduction, where nothing has decomposed it: normalisations by a mean and a variance, and
# softmax.
_NORMALISATIONS = {"native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit_functional"}
_NORMALISATIONS |= {"native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"}
_NORMALISATIONS |= {"_fused_rms_norm", "_fused_rms_norm_backward"}
_SOFTMAX = {
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "prepare_softmax_online",
}
_VARIANCES = _NORMALISATIONS | {"var", "var_mean", "std"}

_SCATTERS = {"scatter", "scatter_add", "scatter_reduce", "index_put", "_unsafe_index_put", "index_add", "index_copy"}
_SCATTERS |= {"_unsafe_masked_index_put_accumulate", "embedding_dense_backward"}

# The function that bounds an operation's loop, where it has another name.
_FUNCTIONS = {"cos": "sin", "gelu": "erf", "gelu_backward": "erf", "silu": "sigmoid", "silu_backward": "sigmoid"}
_FUNCTIONS |= {"_softmax": "exp", "_log_softmax": "exp", "logsumexp": "exp", "exp2": "exp", "expm1": "exp"}
_FUNCTIONS |= {"log1p": "log", "log2": "log", "log10": "log", "softplus": "log", "mish": "tanh", "sqrt": "rsqrt"}
_FUNCTIONS |= {"reciprocal": "div"} | dict.fromkeys(_RANDOM, "random") | dict.fromkeys(_WINDOWS, "window")
_FUNCTIONS |= dict.fromkeys(_SCATTERS, "scatter")


def role_of(node: fx.Node) -> FusionRole:
    """How a node that calls a function runs."""
    name, target = name_of(node), node.target
    if target is operator.getitem or is_view(node) or not tensors(node):
        return FusionRole.VIEW
    if name in _CONSTANTS:
        return FusionRole.CONSTANT
    if name in _SCATTERS:
        return FusionRole.SCATTER
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if torch.Tag.reduction in tags or name in _NORMALISATIONS | _SOFTMAX:
        return FusionRole.REDUCTION
    if torch.Tag.pointwise in tags or name in _COPIES | _RANDOM | GATHERS | _WINDOWS:
        return FusionRole.ELEMENTWISE
    return FusionRole.KERNEL


def function_of(node: fx.Node) -> str:
    """The name under which a profile may have the rate of its elements."""
    name = name_of(node)
    if role_of(node) is FusionRole.REDUCTION and name not in _FUNCTIONS:
        along = "sum" if reduces_last(node) else "sum across"
        return "var_mean" if name in _VARIANCES else along
    if name == "pow":
        exponent = node.args[1]
        # Powers of whole and half numbers are products and roots.
        return "mul" if isinstance(exponent, int | float) and float(2 * exponent).is_integer() else "pow"
    return _FUNCTIONS.get(name, name)


def elements_of(node: fx.Node) -> int:
    """How many elements its loop passes over."""
    match role_of(node):
        case FusionRole.REDUCTION:
            return given_to(node).numel()
        case FusionRole.SCATTER:
            return tensors(source_of(node))[0].numel()
    passed = [node, *node.all_input_nodes] if name_of(node) in _WINDOWS else [node]
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
