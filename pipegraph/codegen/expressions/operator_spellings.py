"""ATen operations that Python writes with an operator, a subscript, or a function whose arguments it orders otherwise.

A form takes the node, its arguments by name (those equal to their default left out) and a writer; it gives nothing
where the node uses the operation in a way that the form cannot say.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.expressions.interpolation import INTERPOLATIONS
from pipegraph.codegen.expressions.reshapes import expanded, merged, reshaped, spelled
from pipegraph.codegen.syntax.expression import (
    AND,
    ATOM,
    COMPARE,
    OR,
    POWER,
    PRODUCT,
    SUM,
    UNARY,
    XOR,
    Expression,
    Form,
    Writer,
)
from pipegraph.codegen.syntax.literals import literal

# Operands around which a formatter leaves no space: x**2.
_SIMPLE = re.compile(r"-?[\w.]+(\*\*-?[\w.]+)*")


# ---- operators -------------------------------------------------------------------------------------------------------


def _binary(symbol: str, strength: int) -> Form:
    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        if set(arguments) - {"self", "other", "exponent", "mat2"}:
            return None
        left, right = list(arguments.values())[:2]
        looser, tighter = (strength + 1, strength) if symbol == "**" else (strength, strength + 1)
        if strength == COMPARE:
            looser = tighter = COMPARE + 1
        operands = writer.operand(left, looser), writer.operand(right, tighter)
        close = symbol == "**" and all(_SIMPLE.fullmatch(each) for each in operands)
        return Expression((symbol if close else f" {symbol} ").join(operands), strength)

    return write


def _reversed_subtraction(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    if set(arguments) != {"self", "other"}:
        return None
    text = f"{writer.operand(arguments['other'], SUM)} - {writer.operand(arguments['self'], SUM + 1)}"
    return Expression(text, SUM)


def _unary(symbol: str) -> Form:
    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        operand = writer.operand(arguments["self"], ATOM)
        if operand.startswith(f"({symbol}"):
            return Expression(f"{operand}.{node.target._opname}()")  # type: ignore[union-attr]
        return Expression(f"{symbol}{operand}", UNARY)

    return write


def _property(name: str) -> Form:
    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        return Expression(f"{writer.operand(arguments['self'], ATOM)}.{name}")

    return write


# ---- subscripts ------------------------------------------------------------------------------------------------------


def _slice(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    size = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    start, end, step = arguments.get("start"), arguments.get("end"), arguments.get("step", 1)
    if isinstance(start, fx.Node) or isinstance(end, fx.Node):
        return None
    first = "" if start in (None, 0) else str(start)
    last = "" if end is None or end >= 2**62 else str(end)
    part = f"{first}:{last}" + (f":{step}" if step != 1 else "")
    return _subscript(writer, node.args[0], arguments.get("dim", 0), size, part)


def _select(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    size = node.args[0].meta["val"].dim()  # type: ignore[union-attr]
    return _subscript(writer, node.args[0], arguments["dim"], size, str(arguments["index"]))


def _subscript(writer: Writer, owner: Any, dim: int, size: int, part: str) -> Expression:
    """``x[:, part]``, or ``x[..., part]`` for the last of three or more dimensions."""
    dim %= size
    last = dim == size - 1 and dim >= 2
    inside = f"..., {part}" if last else ", ".join([":"] * dim + [part])
    return Expression(f"{writer.operand(owner, ATOM)}[{inside}]")


def _index(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    parts = [":" if part is None else writer.argument(part) for part in arguments["indices"]]
    while parts and parts[-1] == ":":
        parts.pop()
    return Expression(f"{writer.operand(arguments['self'], ATOM)}[{', '.join(parts)}]") if parts else None


def _index_put(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """``x[:, index] = value``, of a write."""
    indices = arguments["indices"]
    if "writes" not in node.meta or "accumulate" in arguments or all(part is None for part in indices):
        return None
    owner = _index(node, arguments, writer)
    return Expression(f"{owner.text} = {writer.argument(arguments['values'])}") if owner is not None else None


# ---- functions whose arguments torch.nn.functional orders otherwise --------------------------------------------------


def _embedding(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    named = {"padding_idx": arguments["padding_idx"]} if arguments.get("padding_idx", -1) >= 0 else {}
    return writer.call("F.embedding", [arguments["indices"], arguments["weight"]], named)


def _normalization(*names: str) -> Form:
    """``F.layer_norm(x, (512,), weight, bias, eps=…)``; cuDNN's switch is left out."""

    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        kept = {name: value for name, value in arguments.items() if name not in ("cudnn_enable", "cudnn_enabled")}
        name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
        positional = [kept.pop(each) for each in names if each in kept]
        return writer.call(f"F.{name}", positional, kept)

    return write


