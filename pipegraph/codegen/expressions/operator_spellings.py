"""The spellings of operators: how a call of an operator becomes an expression of Python.

The column ``spelling`` of ``graph/operators.py`` names the spelling of an operator. ``x + y``, ``-x``, ``x.T`` and
``F.logsigmoid`` are read as they are, with any operator, attribute or function of the same arguments. Every other
spelling is a function, here in ``SPELLINGS``, in ``function_spellings`` or in ``POOL_SPELLINGS``; it returns None for a
call that it cannot express. "F.name" needs no function, and ``operation`` writes ``x[indices] = y``.
"""

from __future__ import annotations

import operator as python_operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Any

import sympy
import torch
from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING, OperatorCall
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
    Template,
    TensorSubscript,
    call,
    conditional,
    literal,
    method,
    unary,
)
from pipegraph.errors import CaptureError
from pipegraph.graph.export.isolation import MOMENTUM_OF_ALL
from pipegraph.graph.nodes import RELATIVE_DTYPE, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import schema_arguments

# ---- function spellings ----------------------------------------------------------------------------------------------
# The spellings of functions whose arguments have another order or form in Python than in the operator.


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


# ---- reshapes --------------------------------------------------------------------------------------------------------
# Reshapes as the method that names the fewest sizes: ``x.unflatten(-1, (-1, 64))``, ``x.flatten(2)``.
#
# The shapes before and after decide which methods fit. A reshape keeps the order of the elements. Therefore all methods
# that give the shape give the same tensor.


Sizes = tuple[int, ...]
MethodCall = tuple[str, list[Any]]


