"""The spellings of operators: how a call of an operator becomes an expression of Python.

The column ``spelling`` of ``graph/operators.py`` names the spelling of an operator. ``x + y``, ``-x`` and ``x.T`` are
read as they are, with any operator or attribute. Every other spelling is a function in ``SPELLINGS``; it returns None
for a call that it cannot express. "F.name" needs no function, and ``operation`` writes assignments such as
``x[indices] = y``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING, OperatorCall
from pipegraph.codegen.expressions.reshapes import expand_sizes, flatten_dims, reshape_sizes, shortest_reshape
from pipegraph.codegen.syntax.expressions import (
    ATOM,
    Attribute,
    Binary,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Slice,
    Subscript,
    call,
    conditional,
    literal,
    method,
    unary,
)
from pipegraph.graph.nodes import RELATIVE_DTYPE

Spelling = Callable[[OperatorCall], Expression | None]


def spelling_function(spelling: str) -> Spelling | None:
    """The function of a spelling; None if it has none."""
    match spelling.split():
        case ["interpolate", mode, *options]:
            return partial(_interpolate, mode=mode, antialias=bool(options))
        case ["x", symbol, "y"]:
            return partial(_binary, symbol=symbol)
        case ["y", symbol, "x"]:
            return partial(_binary, symbol=symbol, swapped=True)
        case ["-x" | "~x"]:
            return partial(_unary, symbol=spelling[0])
    if spelling.startswith("x.") and spelling.removeprefix("x.").isidentifier():
        return partial(_attribute, name=spelling.removeprefix("x."))
    return SPELLINGS.get(spelling)


# ---- operators -------------------------------------------------------------------------------------------------------


def _binary(operator: OperatorCall, symbol: str, swapped: bool = False) -> Expression | None:
    if set(operator.arguments) - {"self", "other", "exponent", "mat2"}:
        return None
    left, right = map(operator.expression, operator.arguments.values())
    return Binary(symbol, right, left) if swapped else Binary(symbol, left, right)


def _unary(operator: OperatorCall, symbol: str) -> Expression:
    operand = operator.expression(operator.arguments["self"])
    if operand.within(ATOM).startswith(f"({symbol}"):
        return method(operand, operator.name)
    return unary(symbol, operand)


def _attribute(operator: OperatorCall, name: str) -> Expression:
    return Attribute(operator.expression(operator.arguments["self"]), name)


# ---- subscripts ------------------------------------------------------------------------------------------------------


def _slice(operator: OperatorCall) -> Expression | None:
    start, end, step = (operator.arguments.get(name) for name in ("start", "end", "step"))
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    stop = None if end is None or end >= 2**62 else operator.expression(end)
    taken = Slice(operator.expression(start) if start else None, stop, literal(step) if step is not None else None)
    return _subscript(operator, operator.arguments.get("dim", 0), taken)


def _select(operator: OperatorCall) -> Expression:
    return _subscript(operator, operator.arguments["dim"], operator.expression(operator.arguments["index"]))


def _subscript(operator: OperatorCall, dim: int, index: Expression) -> Expression:
    """``x[:, index]``, or ``x[..., index]`` for the last of three or more dimensions."""
    size = len(operator.shapes[0])
    dim %= size
    before = [literal(...)] if dim == size - 1 and dim >= 2 else [Slice()] * dim
    owner = operator.expression(operator.node.args[0])
    if isinstance(owner, Subscript) and owner.indices == (Slice(),):  # of ``x[:, 0] = y``
        owner = owner.owner
    return Subscript(owner, (*before, index))


def index(operator: OperatorCall) -> Subscript | None:
    """``x[:, positions]``."""
    indices = [Slice() if each is None else _index(operator.expression(each)) for each in operator.arguments["indices"]]
    while indices and indices[-1] == Slice():
        indices.pop()
    return Subscript(operator.expression(operator.arguments["self"]), tuple(indices)) if indices else None


def _index(value: Expression) -> Expression:
    """``[-1]`` for ``torch.full((1,), -1)``."""
    if not isinstance(value, FunctionCall) or value.function != Name("torch.full"):
        return value
    shape, number, *_ = value.arguments
    return Collection((number.value,), "[]") if shape.value == literal((1,)) else value


# ---- functions whose arguments have another order in torch.nn.functional ---------------------------------------------


def _embedding(operator: OperatorCall) -> Expression:
    arguments = operator.arguments
    named = {"padding_idx": arguments["padding_idx"]} if arguments.get("padding_idx", -1) >= 0 else {}
    return operator.function("F.embedding", arguments["indices"], arguments["weight"], **named)


def _normalization(*names: str) -> Spelling:
    """``F.layer_norm(x, (512,), weight, bias, eps=…)``, without the switch for cuDNN."""

    def spell(operator: OperatorCall) -> Expression:
        switches = ("cudnn_enable", "cudnn_enabled")
        kept = {name: value for name, value in operator.arguments.items() if name not in switches}
        positional = [kept.pop(each) for each in names if each in kept]
        return operator.function(f"F.{operator.name}", *positional, **kept)

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
    return operator.function("F.batch_norm", *positional, **named)


def _dropout(operator: OperatorCall) -> Expression:
    library = "torch" if operator.name == "feature_dropout" else "F"
    always = operator.node.meta["in_every_mode"]
    mode = [] if always and operator.name == "dropout" else [True if always else TRAINING]
    values = (operator.arguments["input"], operator.arguments["p"])
    return operator.function(f"{library}.{operator.name}", *values, *mode)


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
    if set(operator.arguments) & {"copy", "memory_format", "other"} or "dtype" not in operator.arguments:
        return None
    dtype = operator.arguments["dtype"]
    return operator.method(operator.arguments["self"], "to", dtype if isinstance(dtype, fx.Node) else value.dtype)


def _softmax(operator: OperatorCall) -> Expression:
    named = {name: operator.arguments[name] for name in ("dim", "dtype") if name in operator.arguments}
    return operator.function(f"F.{operator.name}", operator.arguments["self"], **named)


def _sizes_spread(operator: OperatorCall) -> Expression | None:
    """``x.permute(0, 2, 1)``: each size is an argument."""
    owner, sizes, *others = operator.arguments.values()
    if others or not isinstance(sizes, list):
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
        return operator.method(named.pop("self"), operator.name, *positional, **named)
    return operator.function(f"torch.{operator.name}", *positional, **named)


def _arange(operator: OperatorCall) -> Expression | None:
    """``torch.arange(10)``, without the start 0."""
    named = dict(operator.arguments)
    if named.pop("start", None) != 0 or "step" in named:
        return None
    return operator.function("torch.arange", named.pop("end"), **named)


def _interpolate(operator: OperatorCall, mode: str, antialias: bool) -> Expression | None:
    """``F.interpolate(x, scale_factor=2, mode="bilinear")``, to a size or by a factor."""
    arguments = operator.arguments
    size, factors = arguments.get("output_size"), arguments.get("scale_factors")
    named: dict[str, Any] = {}
    if factors is not None and size is None:
        short = [int(each) if float(each).is_integer() else each for each in factors]
        named["scale_factor"] = short[0] if len(set(short)) == 1 else tuple(short)
    elif size is not None and "scale_factors" in arguments and all(isinstance(each, int) for each in size):
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
    positional = [operator.expression(named.pop(name)) for name in ("self", "target")]
    function = operator.name.removesuffix("_nd")
    function = "cross_entropy" if function == "cross_entropy_loss" else function
    return call(f"F.{function}", *positional, **{name: operator.expression(each) for name, each in named.items()})


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reshape(operator: OperatorCall) -> Expression | None:
    """``x.unflatten(-1, (-1, 64))``, or ``x.view(…)`` with its sizes."""
    owner, *dim, sizes = operator.arguments.values()
    if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
        return None
    before, after = operator.shapes
    if dim:  # an unflatten in the model's source
        position = dim[0] % len(before)
        sizes = [*before[:position], *sizes, *before[position + 1 :]]
    in_full: list[Any] = [*reshape_sizes(before, after, sizes)]
    name, arguments = shortest_reshape(before, after, sizes) or (operator.name, in_full or [()])
    return operator.method(owner, name, *arguments)


def _flatten(operator: OperatorCall) -> Expression | None:
    arguments = operator.arguments
    if "out_dim" in arguments:
        return None
    dims = flatten_dims(arguments.get("start_dim", 0), arguments.get("end_dim", -1), operator.shapes[0])
    return operator.method(arguments["self"], "flatten", *dims)


def _expand(operator: OperatorCall) -> Expression:
    sizes: list[Any] = [*expand_sizes(*operator.shapes)]
    return operator.method(operator.arguments["self"], "expand", *(sizes or [()]))


SPELLINGS: dict[str, Spelling] = {
    "slice": _slice,
    "select": _select,
    "index": index,
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
    "reshape": _reshape,
    "flatten": _flatten,
    "expand": _expand,
    "x.name(*sizes)": _sizes_spread,
    "arange": _arange,
    "filled": _filled,
}
