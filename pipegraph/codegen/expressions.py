"""One ATen operation as the expression a person would write."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional
from torch import fx

from pipegraph.codegen.literals import literal

# Operands around which a formatter leaves no space: x**2.
_SIMPLE = re.compile(r"-?[\w.]+")

# Binding strengths of Python's operators; an operand of a weaker one is put into brackets.
ATOM, POWER, UNARY, PRODUCT, SUM, AND, XOR, OR, COMPARE = 20, 15, 14, 13, 12, 10, 9, 8, 7


@dataclass(frozen=True)
class Expression:
    """Source text and how strongly its outermost operator binds."""

    text: str
    strength: int = ATOM

    def within(self, strength: int) -> str:
        """The text as an operand of an operator of that strength."""
        return self.text if self.strength >= strength else f"({self.text})"


@dataclass(frozen=True)
class Writer:
    """What an expression needs from its surroundings.

    Attributes:
        value: the expression of an argument.
        device: an expression for the device of the stage, where an operation names one.
    """

    value: Callable[[fx.Node], Expression]
    device: str

    def argument(self, argument: Any) -> str:
        """An argument of any kind as it stands in a call."""
        if isinstance(argument, fx.Node):
            return self.value(argument).text
        if isinstance(argument, torch.device):
            return self.device
        if isinstance(argument, tuple):
            return f"({', '.join(map(self.argument, argument))}{',' if len(argument) == 1 else ''})"
        if isinstance(argument, list):
            return f"[{', '.join(map(self.argument, argument))}]"
        return literal(argument)

    def operand(self, argument: Any, strength: int) -> str:
        """An argument as an operand."""
        if isinstance(argument, fx.Node):
            return self.value(argument).within(strength)
        text = literal(argument)
        return f"({text})" if text.startswith("-") and (strength > POWER or strength == SUM + 1) else text

    def call(self, name: str, positional: Sequence[Any], named: dict[str, Any]) -> Expression:
        """``name(positional…, named=…)``."""
        parts = [*map(self.argument, positional), *(f"{key}={self.argument(value)}" for key, value in named.items())]
        return Expression(f"{name}({', '.join(parts)})")

    def method(self, owner: Any, name: str, positional: Sequence[Any], named: dict[str, Any]) -> Expression:
        """``owner.name(…)``."""
        return self.call(f"{self.operand(owner, ATOM)}.{name}", positional, named)


def express(node: fx.Node, writer: Writer) -> Expression:
    """The expression of an operation: an operator, a method, a function of ``torch`` or ``F``, or, for what has no
    nicer form, ``torch.ops``."""
    if node.target is operator.getitem:
        return Expression(f"{writer.operand(node.args[0], ATOM)}[{node.args[1]}]")
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    arguments = _bind(node)
    if target.namespace == "aten":
        name = target._schema.name.removeprefix("aten::")
        special = _SPECIAL.get(name)
        written = special(node, arguments, writer) if special is not None else None
        if written is None:
            written = _generic(node, name, arguments, writer)
        if written is not None:
            return written
    return _operator(node, writer)


def _bind(node: fx.Node) -> dict[str, Any]:
    """The arguments by name; those equal to their default are left out."""
    bound: dict[str, Any] = {}
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if position < len(node.args):
            value: Any = node.args[position]
        elif argument.name in node.kwargs:
            value = node.kwargs[argument.name]
        else:
            continue
        value = list(value) if isinstance(value, (tuple, list)) else value
        if argument.has_default_value() and not isinstance(value, fx.Node) and value == argument.default_value:
            continue
        if argument.name == "pin_memory" or (argument.name == "layout" and value == torch.strided):
            continue
        if argument.name in ("train", "training") and isinstance(value, bool) and not node.meta["in_every_mode"]:
            value = _Training()
        bound[argument.name] = value
    return bound


class _Training:
    """An argument that follows the mode of the module, as the model's own code has it."""


def _required(node: fx.Node) -> list[str]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return [argument.name for argument in arguments if not argument.has_default_value() and not argument.kwarg_only]


