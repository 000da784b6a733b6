"""One ATen operation as the expression a person would write."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import fx

from pipegraph.codegen.expressions.operator_spellings import FORMS
from pipegraph.codegen.syntax.expression import ATOM, Expression, Writer
from pipegraph.graph.nodes import on_meta
from pipegraph.graph.operators import operator_of

# What Python's numbers become, and float32 as in every other constructor of a package.
_USUAL_DTYPES = (torch.float32, torch.int64, torch.bool)


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
        special = FORMS.get(operator_of(node).spelling)
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
    if bound.get("dtype") in _USUAL_DTYPES and _has_dtype_without(node, bound):
        del bound["dtype"]
    return bound


def _has_dtype_without(node: fx.Node, bound: dict[str, Any]) -> bool:
    """Whether an operation gives the dtype that it is asked for in any case, as ``arange(10)`` gives integers."""
    others = {name: torch.device("meta") if name == "device" else value for name, value in bound.items()}
    others.pop("dtype")
    try:
        with torch.no_grad():
            made = node.target(**fx.map_arg(others, on_meta))  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(made.dtype == bound["dtype"])


class _Training:
    """An argument that follows the mode of the module, as the model's own code has it."""


def _required(node: fx.Node) -> list[str]:
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return [argument.name for argument in arguments if not argument.has_default_value() and not argument.kwarg_only]


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
            or (prefix == "F" and operator_of(node).spelling != "F.name")
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
        arguments = fx.map_arg(tuple(value for _, value in positional), on_meta)
        keywords = {
            key: torch.device("meta") if isinstance(value, torch.device) else value
            for key, value in fx.map_arg(named, on_meta).items()
        }
        with torch.no_grad():
            result = function(*arguments, **keywords)
    except (TypeError, RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    return _signature(result) == _signature(expected)


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
