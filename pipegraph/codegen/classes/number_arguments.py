"""Classes that differ in numbers only. The numbers become arguments of the constructor."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    for each in classes:
        if not each.init_parameters:
            source = _with_numbers(each, lambda number, name: _ANY_NUMBER)
            common = (each.model_class, each.base, each.parameters, source.children, source.init, source.forward)
            groups.setdefault(common, []).append(each)
    equal = [NumberGroup(tuple(members), _varying(members)) for members in groups.values() if len(members) > 1]
    return [group for group in equal if len(group.varying) <= MAX_ARGUMENTS + PER_COPY * (len(group.members) - 2)]


def _varying(members: Sequence[ClassSource]) -> dict[tuple[Literal, ...], str]:
    """The numbers that differ: their values in all members → the name of the argument that replaces them."""
    first = members[0]
    assigned = [assigned_attributes(each.init) for each in members]
    names: dict[tuple[Literal, ...], str] = {}
    for numbers in zip(*map(_numbers, members), strict=True):
        values, parameter = tuple(value for value, _ in numbers), numbers[0][1]
        if len(set(values)) > 1 and values not in names:
            own = [name for name in first.attributes if tuple(each.attributes.get(name) for each in members) == values]
            name = parameter if parameter in own or not own else own[0]
            other = {each for each in assigned[0] if tuple(member.get(each) for member in assigned) != values}
            taken = {*first.parameters, *other, *names.values(), *registered_names(first.init)}
            names[values] = unused(attribute_variable(name, "size"), taken)
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

        made = _with_numbers(self.members[0], in_init, in_forward)
        own = (
            Assign((Attribute(SELF, name),), Name(name))
            for name in stored
            if Name(name) != assigned_attributes(made.init).get(name)
        )
        return replace(made, init_parameters=tuple(self.varying.values()), init=(*own, *made.init))


def assigned_attributes(init: Sequence[Statement]) -> dict[str, Expression]:
    """The attributes that statements of ``__init__`` assign → their values."""
    return {
        target.name: each.value
        for each in init
        if isinstance(each, Assign)
        for target in each.targets
        if isinstance(target, Attribute) and target.owner == SELF
    }


def registered_names(init: Sequence[Statement]) -> set[str]:
    """The names of buffers that statements of ``__init__`` register; no attribute may have them."""
    calls = [each.value for each in init if isinstance(each, Evaluate) and isinstance(each.value, FunctionCall)]
    names = [each.arguments[0].value for each in calls if each.function == Attribute(SELF, "register_buffer")]
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