# ---- operators -------------------------------------------------------------------------------------------------------


def _binary(symbol: str, strength: int) -> Callable[..., Expression | None]:
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


def _unary(symbol: str) -> Callable[..., Expression | None]:
    def write(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
        return Expression(f"{symbol}{writer.operand(arguments['self'], ATOM)}", UNARY)

    return write


def _property(name: str) -> Callable[..., Expression | None]:
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


# ---- functions whose arguments torch.nn.functional orders otherwise --------------------------------------------------


def _embedding(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    named = {"padding_idx": arguments["padding_idx"]} if arguments.get("padding_idx", -1) >= 0 else {}
    return writer.call("F.embedding", [arguments["indices"], arguments["weight"]], named)


def _normalization(*names: str) -> Callable[..., Expression | None]:
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
    mode = "" if node.meta["in_every_mode"] else ", self.training"
    return Expression(f"F.{name}({writer.argument(arguments['input'])}, {arguments['p']}{mode})")


def _attention(node: fx.Node, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    given = dict(arguments)
    positional = [given.pop(name) for name in ("query", "key", "value")]
    dropout = given.pop("dropout_p", 0.0)
    text = writer.call("F.scaled_dot_product_attention", positional, given).text
    if dropout:
        mode = "" if node.meta["in_every_mode"] else " if self.training else 0.0"
        text = f"{text[:-1]}, dropout_p={literal(dropout)}{mode})"
    return Expression(text)


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
    """``x.view(b, t, -1)``: sizes as arguments of their own."""
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    owner, sizes, *others = arguments.values()
    if others or not isinstance(sizes, list):
        return None
    return writer.method(owner, name, sizes or [[]], {})


_SPECIAL: dict[str, Callable[[fx.Node, dict[str, Any], Writer], Expression | None]] = {
    "add": _binary("+", SUM),
    "sub": _binary("-", SUM),
    "mul": _binary("*", PRODUCT),
    "div": _binary("/", PRODUCT),
    "matmul": _binary("@", PRODUCT),
    "remainder": _binary("%", PRODUCT),
    "pow": _binary("**", POWER),
    "__and__": _binary("&", AND),
    "bitwise_and": _binary("&", AND),
    "__or__": _binary("|", OR),
    "bitwise_or": _binary("|", OR),
    "__xor__": _binary("^", XOR),
    "bitwise_xor": _binary("^", XOR),
    "eq": _binary("==", COMPARE),
    "ne": _binary("!=", COMPARE),
    "lt": _binary("<", COMPARE),
    "le": _binary("<=", COMPARE),
    "gt": _binary(">", COMPARE),
    "ge": _binary(">=", COMPARE),
    "rsub": _reversed_subtraction,
    "numpy_T": _property("T"),
    "mT": _property("mT"),
    "mH": _property("mH"),
    "neg": _unary("-"),
    "bitwise_not": _unary("~"),
    "slice": _slice,
    "select": _select,
    "index": _index,
    "embedding": _embedding,
    "linear": _linear,
    "layer_norm": _normalization("input", "normalized_shape", "weight", "bias"),
    "group_norm": _normalization("input", "num_groups", "weight", "bias"),
    "batch_norm": _batch_norm,
    "dropout": _dropout,
    "feature_dropout": _dropout,
    "alpha_dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "to": _cast,
    "softmax": _softmax,
    "log_softmax": _softmax,
    "view": _spread,
    "reshape": _spread,
    "permute": _spread,
    "expand": _spread,
    "repeat": _spread,
}


# ---- everything else -------------------------------------------------------------------------------------------------

# Functions that read better with their library's name than as a method.
_FUNCTIONAL = frozenset(
    [
        "conv1d",
        "conv2d",
        "conv3d",
        "relu",
        "silu",
        "gelu",
        "leaky_relu",
        "elu",
        "celu",
        "selu",
        "mish",
        "hardswish",
        "hardsigmoid",
        "hardtanh",
        "softplus",
        "glu",
        "logsigmoid",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
        "pad",
        "one_hot",
        "rms_norm",
        "bilinear",
        "pixel_shuffle",
        "cosine_similarity",
    ]
)


# Where Python has an operation, how it is called there, and how the names of its operations begin.
_LIBRARIES: tuple[tuple[Any, str, str], ...] = (
    (torch.linalg, "torch.linalg", "linalg_"),
    (torch.special, "torch.special", "special_"),
    (torch.fft, "torch.fft", "fft_"),
    (torch.nn.functional, "F", ""),
    (torch.Tensor, "", ""),
    (torch, "torch", ""),
)


def _generic(node: fx.Node, name: str, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    """A call of ``F.name``, of the method or of ``torch.name``, whichever exists and, run on meta tensors, gives what
    the operation gives. Arguments with a default go by name."""
    if any(isinstance(value, _Training) for value in arguments.values()) or "writes" in node.meta:
        return _write(node, name, arguments, writer) if "writes" in node.meta else None
    required = _required(node)
    values = [_single(node, key, arguments.get(key)) for key in required]
    positional = list(zip(required, values, strict=True))
    named = {key: value for key, value in arguments.items() if key not in required}
    first = node.target._schema.arguments[0].name if node.target._schema.arguments else ""  # type: ignore[union-attr]
    for owner, prefix, start in _LIBRARIES:
        if (
            not name.startswith(start)
            or (prefix == "F" and name not in _FUNCTIONAL)
            or (not prefix and first != "self")
        ):
            continue
        python_name = name.removeprefix(start)
        function = getattr(owner, python_name, None)
        if name.startswith("_") or function is None or not _gives_the_same(node, function, positional, named):
            continue
        if prefix:
            return writer.call(f"{prefix}.{python_name}", [value for _, value in positional], named)
        return writer.method(positional[0][1], python_name, [value for _, value in positional[1:]], named)
    return None


def _single(node: fx.Node, name: str, value: Any) -> Any:
    """``[-1]`` as ``-1`` where the schema spreads one number (``int[1] dim``)."""
    argument = next(entry for entry in node.target._schema.arguments if entry.name == name)  # type: ignore[union-attr]
    one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], int)
    return value[0] if one and argument.N is not None else value


def _gives_the_same(node: fx.Node, function: Any, positional: Sequence[Any], named: dict[str, Any]) -> bool:
    """Try a Python form on meta tensors, so that no form is written that torch would refuse or read otherwise."""
    expected = node.meta.get("val")
    try:
        arguments = fx.map_arg(tuple(value for _, value in positional), _meta)
        keywords = {
            key: torch.device("meta") if isinstance(value, torch.device) else value
            for key, value in fx.map_arg(named, _meta).items()
        }
        with torch.no_grad():
            result = function(*arguments, **keywords)
    except (TypeError, RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    return _signature(result) == _signature(expected)


def _meta(node: fx.Node) -> Any:
    def empty(value: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")

    return torch.utils._pytree.tree_map_only(torch.Tensor, empty, node.meta.get("val"))


def _signature(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_signature(part) for part in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _write(node: fx.Node, name: str, arguments: dict[str, Any], writer: Writer) -> Expression | None:
    if "self" not in arguments or "out" in arguments or not hasattr(torch.Tensor, name):
        return None
    others = {key: value for key, value in arguments.items() if key != "self"}
    positional = [others.pop(key) for key in list(others) if key in _required(node)]
    return writer.method(arguments["self"], name, positional, others)


def _operator(node: fx.Node, writer: Writer) -> Expression:
    """``torch.ops.aten.name.overload(…)``, which takes just what the graph holds."""
    parts = []
    for position, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        training = argument.name in ("train", "training") and not node.meta["in_every_mode"]
        if position < len(node.args) and not argument.kwarg_only:
            value = node.args[position]
            parts.append("self.training" if training and isinstance(value, bool) else writer.argument(value))
        elif argument.name in node.kwargs and argument.name != "pin_memory":
            parts.append(f"{argument.name}={writer.argument(node.kwargs[argument.name])}")
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    return Expression(f"torch.ops.{target.namespace}.{target._opname}.{target._overloadname}({', '.join(parts)})")
