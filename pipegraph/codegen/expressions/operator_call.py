"""A call of an operator in a captured graph: its arguments by name, and their expressions."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Collection,
    Expression,
    FunctionCall,
    Passing,
    call,
    literal,
    method,
)
from pipegraph.graph.nodes import follows_model, on_meta, shape_of
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize
from pipegraph.torch_private.operators import OpOverload, operator_name, schema_arguments

TRAINING = Attribute(SELF, "training")
"""Stands for an argument that follows the mode of the module."""

# The dtypes that torch gives to Python's numbers. Constructors in a package never name float32.
_DEFAULT_DTYPES = (torch.float32, torch.int64, torch.bool)


@dataclass(frozen=True)
class OperatorCall:
    """One node of a graph that calls an operator.

    Attributes:
        node: the node.
        arguments: its arguments by name, without those that are equal to their default. A flag that follows the mode of
            the module is ``TRAINING``.
        value: returns the expression of a value or of a dynamic size.
        device: the expression of the device that the class runs on.
    """

    node: fx.Node
    arguments: dict[str, Any]
    value: Callable[[fx.Node | SymbolicSize], Expression]
    device: Expression

    @classmethod
    def from_node(
        cls, node: fx.Node, value: Callable[[fx.Node | SymbolicSize], Expression], device: Expression
    ) -> OperatorCall:
        """The call of a node."""
        return cls(node, _bind(node), value, device)

    @property
    def target(self) -> OpOverload:
        """The operator and its overload."""
        assert isinstance(self.node.target, OpOverload)
        return self.node.target

    @property
    def name(self) -> str:
        """The operator's name, without its namespace."""
        return operator_name(self.target)[0]

    @property
    def positional(self) -> list[str]:
        """The names of the arguments that are passed by position: those without a default.

        If an argument is called ``from``, which is a keyword of Python, all given arguments are passed by position.
        """
        passed_names = self.arguments if any(map(keyword.iskeyword, self.arguments)) else ()
        schema = [entry for entry in schema_arguments(self.target) if not entry.kwarg_only]
        return [entry.name for entry in schema if entry.name in passed_names or not entry.has_default_value()]

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the first argument and of the result."""
        return shape_of(self.node.args[0]), shape_of(self.node)

    def expression(self, argument: Any) -> Expression:
        """The expression of an argument of any kind."""
        if isinstance(argument, (fx.Node, SymbolicSize)):
            return self.value(argument)
        if isinstance(argument, torch.device):
            return self.device
        if isinstance(argument, (tuple, list)):
            items = tuple(map(self.expression, argument))
            return Collection(items, "()" if isinstance(argument, tuple) else "[]")
        return literal(argument)

    def function(self, name: str, *positional: Any, **named: Any) -> FunctionCall:
        """``name(positional…, named=…)``. The call of a function of ``F`` also knows the numbers that are defaults."""
        result = call(name, *map(self.expression, positional), **self.expressions(named))
        return replace(result, arguments=self._with_defaults(result.arguments)) if name.startswith("F.") else result

    def _with_defaults(self, arguments: Sequence[Argument]) -> tuple[Argument, ...]:
        complete = list(arguments)
        schema = schema_arguments(self.target)
        order = {entry.name: position for position, entry in enumerate(schema)}
        for entry in schema:
            if entry.name not in self.arguments and _is_number(entry.default_value):
                precedences = (order.get(argument.name, -1) < order[entry.name] for argument in complete)
                place = max((position for position, is_before in enumerate(precedences, 1) if is_before), default=0)
                complete.insert(place, Argument(self.expression(entry.default_value), entry.name, Passing.DEFAULT))
        return tuple(complete)

    def method(self, owner: Any, name: str, *positional: Any, **named: Any) -> FunctionCall:
        """``owner.name(positional…, named=…)``."""
        return self.method_of(self.expression(owner), name, *positional, **named)

    def method_of(self, owner: Expression, name: str, *positional: Any, **named: Any) -> FunctionCall:
        """The same of an expression."""
        return method(owner, name, *map(self.expression, positional), **self.expressions(named))

    def expressions(self, named: dict[str, Any]) -> dict[str, Expression]:
        """The expressions of arguments by name."""
        return {name: self.expression(argument) for name, argument in named.items()}


def _is_number(value: Any) -> bool:
    """Return whether a default is a number, or a list of them."""
    numbers = value if isinstance(value, list) and value else [value]
    return all(isinstance(number, (bool, int, float)) for number in numbers)


def follows_mode(node: fx.Node, argument: str, value: Any) -> bool:
    """Return whether an argument is the training flag of an operation that differs between the modes."""
    return argument in ("train", "training") and isinstance(value, bool) and not node.meta["in_every_mode"]


def _bind(node: fx.Node) -> dict[str, Any]:
    bound: dict[str, Any] = {}
    assert isinstance(node.target, OpOverload)
    for position, argument in enumerate(schema_arguments(node.target)):
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
        bound[argument.name] = TRAINING if follows_mode(node, argument.name, value) else value
    is_fixed = any(map(follows_model, node.all_input_nodes)) or operator_of(node).optional_dtype  # a pass decided
    if bound.get("dtype") in _DEFAULT_DTYPES and not is_fixed and _has_dtype_without(node, bound):
        del bound["dtype"]
    return bound


def _has_dtype_without(node: fx.Node, bound: dict[str, Any]) -> bool:
    """Return whether an operator gives the same dtype without this argument, as ``arange(10)`` gives integers."""
    meta_arguments = {name: torch.device("meta") if name == "device" else value for name, value in bound.items()}
    meta_arguments.pop("dtype")
    try:
        with torch.no_grad():
            tensor = node.target(**fx.map_arg(meta_arguments, on_meta))  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(tensor.dtype == bound["dtype"])