def shortest_reshape(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> MethodCall | None:
    """A method and its arguments that bring a tensor from one shape to another; None if only ``reshape`` does.

    Args:
        shape, target: the shapes.
        sizes: ``target`` as the model's source has it, with −1 for the size that it leaves open. That dimension has a
            meaning even if its size is 1.
    """
    left_open = list(sizes).index(-1) if -1 in sizes else None
    methods = (_unsqueezed, _squeezed, _flattened, _unflattened)
    return next((call for method in methods for call in method(shape, target, left_open)), None)


# Each of these yields the calls of one method that fit. Later dimensions are tried first, because the first dimension
# is the batch, even if its size is 1, and should stay as it is.


def _unsqueezed(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    for dim in reversed(range(len(target))):
        is_batch = dim == 0 and left_open is None and len(target) > 2
        if target[dim] == 1 and dim != left_open and not is_batch and shape == target[:dim] + target[dim + 1 :]:
            yield "unsqueeze", [_from_end(dim, target)]


def _squeezed(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    for dim in reversed(range(1, len(shape))):
        if shape[dim] == 1 and left_open not in (dim - 1, dim) and target == shape[:dim] + shape[dim + 1 :]:
            yield "squeeze", [_from_end(dim, shape)]


def _flattened(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    count = len(shape) - len(target) + 1
    for dim in sorted(range(len(target) * (count > 1)), key=lambda dim: (dim != left_open, -dim)):
        if target == (*shape[:dim], prod(shape[dim : dim + count]), *shape[dim + count :]):
            yield "flatten", _range(dim, dim + count, shape)


def _unflattened(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    count = len(target) - len(shape) + 1
    counted_dim = left_open if left_open is not None else 0 if len(shape) > 1 else None
    for dim in reversed(range(len(shape) * (count > 1))):
        sizes = target[dim : dim + count]
        is_split = sum(size != 1 or dim + place == counted_dim for place, size in enumerate(sizes)) > 1
        if is_split and prod(sizes) == shape[dim] and target == shape[:dim] + sizes + shape[dim + 1 :]:
            position = left_open - dim if left_open is not None and dim <= left_open < dim + count else 0
            yield "unflatten", [_from_end(dim, shape), _with_one_open(sizes, position)]


def squeezed_first(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> tuple[list[int], MethodCall] | None:
    """The arguments of a ``squeeze`` and the method that follows it: ``x.squeeze(1).unflatten(-1, (-1, 64))``.

    None if no dimension of size 1 is in the way of a method that names fewer sizes than ``reshape``.
    """
    for dim in range(1, len(shape) - 1):
        if shape[dim] == 1 and dim < len(sizes) and sizes[dim] != 1:
            squeezed_shape = (*shape[:dim], *shape[dim + 1 :])
            following = shortest_reshape(squeezed_shape, target, sizes)
            if following is not None and following[0] == "unflatten":
                return [dim], following
    return None


def reshape_sizes(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> list[int]:
    """The arguments of ``reshape``: −1 for the batch, unless the source leaves another size open."""
    is_batch = shape[:1] == target[:1] and target[:1] != (1,) if -1 in sizes else len(shape) > 1
    return list(_with_one_open(target, 0)) if is_batch and target else list(sizes)


def expand_sizes(shape: Sizes, target: Sizes) -> list[int]:
    """The arguments of ``expand``: −1 for each size that stays."""
    new = len(target) - len(shape)
    return [size if dim < new or size != shape[dim - new] else -1 for dim, size in enumerate(target)]


def flatten_dims(start: int, end: int, shape: Sizes) -> list[int]:
    """The arguments of ``flatten`` for dimensions ``start`` … ``end``."""
    size = max(len(shape), 1)
    return _range(start % size, end % size + 1, shape)


def _from_end(dim: int, sizes: Sizes) -> int:
    """The number of a dimension; −1 for the last."""
    return -1 if dim == len(sizes) - 1 else dim


def _range(start: int, stop: int, sizes: Sizes) -> list[int]:
    if stop < len(sizes):
        return [start, stop - 1]
    return [start] if start else []


def _with_one_open(sizes: Sizes, position: int) -> Sizes:
    """The sizes with −1 for one of them, if the others determine it (none of them is 0)."""
    product = prod(sizes[:position] + sizes[position + 1 :])
    return (*sizes[:position], -1, *sizes[position + 1 :]) if product else sizes


# ---- pool spellings --------------------------------------------------------------------------------------------------
# The spellings of operators with another form in ``torch.nn.functional``: of pools and bags, which return indices as
# well, and of products of groups.


# The names that arguments have in torch.nn.functional, if they have others there.
_RENAMED = {"random_samples": "_random_samples"}
_MODES = ("sum", "mean", "max")


def _reads_first(operator: OperatorCall) -> bool:
    """Return whether only the first result is read."""
    return all(user.target is python_operator.getitem and user.args[1] == 0 for user in operator.node.users)


def _call(operator: OperatorCall, name: str, positional: Sequence[Any], **named: Any) -> Expression:
    expressions = {keyword: operator.expression(value) for keyword, value in named.items()}
    return call(f"F.{name}", *map(operator.expression, positional), **expressions)


def _max_pool(operator: OperatorCall) -> Expression:
    """``F.adaptive_max_pool2d(x, 3)``, with ``return_indices=True`` if the indices are read."""
    named = {_RENAMED.get(name, name): _short(value) for name, value in operator.arguments.items()}
    positional = [named.pop(name) for name in ("self", "kernel_size", "output_size") if name in named]
    if "kernel_size" in operator.arguments and "output_size" in operator.arguments:
        named = {"output_size": positional.pop(), **named}
    name = operator.name.removesuffix("_with_indices")
    if _reads_first(operator):
        return Collection((_call(operator, name, positional, **named),), "()")
    return _call(operator, name, positional, **named, return_indices=True)


def _short(value: Any) -> Any:
    """``3`` for ``[3, 3]``, and a tuple for any other list."""
    if not isinstance(value, list) or not value:
        return value
    is_uniform = all(size == value[0] for size in value) and not any(isinstance(size, SymbolicSize) for size in value)
    return value[0] if is_uniform else tuple(value)


def _max_unpool(operator: OperatorCall) -> Expression | None:
    """``F.max_unpool2d(x, indices, 2)``, with ``output_size=…`` if that is not a multiple of the size of ``x``.

    The operator has no windows. Any windows that give its output size are right.
    """
    arguments = operator.arguments
    shape, _ = operator.shapes
    sizes = list(arguments["output_size"])
    pairs = list(zip(shape[-len(sizes) :], sizes, strict=True))
    windows = [int(size) // int(input_size) for input_size, size in pairs]
    if not all(int(size) % int(input_size) < window for (input_size, size), window in zip(pairs, windows, strict=True)):
        return None  # the function takes no such size
    exact = (_is_multiple(size, input_size, window) for (input_size, size), window in zip(pairs, windows, strict=True))
    named = {} if all(exact) else {"output_size": tuple(sizes)}
    return _call(operator, operator.name, [arguments["self"], arguments["indices"], _short(windows)], **named)


def _is_multiple(size: int, base: int, window: int) -> bool:
    """Return whether ``size`` is always ``window`` times ``base``."""
    total, unit = (term.expression if isinstance(term, SymbolicSize) else sympy.Integer(term) for term in (size, base))
    return bool(sympy.simplify(total - unit * window) == 0)


def _embedding_bag(operator: OperatorCall) -> Expression | None:
    """``F.embedding_bag(tokens, weight, offsets, mode="sum")``, if only the bags are read."""
    named = dict(operator.arguments)
    if not _reads_first(operator):
        return None
    positional = [named.pop(name) for name in ("indices", "weight", "offsets")]
    mode, ignored = _MODES[named.pop("mode", 0)], named.pop("padding_idx", None)
    named = {"mode": mode, **{name: value for name, value in named.items() if value not in (None, False)}}
    named |= {"padding_idx": ignored} if ignored is not None and ignored >= 0 else {}
    return Collection((_call(operator, "embedding_bag", positional, **named),), "()")


def _grouped_mm(operator: OperatorCall) -> Expression:
    """``F.grouped_mm(x, weight, offs=offsets)``."""
    named = dict(operator.arguments)
    return _call(operator, "grouped_mm", [named.pop("self"), named.pop("mat2")], **named)


POOL_SPELLINGS: dict[str, Spelling] = {
    "max_pool": _max_pool,
    "max_unpool": _max_unpool,
    "embedding_bag": _embedding_bag,
    "grouped_mm": _grouped_mm,
}


# ---- operator spellings ----------------------------------------------------------------------------------------------


aten = torch.ops.aten


def spelling_function(spelling: str) -> Spelling | None:
    """The function of a spelling; None if it has none."""
    match spelling.split():
        case ["interpolate", mode, *options]:
            return partial(interpolate, mode=mode, antialias=bool(options))
        case ["x", symbol, "y"]:
            return partial(_binary, symbol=symbol)
        case ["y", symbol, "x"]:
            return partial(_binary, symbol=symbol, swapped=True)
        case ["-x" | "~x"]:
            return partial(_unary, symbol=spelling[0])
    if spelling.startswith("x.") and spelling.removeprefix("x.").isidentifier():
        return partial(_attribute, name=spelling.removeprefix("x."))
    if spelling.startswith(("torch.", "F.")) and spelling.split(".")[1].isidentifier() and spelling != "F.name":
        return partial(_renamed, name=spelling)
    return SPELLINGS.get(spelling)


# ---- operators -------------------------------------------------------------------------------------------------------


def _binary(operator: OperatorCall, symbol: str, swapped: bool = False) -> Expression | None:
    if set(operator.arguments) - {"self", "other", "exponent", "mat2"}:
        return None
    left_operand, right = map(operator.expression, operator.arguments.values())
    return Binary(symbol, right, left_operand) if swapped else Binary(symbol, left_operand, right)


def _unary(operator: OperatorCall, symbol: str) -> Expression:
    operand = operator.expression(operator.arguments["self"])
    if operand.within(ATOM).startswith(f"({symbol}"):
        return method(operand, operator.name)
    return unary(symbol, operand)


def _attribute(operator: OperatorCall, name: str) -> Expression:
    return Attribute(operator.expression(operator.arguments["self"]), name)


def _renamed(operator: OperatorCall, name: str) -> Expression:
    return operator.function(name, *operator.arguments.values())


# ---- subscripts ------------------------------------------------------------------------------------------------------


def _slice(operator: OperatorCall) -> Expression | None:
    start, end, step = (operator.arguments.get(name) for name in ("start", "end", "step"))
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    stop = None if end is None or end >= 2**62 else operator.expression(end)
    bounds = Slice(operator.expression(start) if start else None, stop, literal(step) if step is not None else None)
    return _subscript(operator, operator.arguments.get("dim", 0), bounds)


def _select(operator: OperatorCall) -> Expression:
    return _subscript(operator, operator.arguments["dim"], operator.expression(operator.arguments["index"]))


def _subscript(operator: OperatorCall, dim: int, index: Expression) -> Expression:
    """``x[:, index]``, or ``x[..., index]`` for the last of three or more dimensions; ``x[:, :n, index]`` of
    ``x[:, :n]``."""
    size = len(operator.shapes[0])
    owner, dims = operator.expression(operator.node.args[0]), [*range(size)]
    indices: list[Expression] = [Slice() for _ in dims]
    if isinstance(owner, TensorSubscript):
        inner = owner.of_dimensions(size)
        remaining_dims = [at for at, inner_index in enumerate(inner) if isinstance(inner_index, Slice)]
        if inner[remaining_dims[dim]] == Slice():
            owner, indices, dims = owner.owner, inner, remaining_dims
    indices[dims[dim]] = index
    while len(indices) > 1 and indices[-1] == Slice():
        indices.pop()
    leading_count = len(indices) - 1
    if leading_count >= 2 and leading_count == dims[-1] and indices[:-1] == [Slice()] * leading_count:
        indices[:-1] = [literal(...)]
    return TensorSubscript(owner, tuple(indices))


def index(operator: OperatorCall) -> Subscript | None:
    """``x[:, positions]``."""
    indices = [Slice() if node is None else _index(operator.expression(node)) for node in operator.arguments["indices"]]
    while indices and indices[-1] == Slice():
        indices.pop()
    return Subscript(operator.expression(operator.arguments["self"]), tuple(indices)) if indices else None


def _stack(operator: OperatorCall) -> Expression | None:
    """``[1, 0]`` for numbers that are a list of indices; any other stack is the function."""
    arguments = operator.arguments
    parts = [node for node in arguments["tensors"] if node.target is aten.full.default and not shape_of(node)]
    is_list = len(parts) == len(arguments["tensors"]) and "dim" not in arguments
    if not is_list or any(
        operator_of(user).spelling not in ("index", "x[indices] = y") for user in operator.node.users
    ):
        return None
    return literal([node.args[1] for node in parts])


def _index(value: Expression) -> Expression:
    """``[-1]`` for ``torch.full((1,), -1)``."""
    if not isinstance(value, FunctionCall) or value.function != Name("torch.full"):
        return value
    shape, number, *_ = value.arguments
    return Collection((number.value,), "[]") if shape.value == literal((1,)) else value


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reshape(operator: OperatorCall) -> Expression | None:
    """``x.unflatten(-1, (-1, 64))``, or ``x.view(…)`` with its sizes."""
    owner, *dim, sizes = operator.arguments.values()
    if not isinstance(sizes, list) or not all(isinstance(size, int) for size in sizes):
        return None
    shape, new_shape = operator.shapes
    if dim:  # an unflatten in the model's source
        position = dim[0] % len(shape)
        sizes = [*shape[:position], *sizes, *shape[position + 1 :]]
    method_call = shortest_reshape(shape, new_shape, sizes)
    if method_call is None and (two := squeezed_first(shape, new_shape, sizes)) is not None:
        squeeze, (name, arguments) = two
        squeezed = operator.method(owner, "squeeze", *squeeze)
        return method(squeezed, name, *map(operator.expression, arguments))
    in_full: list[Any] = [*reshape_sizes(shape, new_shape, sizes)]
    name, arguments = method_call or (operator.name, in_full or [()])
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


def _split(operator: OperatorCall) -> Expression:
    """``x.split([2, 3], dim=1)``."""
    named = dict(operator.arguments)
    return operator.method(named.pop("self"), "split", named.pop("split_sizes"), **named)


SPELLINGS: dict[str, Spelling] = {
    **FUNCTION_SPELLINGS,
    **POOL_SPELLINGS,
    "slice": _slice,
    "select": _select,
    "index": index,
    "stack": _stack,
    "reshape": _reshape,
    "flatten": _flatten,
    "expand": _expand,
    "split": _split,
}
