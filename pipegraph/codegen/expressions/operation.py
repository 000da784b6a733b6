"""One operation of a captured graph as the expression or the statement that a person would write."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING, OperatorCall, follows_mode
from pipegraph.codegen.expressions.operator_spellings import index, spelling_function
from pipegraph.codegen.syntax.expressions import Attribute, Expression, FunctionCall, Subscript, call, literal
from pipegraph.codegen.syntax.statements import Assign, Evaluate, Statement
from pipegraph.graph.internals import operator_name, schema_arguments
from pipegraph.graph.nodes import on_meta
from pipegraph.graph.operators import operator_of


def express(node: fx.Node, value: Callable[[fx.Node], Expression], device: Expression) -> Expression:
    """The expression of an operation: an operator, a method, a function of ``torch`` or ``F``, or, if there is none,
    ``torch.ops``.

    Args:
        value: gives the expression of a value.
        device: the expression of the device that the class runs on.
    """
    if node.target is operator.getitem:
        owner, position = node.args
        assert isinstance(owner, fx.Node)
        return Subscript(value(owner), (literal(position),))
    called = OperatorCall.of(node, value, device)
    if called.target.namespace != "aten":
        return _by_overload(called)
    spell = spelling_function(operator_of(node).spelling)
    return (spell and spell(called)) or _by_name(called) or _by_overload(called)


def write(node: fx.Node, value: Callable[[fx.Node], Expression], device: Expression) -> Statement:
    """The statement of an operation that changes a tensor in place; the arguments are those of ``express``."""
    called = OperatorCall.of(node, value, device)
    given = dict(called.arguments)
    spelling = operator_of(node).spelling
    owner = called.expression(given.get("self"))
    if spelling == "x[…] = y" and isinstance(owner, Subscript):
        return Assign((owner,), called.expression(node.args[1]))
    if spelling == "x[indices] = y" and "accumulate" not in given and (place := index(called)) is not None:
        return Assign((place,), called.expression(given["values"]))
    if called.target.namespace != "aten" or "self" not in given or "out" in given:
        return Evaluate(_by_overload(called))
    if not hasattr(torch.Tensor, called.name):
        return Evaluate(_by_overload(called))
    tensor = given.pop("self")
    positional = [given.pop(name) for name in list(given) if name in called.required]
    return Evaluate(called.method(tensor, called.name, *positional, **given))


# Where Python has an operator, how it is called there, and how the names of such operators begin.
_LIBRARIES: tuple[tuple[Any, str, str], ...] = (
    (torch.linalg, "torch.linalg", "linalg_"),
    (torch.special, "torch.special", "special_"),
    (torch.fft, "torch.fft", "fft_"),
    (torch.nn.functional, "F", ""),
    (torch.Tensor, "", ""),
    (torch, "torch", ""),
)


def _by_name(called: OperatorCall) -> Expression | None:
    """A call of ``F.name``, of the method or of ``torch.name``: the first that exists and, run on meta tensors, gives
    what the operation gives. Arguments with a default go by name."""
    given, schema = called.arguments, schema_arguments(called.target)
    if TRAINING in given.values() or called.name.startswith("_"):
        return None
    positional = [_single(called, name, given.get(name)) for name in called.required]
    named = {name: value for name, value in given.items() if name not in called.required}
    is_method = bool(schema) and schema[0].name == "self"
    for owner, library, start in _LIBRARIES:
        if not called.name.startswith(start) or (library == "F" and operator_of(called.node).spelling != "F.name"):
            continue
        name = called.name.removeprefix(start)
        function = getattr(owner, name, None)
        if (not library and not is_method) or function is None:
            continue
        if _gives_the_same(called.node, function, positional, named):
            if library:
                return called.function(f"{library}.{name}", *positional, **named)
            return called.method(positional[0], name, *positional[1:], **named)
    return None


def _single(called: OperatorCall, name: str, value: Any) -> Any:
    """``[-1]`` as ``-1`` if the schema spreads one number (``int[1] dim``)."""
    argument = next(entry for entry in schema_arguments(called.target) if entry.name == name)
    one = isinstance(value, list) and len(value) == 1 and isinstance(value[0], int)
    return value[0] if one and argument.N is not None else value


def _gives_the_same(node: fx.Node, function: Any, positional: Sequence[Any], named: dict[str, Any]) -> bool:
    """Whether a Python function, tried on meta tensors, takes these arguments and gives what the operation gives."""
    try:
        arguments, keywords = fx.map_arg((tuple(positional), named), on_meta)
        devices = {name: torch.device("meta") for name, value in named.items() if isinstance(value, torch.device)}
        with torch.no_grad():
            result = function(*arguments, **{**keywords, **devices})
    except (TypeError, RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    return _signature(result) == _signature(node.meta.get("val"))


def _signature(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_signature(part) for part in value]
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _by_overload(called: OperatorCall) -> FunctionCall:
    """``torch.ops.aten.name.overload(…)``, which takes just what the graph holds."""
    node, target = called.node, called.target
    positional: list[Expression] = []
    named: dict[str, Expression] = {}
    for position, argument in enumerate(schema_arguments(target)):
        if position < len(node.args) and not argument.kwarg_only:
            value = node.args[position]
            positional.append(called.expression(TRAINING if follows_mode(node, argument.name, value) else value))
        elif argument.name in node.kwargs and argument.name != "pin_memory":
            named[argument.name] = called.expression(node.kwargs[argument.name])
    return call(".".join(("torch.ops", target.namespace, *operator_name(target))), *positional, **named)


def common_regions(nodes: Sequence[fx.Node]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The ``with`` blocks that all of ``nodes`` stand in, outermost first."""
    common = nodes[0].meta["regions"] if nodes else ()
    for node in nodes:
        depth = 0
        while depth < min(len(common), len(node.meta["regions"])) and common[depth] == node.meta["regions"][depth]:
            depth += 1
        common = common[:depth]
    return tuple(common)


def contexts(nodes: Sequence[fx.Node], outer: int, device: Expression) -> tuple[Expression, ...]:
    """The context managers around some operations, outermost first; a ``no_grad`` that changes nothing is left out.

    Args:
        outer: so many of the outermost blocks stand around the whole class, and are left out too.
        device: the expression of a device, for ``autocast``.
    """
    found: list[Expression] = []
    for kind, settings in common_regions(nodes)[outer:]:
        if kind == "autocast":
            _, dtype, enabled, cache = settings
            options = {"dtype": literal(dtype)} if enabled and dtype is not None else {}
            options |= {} if enabled else {"enabled": literal(enabled)}
            options |= {"cache_enabled": literal(False)} if enabled and cache is False else {}
            found.append(call("torch.autocast", Attribute(device, "type"), **options))
        elif any("writes" in node.meta or node.meta["cut_off"] or _gradient_flows_in(node) for node in nodes):
            found.append(call("torch.enable_grad" if settings[0] else "torch.no_grad"))
    return tuple(found)


def _gradient_flows_in(node: fx.Node) -> bool:
    return any(parent.meta["requires_grad"] for parent in node.all_input_nodes)