def _linear(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    return writer.call("F.linear", list(arguments.values()), {})


def _batch_norm(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    order = ("input", "running_mean", "running_var")
    named = {name: arguments[name] for name in ("weight", "bias") if arguments.get(name) is not None}
    text = writer.call("F.batch_norm", [arguments.get(name) for name in order], named).text[:-1]
    # Without running statistics there is only one mode.
    training = "self.training" if arguments.get("running_mean") is not None else "True"
    return Expression(f"{text}, training={training}, momentum={arguments['momentum']}, eps={arguments['eps']})")


def _dropout(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    library = "torch" if name == "feature_dropout" else "F"
    mode = "self.training"
    if node.meta["in_every_mode"]:
        if name == "dropout":
            return Expression(f"F.dropout({writer.argument(arguments['input'])}, {arguments['p']})")
        mode = "True"
    return Expression(f"{library}.{name}({writer.argument(arguments['input'])}, {arguments['p']}, {mode})")


def _attention(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    given = dict(arguments)
    positional = [given.pop(name) for name in ("query", "key", "value")]
    dropout = given.pop("dropout_p", 0.0)
    if _is_usual_scale(arguments["query"], given.get("scale")):
        del given["scale"]
    text = writer.call("F.scaled_dot_product_attention", positional, given).text
    if dropout:
        mode = "" if node.meta["in_every_mode"] else " if self.training else 0.0"
        text = f"{text[:-1]}, dropout_p={literal(dropout)}{mode})"
    return Expression(text)


def _is_usual_scale(query: fx.Node, scale: float | None) -> bool:
    """Whether attention divides by the root of the size of a head, which it does unasked. Its kernels compute in
    float32, or in float64."""
    value = query.meta["val"]
    dtype = torch.promote_types(value.dtype, torch.float32)
    usual = value.shape[-1] ** -0.5
    return scale is not None and torch.equal(torch.tensor(scale, dtype=dtype), torch.tensor(usual, dtype=dtype))


def _cast(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    source, value = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if set(arguments) & {"copy", "memory_format", "other"} or value.dtype == source.dtype:
        return None
    return writer.method(arguments["self"], "to", [value.dtype], {})


def _softmax(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    named: dict[str, Any] = {key: arguments[key] for key in ("dim", "dtype") if key in arguments}
    return writer.call(f"F.{name}", [arguments["self"]], named)


def _spread(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """``x.permute(0, 2, 1)``: sizes as arguments of their own."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    owner, sizes, *others = arguments.values()
    if others or not isinstance(sizes, list):
        return None
    return writer.method(owner, name, sizes or [()], {})


def _filled(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """``torch.zeros(2, 3, device=…)``, ``x.new_full((2, 3), 1.0)``."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    sizes = arguments.pop("size")
    if not all(isinstance(size, int) for size in sizes):
        return None
    value = [arguments.pop("fill_value")] if "fill_value" in arguments else []
    positional = [tuple(sizes), *value] if value or not sizes else sizes
    if "self" in arguments:
        return writer.method(arguments.pop("self"), name, positional, arguments)
    return writer.call(f"torch.{name}", positional, arguments)


def _arange(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """``torch.arange(10)``, which needs no start."""
    if arguments.get("start") != 0 or "step" in arguments:
        return None
    named = {name: value for name, value in arguments.items() if name not in ("start", "end")}
    return writer.call("torch.arange", [arguments["end"]], named)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reshape(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """``x.unflatten(-1, (-1, 64))``, or ``x.view(…)`` with its sizes."""
    owner, *dim, given = arguments.values()
    if not isinstance(given, list) or not all(isinstance(size, int) for size in given):
        return None
    before, after = _shapes(node)
    if dim:  # an unflatten in the model's source
        position = dim[0] % len(before)
        given = [*before[:position], *given, *before[position + 1 :]]
    words = reshaped(before, after, given)
    if words is None:
        name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
        words = name, spelled(before, after, given) or [()]
    return writer.method(owner, *words, {})


def _flatten(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    if "out_dim" in arguments:
        return None
    dims = merged(arguments.get("start_dim", 0), arguments.get("end_dim", -1), _shapes(node)[0])
    return writer.method(arguments["self"], "flatten", dims, {})


def _expand(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    return writer.method(arguments["self"], "expand", expanded(*_shapes(node)) or [()], {})


def _shapes(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(node.args[0].meta["val"].shape), tuple(node.meta["val"].shape)  # type: ignore[union-attr]


FORMS: dict[str, Form] = {
    "x + y": _binary("+", SUM),
    "x - y": _binary("-", SUM),
    "y - x": _reversed_subtraction,
    "x * y": _binary("*", PRODUCT),
    "x / y": _binary("/", PRODUCT),
    "x @ y": _binary("@", PRODUCT),
    "x % y": _binary("%", PRODUCT),
    "x ** y": _binary("**", POWER),
    "x & y": _binary("&", AND),
    "x | y": _binary("|", OR),
    "x ^ y": _binary("^", XOR),
    "x == y": _binary("==", COMPARE),
    "x != y": _binary("!=", COMPARE),
    "x < y": _binary("<", COMPARE),
    "x <= y": _binary("<=", COMPARE),
    "x > y": _binary(">", COMPARE),
    "x >= y": _binary(">=", COMPARE),
    "-x": _unary("-"),
    "~x": _unary("~"),
    "x.T": _property("T"),
    "x.mT": _property("mT"),
    "x.mH": _property("mH"),
    "slice": _slice,
    "select": _select,
    "index": _index,
    "index_put_": _index_put,
    "embedding": _embedding,
    "linear": _linear,
    "layer_norm": _normalization("input", "normalized_shape", "weight", "bias"),
    "group_norm": _normalization("input", "num_groups", "weight", "bias"),
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "attention": _attention,
    "cast": _cast,
    "softmax": _softmax,
    **INTERPOLATIONS,
    "reshape": _reshape,
    "flatten": _flatten,
    "expand": _expand,
    "x.name(*sizes)": _spread,
    "arange": _arange,
    "filled": _filled,
}
"""What the column ``spelling`` of ``graph/operators.py`` stands for; "F.name" needs no form."""
