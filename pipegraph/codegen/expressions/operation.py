"""One operation of a captured graph as an expression or a statement, and the ``with`` blocks around operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import fx

from pipegraph.codegen.expressions.operator_call import TRAINING, OperatorCall, follows_mode
from pipegraph.codegen.expressions.operator_spellings import index, spelling_function
from pipegraph.codegen.syntax.expressions import (
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Subscript,
    call,
    literal,
)
from pipegraph.codegen.syntax.statements import APPLY, Assign, Evaluate, Statement
from pipegraph.graph.custom_functions import AppliedFunction, applied_function
from pipegraph.graph.nodes import on_meta
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import operator_name, schema_arguments


def express(node: fx.Node, value: Callable[[fx.Node | SymbolicSize], Expression], device: Expression) -> Expression:
    """The expression of an operation: an operator, a method, a function of ``torch`` or ``F``, or else ``torch.ops``.

    Args:
        node: the operation.
        value: returns the expression of a value or of a dynamic size.
        device: the expression of the device that the class runs on.
    """
    if node.target is operator.getitem:
        owner, position = node.args
        assert isinstance(owner, fx.Node)
        owner_expression = value(owner)
        if isinstance(owner_expression, Collection):
            return owner_expression.items[int(position)]  # type: ignore[arg-type]
        return Subscript(owner_expression, (literal(position),))
    called = OperatorCall.from_node(node, value, device)
    if (applied := applied_function(node.target)) is not None:
        return _apply(called, applied)
    if called.target.namespace != "aten":
        return _by_overload(called)
    spell = spelling_function(operator_of(node).spelling)
    return (spell and spell(called)) or _by_name(called) or _by_random_fill(called) or _by_overload(called)


def _apply(called: OperatorCall, applied: AppliedFunction) -> FunctionCall:
    """``Round.apply(x, 0.5)``, with tuples as the model has them."""
    values = zip(called.node.args, applied.tuples, strict=True)
    arguments = (tuple(value) if is_tuple else value for value, is_tuple in values)  # type: ignore[arg-type]
    return call(f"{applied.function.__name__}{APPLY}", *map(called.expression, arguments))


def write(node: fx.Node, value: Callable[[fx.Node | SymbolicSize], Expression], device: Expression) -> Statement:
    """The statement of an operation that changes a tensor in place; the arguments are those of ``express``."""
    called = OperatorCall.from_node(node, value, device)
    named = dict(called.arguments)
    spelling = operator_of(node).spelling
    owner = called.expression(named.get("self"))
    if spelling == "x[…] = y" and isinstance(owner, Subscript):
        return Assign((owner,), called.expression(node.args[1]))
    if spelling == "x[indices] = y" and "accumulate" not in named and (place := index(called)) is not None:
        return Assign((place,), called.expression(named["values"]))
    if (
        called.target.namespace != "aten"
        or "self" not in named
        or "out" in named
        or not hasattr(torch.Tensor, called.name)
    ):
        return Evaluate(_by_overload(called))
    tensor = named.pop("self")
    positional = [named.pop(name) for name in list(named) if name in called.positional]
    return Evaluate(called.method(tensor, called.name, *positional, **named))


# The places where Python has operators: the object, its name in source, and the beginning of the operators' names.
_LIBRARIES: tuple[tuple[Any, str, str], ...] = (
    (torch.linalg, "torch.linalg", "linalg_"),
    (torch.special, "torch.special", "special_"),
    (torch.fft, "torch.fft", "fft_"),
    (torch.nn.functional, "F", ""),
    (torch.Tensor, "", ""),
    (torch, "torch", ""),
)


def _by_name(called: OperatorCall) -> Expression | None:
    """A call of a function or method with the operator's name.

    It is the first of ``_LIBRARIES`` that exists and, tried on meta tensors, returns what the operation returns.
    Arguments with a default are passed by name.
    """
    arguments, schema = called.arguments, schema_arguments(called.target)
    if TRAINING in arguments.values() or called.name.startswith("_"):
        return None
    positional = [_single(called, name, arguments.get(name)) for name in called.positional]
    named = {name: value for name, value in arguments.items() if name not in called.positional}
    is_method = bool(schema) and schema[0].name == "self"
    for owner, library, start in _LIBRARIES:
        if not called.name.startswith(start) or (library == "F" and operator_of(called.node).spelling != "F.name"):
            continue
        name = called.name.removeprefix(start)
        function = getattr(owner, name, None)
        if (not library and not is_method) or function is None:
            continue
        if _returns_the_same(called.node, function, positional, named):
            if library:
                return called.function(f"{library}.{name}", *positional, **named)
            return called.method(positional[0], name, *positional[1:], **named)
    return None


def _by_random_fill(called: OperatorCall) -> Expression | None:
    """``torch.zeros_like(x).uniform_(0, 1)`` for random numbers that torch only writes into a tensor.

    A tensor that nothing else reads is the one that they are written into; of any other only the form counts.
    """
    name = f"{called.name.removesuffix('_functional')}_"
    draws = torch.Tag.nondeterministic_seeded in called.target.tags
    if not draws or "self" not in called.arguments or not hasattr(torch.Tensor, name):
        return None
    named = dict(called.arguments)
    tensor = named.pop("self")
    owner = called.expression(tensor)
    if not operator_of(tensor).factory or len(tensor.users) > 1:
        owner = call("torch.empty_like", owner)
    positional = [named.pop(argument_name) for argument_name in list(named) if argument_name in called.positional]
    return called.method_of(owner, name, *positional, **named)


def _single(called: OperatorCall, name: str, value: Any) -> Any:
    """``-1`` for ``[-1]`` if the schema takes one number for all dimensions (``int[1] dim``)."""
    argument = next(entry for entry in schema_arguments(called.target) if entry.name == name)
    is_single = isinstance(value, list) and len(value) == 1 and isinstance(value[0], int)
    return value[0] if is_single and argument.N is not None else value


def _returns_the_same(node: fx.Node, function: Any, positional: Sequence[Any], named: dict[str, Any]) -> bool:
    """Return whether a Python function, tried on meta tensors, returns what the operation returns."""
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
    """``torch.name(…)``, such as ``torch.lstm``, or ``torch.ops.aten.name.overload(…)``, with all arguments as in the
    graph."""
    node, target = called.node, called.target
    positional: list[Expression] = []
    named: dict[str, Expression] = {}
    for position, argument in enumerate(schema_arguments(target)):
        if position < len(node.args) and not argument.kwarg_only:
            value = node.args[position]
            positional.append(called.expression(TRAINING if follows_mode(node, argument.name, value) else value))
        elif argument.name in node.kwargs and argument.name != "pin_memory":
            named[argument.name] = called.expression(node.kwargs[argument.name])
    function_name = called.name if target.namespace == "aten" and not called.name.endswith("_") else ""
    function = getattr(torch, function_name, None) if function_name else None
    if function is not None and _returns_the_same(node, function, node.args, dict(node.kwargs)):
        return call(f"torch.{function_name}", *positional, **named)
    return call(".".join(("torch.ops", target.namespace, *operator_name(target))), *positional, **named)


def common_regions(nodes: Sequence[fx.Node]) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """The ``with`` blocks around all of ``nodes``, outermost first, as (kind, settings)."""
    common = nodes[0].meta["regions"] if nodes else ()
    for node in nodes:
        depth = 0
        while depth < min(len(common), len(node.meta["regions"])) and common[depth] == node.meta["regions"][depth]:
            depth += 1
        common = common[:depth]
    return tuple(common)


def contexts(nodes: Sequence[fx.Node], outer: int, device: Expression) -> tuple[Expression, ...]:
    """The context managers around operations, outermost first. A ``no_grad`` that changes nothing is left out.

    Args:
        nodes: the operations.
        outer: the number of outermost blocks that are around the whole class. They are left out too.
        device: the expression of a device, for ``autocast``.
    """
    managers: list[Expression] = []
    for kind, settings in common_regions(nodes)[outer:]:
        if kind == "autocast":
            _, dtype, enabled, cache = settings
            options = {"dtype": literal(dtype)} if enabled and dtype is not None else {}
            options |= {} if enabled else {"enabled": literal(enabled)}
            options |= {"cache_enabled": literal(False)} if enabled and cache is False else {}
            managers.append(call("torch.autocast", Attribute(device, "type"), **options))
        elif any("writes" in node.meta or node.meta["cut_off"] or _gradient_flows_in(node) for node in nodes):
            managers.append(call("torch.enable_grad" if settings[0] else "torch.no_grad"))
    return tuple(managers)


def _gradient_flows_in(node: fx.Node) -> bool:
    return any(parent.meta["requires_grad"] for parent in node.all_input_nodes)
