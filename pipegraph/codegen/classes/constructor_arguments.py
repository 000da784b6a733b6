"""The arguments of constructors: numbers in which classes differ."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from torch import nn

from pipegraph.codegen.names.identifiers import attribute_variable, unused
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Passing,
    literal,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Evaluate, Statement

# Two copies of a class read better than one class with more arguments than this. Each further copy allows two more.
MAX_ARGUMENTS, PER_COPY = 6, 2
# Replaces every number when classes are compared.
_ANY_NUMBER = Name("…")

# Takes a number and the name of the parameter that it is passed for; returns its replacement.
_Change = Callable[[Literal, str], Expression]


def equal_but_for_numbers(classes: Sequence[ClassSource]) -> list[NumberGroup]:
    """The groups of classes that can become one class each."""
    groups: dict[object, list[ClassSource]] = {}
    for block in classes:
        if block.init_parameters:
            continue
        source = _with_numbers(block, lambda number, name: _ANY_NUMBER)
        common = (block.model_class, block.base, block.parameters, source.children, source.init, source.forward)
        groups.setdefault(common, []).append(block)
    number_groups: list[NumberGroup] = []
    for members in groups.values():
        group = NumberGroup(tuple(members), _varying(members))
        fits = len(group.varying) <= MAX_ARGUMENTS + PER_COPY * (len(members) - 2)
        number_groups += [group] if fits and len(members) > 1 else []
    return number_groups


def _varying(members: Sequence[ClassSource]) -> dict[tuple[Literal, ...], str]:
    """The numbers that differ: their values in all members → the name of the argument that replaces them."""
    first = members[0]
    assigned = [assigned_attributes(member.init) for member in members]
    names: dict[tuple[Literal, ...], str] = {}
    for numbers in zip(*map(_numbers, members), strict=True):
        values, parameter = tuple(value for value, _ in numbers), numbers[0][1]
        if len(set(values)) > 1 and values not in names:
            keys = [name for name in first.attributes if tuple(cls.attributes.get(name) for cls in members) == values]
            name = parameter if parameter in keys or not keys else keys[0]
            targets = {target for target in assigned[0] if tuple(member.get(target) for member in assigned) != values}
            used_names = {*first.parameters, *targets, *names.values(), *registered_names(first.init)}
            names[values] = unused(attribute_variable(name, "size"), used_names)
    return names


@dataclass(frozen=True)
class NumberGroup:
    """Classes that are equal except for the numbers in ``varying``."""

    members: tuple[ClassSource, ...]
    varying: Mapping[tuple[Literal, ...], str]

    def call(self, index: int) -> FunctionCall:
        """The call of the constructor for one member."""
        values = {name: numbers[index] for numbers, name in self.varying.items()}
        short = len(values) <= 2 and all(value.text.isdigit() for value in values.values())
        passing = Passing.POSITIONAL if short else Passing.KEYWORD
        arguments = (Argument(value, name, passing) for name, value in values.items())
        return FunctionCall(Name(self.members[0].name), tuple(arguments))

    def merged(self) -> ClassSource:
        """The class of the first member, with arguments for the numbers. ``forward`` reads them as attributes."""
        per_member = [[value for value, _ in _numbers(member)] for member in self.members]
        values = zip(*per_member, strict=True)
        stored: dict[str, None] = {}

        def in_init(number: Literal, name: str) -> Expression:
            argument = self.varying.get(next(values))
            return number if argument is None else Name(argument)

        def in_forward(number: Literal, name: str) -> Expression:
            argument = in_init(number, name)
            if not isinstance(argument, Name):
                return number
            stored[argument.name] = None
            return Attribute(SELF, argument.name)

        source = _with_numbers(self.members[0], in_init, in_forward)
        assignments = (
            Assign((Attribute(SELF, name),), Name(name))
            for name in stored
            if Name(name) != assigned_attributes(source.init).get(name)
        )
        return replace(source, init_parameters=tuple(self.varying.values()), init=(*assignments, *source.init))


def assigned_attributes(init: Sequence[Statement]) -> dict[str, Expression]:
    """The attributes that statements of ``__init__`` assign → their values."""
    return {
        target.name: statement.value
        for statement in init
        if isinstance(statement, Assign)
        for target in statement.targets
        if isinstance(target, Attribute) and target.owner == SELF
    }


def registered_names(init: Sequence[Statement]) -> set[str]:
    """The names of buffers that statements of ``__init__`` register; no attribute may have them."""
    calls = [node.value for node in init if isinstance(node, Evaluate) and isinstance(node.value, FunctionCall)]
    names = [call.arguments[0].value for call in calls if call.function == Attribute(SELF, "register_buffer")]
    return {ast.literal_eval(name.text) for name in names}


def _numbers(source: ClassSource) -> Iterator[tuple[Literal, str]]:
    """Every number, with the name of the parameter that it is passed for, in the order of the source."""
    numbers: list[tuple[Literal, str]] = []

    def collect(number: Literal, name: str) -> Expression:
        numbers.append((number, name))
        return number

    _with_numbers(source, collect)
    return iter(numbers)


def _with_numbers(source: ClassSource, change: _Change, change_in_forward: _Change | None = None) -> ClassSource:
    """A class with its numbers changed, including those that a call leaves to a default."""

    def walk(node: Any, change: _Change, name: str = "size") -> Any:
        if isinstance(node, Literal):
            return change(node, name) if node.is_number else node
        if isinstance(node, Argument):
            return node.changed(walk(node.value, change, node.name or "size"))
        return node.rebuilt(lambda inside: walk(inside, change))

    children, init = (tuple(walk(node, change) for node in nodes) for nodes in (source.children, source.init))
    forward = tuple(walk(node, change_in_forward or change) for node in source.forward)
    return replace(source, children=children, init=init, forward=forward)


def module_attributes(module: nn.Module) -> dict[str, Expression]:
    """The numbers, texts and None among the attributes of a module. Arguments of the constructor come first."""
    values = {
        name: literal(value)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, NoneType)) and name != "training" and not name.startswith("_")
    }
    order = (*inspect.signature(type(module).__init__).parameters, *values)
    return {name: values[name] for name in order if name in values}
