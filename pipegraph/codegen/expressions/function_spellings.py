"""The spellings of functions whose arguments have another order or form in Python than in the operator.

Like those of ``operator_spellings.py``, each returns None for a call that it cannot express.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING, OperatorCall
from pipegraph.codegen.syntax.expressions import (
    Attribute,
    Expression,
    Name,
    Slice,
    Subscript,
    Template,
    call,
    conditional,
    literal,
    method,
)
from pipegraph.errors import CaptureError
from pipegraph.graph.export.isolation import MOMENTUM_OF_ALL
from pipegraph.graph.nodes import RELATIVE_DTYPE, source_line
from pipegraph.torch_private.operators import schema_arguments

Spelling = Callable[[OperatorCall], Expression | None]


# ---- functions whose arguments have another order in torch.nn.functional ---------------------------------------------


def _embedding(operator: OperatorCall) -> Expression:
    arguments = operator.arguments
    named = {"padding_idx": arguments["padding_idx"]} if arguments.get("padding_idx", -1) >= 0 else {}
    return operator.function("F.embedding", arguments["indices"], arguments["weight"], **named)


def _normalization(*names: str) -> Spelling:
    """``F.layer_norm(x, (512,), weight, bias, eps=…)``, without the switch for cuDNN."""

    def spell(operator: OperatorCall) -> Expression:
        switches = ("cudnn_enable", "cudnn_enabled")
        named = {name: value for name, value in operator.arguments.items() if name not in switches}
        positional = [named.pop(name) for name in names if name in named]
        return operator.function(f"F.{operator.name}", *positional, **named)

    return spell


def _linear(operator: OperatorCall) -> Expression:
    return operator.function("F.linear", *operator.arguments.values())


def _batch_norm(operator: OperatorCall) -> Expression:
    arguments = operator.arguments
    positional = [arguments.get(name) for name in ("input", "running_mean", "running_var")]
    named = {name: arguments[name] for name in ("weight", "bias") if arguments.get(name) is not None}
    # Without running statistics there is only one mode.
    named["training"] = arguments["training"] if arguments.get("running_mean") is not None else True
    named |= {name: arguments[name] for name in ("momentum", "eps")}
    if named["momentum"] == MOMENTUM_OF_ALL:
        raise CaptureError(
            f"A batch norm with momentum=None cannot be written as a function.\n  at {source_line(operator.node)}",
            "without hooks on it, or with a momentum.",
        )
    return operator.function("F.batch_norm", *positional, **named)


def _dropout(operator: OperatorCall) -> Expression:
    """``F.dropout(x, 0.1, self.training)``. torch drops channels by functions that are named after their dimensions."""
    dimensions = len(operator.shapes[0])
    is_feature = operator.name == "feature_dropout"
    if is_feature and not 3 <= dimensions <= 5:
        return operator.function("torch.feature_dropout", *operator.arguments.values())
    name = f"dropout{dimensions - 2}d" if is_feature else operator.name
    always = operator.node.meta["in_every_mode"]
    mode = [] if always and name.startswith("dropout") else [True if always else TRAINING]
    return operator.function(f"F.{name}", operator.arguments["input"], operator.arguments["p"], *mode)


def _attention(operator: OperatorCall) -> Expression:
    named = dict(operator.arguments)
    positional = [named.pop(name) for name in ("query", "key", "value")]
    probability = named.pop("dropout_p", 0.0)
    if _is_default_scale(operator.arguments["query"], named.get("scale")):
        del named["scale"]
    if probability:
        always = operator.node.meta["in_every_mode"]
        named["dropout_p"] = probability if always else conditional(literal(probability), TRAINING, literal(0.0))
    return operator.function("F.scaled_dot_product_attention", *positional, **named)


def _is_default_scale(query: fx.Node, scale: float | None) -> bool:
    """Return whether attention has this scale by default: one over the square root of the size of a head.

    The kernels compute the scale in float32, or in float64 for float64.
    """
    value = query.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)
    default = value.shape[-1] ** -0.5
    return scale is not None and torch.equal(torch.tensor(scale, dtype=dtype), torch.tensor(default, dtype=dtype))


def _cast(operator: OperatorCall) -> Expression | None:
    value = operator.node.meta["val"]
    if operator.name == "type_as" and RELATIVE_DTYPE in operator.node.meta:
        reference = operator.expression(operator.arguments["other"])
        return method(operator.expression(operator.arguments["self"]), "to", Attribute(reference, "dtype"))
    layout = operator.arguments.get("memory_format", torch.preserve_format)
    if layout is not torch.preserve_format or "other" in operator.arguments or "dtype" not in operator.arguments:
        return None
    dtype = operator.arguments["dtype"]
    named = {"copy": True} if operator.arguments.get("copy") else {}
    target_dtype = dtype if isinstance(dtype, fx.Node) else value.dtype
    return operator.method(operator.arguments["self"], "to", target_dtype, **named)


def _softmax(operator: OperatorCall) -> Expression:
    named = {name: operator.arguments[name] for name in ("dim", "dtype") if name in operator.arguments}
    return operator.function(f"F.{operator.name}", operator.arguments["self"], **named)


def _sizes_spread(operator: OperatorCall) -> Expression | None:
    """``x.permute(0, 2, 1)``: each size is an argument."""
    owner, sizes, *other_arguments = operator.arguments.values()
    if other_arguments or not isinstance(sizes, list):
        return None
    return operator.method(owner, operator.name, *(sizes or [()]))


def _filled(operator: OperatorCall) -> Expression | None:
    """``torch.zeros(2, 3, device=…)``, ``x.new_full((2, 3), 1.0)``."""
    named = dict(operator.arguments)
    sizes = named.pop("size")
    if not all(isinstance(size, int) for size in sizes):
        return None
    value = [named.pop("fill_value")] if "fill_value" in named else []
    positional = [tuple(sizes), *value] if value or not sizes else sizes
    if "self" in named:
        owner = operator.expression(named["self"])
        *outer, last = sizes or [None]
        # All sizes but the last are often those of the tensor, among them a number of heads, which ranks may divide.
        if not value and len(outer) > 1 and isinstance(owner, Name) and outer == list(operator.shapes[0])[:-1]:
            del named["self"]
            leading_sizes = Template("*{}", (Subscript(Attribute(owner, "shape"), (Slice(None, literal(-1)),)),))
            return method(owner, operator.name, leading_sizes, operator.expression(last), **operator.expressions(named))
        return operator.method(named.pop("self"), operator.name, *positional, **named)
    return operator.function(f"torch.{operator.name}", *positional, **named)


def _arange(operator: OperatorCall) -> Expression | None:
    """``torch.arange(10)``, without the start 0."""
    named = dict(operator.arguments)
    if named.pop("start", None) != 0 or "step" in named:
        return None
    return operator.function("torch.arange", named.pop("end"), **named)


def interpolate(operator: OperatorCall, mode: str, antialias: bool) -> Expression | None:
    """``F.interpolate(x, scale_factor=2, mode="bilinear")``, to a size or by a factor."""
    arguments = operator.arguments
    size, factors = arguments.get("output_size"), arguments.get("scale_factors")
    named: dict[str, Any] = {}
    if factors is not None and size is None:
        short = [int(factor) if float(factor).is_integer() else factor for factor in factors]
        named["scale_factor"] = short[0] if len(set(short)) == 1 else tuple(short)
    elif size is not None and "scale_factors" in arguments and all(isinstance(extent, int) for extent in size):
        named["size"] = tuple(size)
    else:
        return None
    if mode != "nearest":
        named["mode"] = mode
    named |= {"align_corners": True} if arguments.get("align_corners") else {}
    named |= {"antialias": True} if antialias else {}
    return operator.function("F.interpolate", arguments["input"], **named)


def _loss(operator: OperatorCall) -> Expression:
    """``F.cross_entropy(x, y, reduction="sum")``: the operator has numbers for reductions."""
    named = dict(operator.arguments)
    if "reduction" in named:
        named["reduction"] = ("none", "mean", "sum")[named["reduction"]]
    required = [name for name in operator.positional if isinstance(named.get(name), fx.Node)]
    positional = [operator.expression(named.pop(name)) for name in required]
    function = operator.name.removesuffix("_nd")
    function = "cross_entropy" if function == "cross_entropy_loss" else function
    return call(f"F.{function}", *positional, **{name: operator.expression(value) for name, value in named.items()})


# ---- functions of torch whose arguments have another form than those of the operator ---------------------------------


def _spread(operator: OperatorCall) -> Expression:
    """``torch.block_diag(x, y)``: each tensor is an argument."""
    named = dict(operator.arguments)
    return operator.function(f"torch.{operator.name}", *named.pop("tensors"), **named)


def _einsum(operator: OperatorCall) -> Expression | None:
    named = dict(operator.arguments)
    equation, tensors = named.pop("equation"), named.pop("tensors")
    return None if named else operator.function("torch.einsum", equation, *tensors)


def _tensordot(operator: OperatorCall) -> Expression:
    arguments = operator.arguments
    dims = (arguments["dims_self"], arguments["dims_other"])
    return operator.function("torch.tensordot", arguments["self"], arguments["other"], dims=dims)


def _cdist(operator: OperatorCall) -> Expression:
    """``torch.cdist(x, y, p=1.0)``: the operator has numbers for the modes of its computation."""
    named = dict(operator.arguments)
    modes = {1: "use_mm_for_euclid_dist", 2: "donot_use_mm_for_euclid_dist"}
    mode = modes.get(named.pop("compute_mode", 0))
    named |= {"compute_mode": mode} if mode else {}
    return operator.function("torch.cdist", named.pop("x1"), named.pop("x2"), **named)


def _stft(operator: OperatorCall) -> Expression | None:
    """``torch.stft(x, 400, center=False, …)``: the function pads by itself if it is not told not to."""
    named = dict(operator.arguments)
    positional = [named.pop(name) for name in ("self", "n_fft")]
    pads = any(entry.name == "center" for entry in schema_arguments(operator.target)) and named.get("center", True)
    return operator.function("torch.stft", *positional, **({"center": pads} | named))


def _columns(operator: OperatorCall) -> Expression:
    """``F.unfold(x, (3, 3), padding=(1, 1))`` and ``F.fold``."""
    named = {name: tuple(value) if isinstance(value, list) else value for name, value in operator.arguments.items()}
    positional = [named.pop(name) for name in ("self", "output_size", "kernel_size") if name in named]
    defaults = {"dilation": (1, 1), "padding": (0, 0), "stride": (1, 1)}
    options = {name: value for name, value in named.items() if value != defaults[name]}
    return call(
        "F.unfold" if operator.name == "im2col" else "F.fold",
        *map(operator.expression, positional),
        **{name: operator.expression(value) for name, value in options.items()},
    )


FUNCTION_SPELLINGS: dict[str, Spelling] = {
    "embedding": _embedding,
    "linear": _linear,
    "layer_norm": _normalization("input", "normalized_shape", "weight", "bias"),
    "group_norm": _normalization("input", "num_groups", "weight", "bias"),
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "attention": _attention,
    "cast": _cast,
    "loss": _loss,
    "softmax": _softmax,
    "x.name(*sizes)": _sizes_spread,
    "arange": _arange,
    "filled": _filled,
    "torch.name(*tensors)": _spread,
    "einsum": _einsum,
    "tensordot": _tensordot,
    "cdist": _cdist,
    "stft": _stft,
    "columns": _columns,
}
