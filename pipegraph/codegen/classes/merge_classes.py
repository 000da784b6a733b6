"""Classes that differ in numbers only become one class, and the numbers become arguments of its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import nn

from pipegraph.codegen.classes.class_source import ClassSource
from pipegraph.codegen.names.identifiers import class_name, unused, unused_class, variable
from pipegraph.codegen.syntax.expressions import SELF, Attribute, Expression, FunctionCall, Literal, Name, Node
from pipegraph.codegen.syntax.literals import literal
from pipegraph.codegen.syntax.statements import Assign

# A class with more arguments than this says less than two copies of it do. Each further copy is worth two more.
_MAX_ARGUMENTS, _PER_COPY = 6, 2
_NUMBER = Name("…")

# Takes a number and the name of the parameter that it is for; gives what stands in its place.
_Change = Callable[[Literal, str], Expression]


def merge_classes(
    blocks: Sequence[ClassSource], stages: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]]:
    """Merge the classes of blocks.

    The result is ``Conv1D(nf=96, nx=32)`` and ``Conv1D(nf=32, nx=32)`` instead of a ``Conv1D`` and a ``Conv1D2``. Inner
    classes come first: the classes that hold them differ in numbers only once they are merged.

    Returns:
        fewer blocks, with arguments; stages that make them.
    """
    classes, users = list(blocks), list(stages)
    while groups := _mergeable(classes):
        calls: dict[str, FunctionCall] = {}
        for group in groups:
            calls |= {member.name: group.call(position) for position, member in enumerate(group.members)}
        merged = {group.members[0].name: group.merged() for group in groups}
        gone = {member.name for group in groups for member in group.members[1:]}
        kept = [merged.get(each.name, each) for each in classes if each.name not in gone]
        classes, users = ([_with_calls(each, calls) for each in sources] for sources in (kept, users))
    names: dict[str, str] = {}
    for each in classes:
        names[each.name] = unused_class(class_name(each.model_class), set(names.values()))
    classes = [replace(_with_names(each, names), name=names[each.name]) for each in classes]
    return classes, [_with_names(each, names) for each in users]


def _with_calls(source: ClassSource, calls: Mapping[str, FunctionCall]) -> ClassSource:
    """A class that makes modules with other arguments; only calls without arguments are replaced."""

    def change(node: Node) -> Node:
        node = node.rebuilt(change)
        if isinstance(node, FunctionCall) and not node.positional and not node.named:
            return calls.get(node.function.text, node)
        return node

    return _changed_init(source, change)


def _with_names(source: ClassSource, names: Mapping[str, str]) -> ClassSource:
    """A class that makes modules of classes with other names."""

    def change(node: Node) -> Node:
        node = node.rebuilt(change)
        if isinstance(node, FunctionCall) and node.function.text in names:
            return replace(node, function=Name(names[node.function.text]))
        return node

    return _changed_init(source, change)


def _changed_init(source: ClassSource, change: Callable[[Any], Any]) -> ClassSource:
    return replace(source, children=tuple(map(change, source.children)), init=tuple(map(change, source.init)))


# ---- what classes have in common -------------------------------------------------------------------------------------


def _mergeable(classes: Sequence[ClassSource]) -> list[_Group]:
    parameters = {each.name: each.init_parameters for each in classes}
    groups: dict[object, list[ClassSource]] = {}
    for each in classes:
        if not each.init_parameters:
            made = _map_numbers(each, lambda number, name: _NUMBER, parameters)
            template = (each.model_class, each.base, each.parameters, made.children, made.init, made.forward)
            groups.setdefault(template, []).append(each)
    found = [_Group.of(members, parameters) for members in groups.values() if len(members) > 1]
    return [group for group in found if len(group.varying) <= _MAX_ARGUMENTS + _PER_COPY * (len(group.members) - 2)]


@dataclass(frozen=True)
class _Group:
    """Classes that are equal except for numbers.

    Attributes:
        members: the classes.
        varying: numbers that differ, one of each member → the argument that they become.
        parameters: those of the constructor of each class.
    """

    members: tuple[ClassSource, ...]
    varying: Mapping[tuple[Literal, ...], str]
    parameters: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, members: Sequence[ClassSource], parameters: Mapping[str, tuple[str, ...]]) -> _Group:
        """Find where the members differ."""
        first = members[0]
        attributes = {target.text for each in first.init if isinstance(each, Assign) for target in each.targets}
        taken = {*first.parameters, *(attribute.removeprefix("self.") for attribute in attributes)}
        varying: dict[tuple[Literal, ...], str] = {}
        for row in zip(*(list(_numbers(member, parameters)) for member in members), strict=True):
            values = tuple(value for value, _ in row)
            if len(set(values)) > 1 and values not in varying:
                own = [name for name in first.numbers if _holds(members, name, values)]
                name = row[0][1] if row[0][1] in own or not own else own[0]
                varying[values] = unused(variable(name, "size"), {*taken, *varying.values()})
        return cls(tuple(members), varying, parameters)

    def call(self, position: int) -> FunctionCall:
        """The call of the constructor for one member."""
        named = tuple((name, values[position]) for values, name in self.varying.items())
        function = Name(self.members[0].name)
        if len(named) <= 2 and all(value.text.isdigit() for _, value in named):
            return FunctionCall(function, tuple(value for _, value in named))
        return FunctionCall(function, (), named)

    def merged(self) -> ClassSource:
        """The class of the first member, with arguments for numbers; ``forward`` reads them as attributes."""
        columns = [[value for value, _ in _numbers(member, self.parameters)] for member in self.members]
        rows = iter(list(zip(*columns, strict=True)))
        stored: dict[str, None] = {}

        def in_init(number: Literal, name: str) -> Expression:
            argument = self.varying.get(next(rows))
            return number if argument is None else Name(argument)

        def in_forward(number: Literal, name: str) -> Expression:
            found = in_init(number, name)
            if isinstance(found, Name):
                stored[found.name] = None
                return Attribute(SELF, found.name)
            return found

        made = _map_numbers(self.members[0], in_init, self.parameters, in_forward)
        own = (Assign((Attribute(SELF, name),), Name(name)) for name in stored)
        arguments = tuple(self.varying.values())
        return _without_defaults(replace(made, init_parameters=arguments, init=(*own, *made.init)))


def _holds(members: Sequence[ClassSource], name: str, values: Sequence[Literal]) -> bool:
    return all(member.numbers.get(name) == value for member, value in zip(members, values, strict=True))


# ---- numbers in expressions ------------------------------------------------------------------------------------------


def _numbers(source: ClassSource, parameters: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[Literal, str]]:
    """Every number with the name of the parameter that it is for, in an order that equal classes share."""
    found: list[tuple[Literal, str]] = []

    def collect(number: Literal, name: str) -> Expression:
        found.append((number, name))
        return number

    _map_numbers(source, collect, parameters)
    return iter(found)


def _map_numbers(
    source: ClassSource,
    change: _Change,
    parameters: Mapping[str, tuple[str, ...]],
    change_in_forward: _Change | None = None,
) -> ClassSource:
    """A class with every number changed, also those that a constructor of torch takes by default."""

    def walk(node: Any, change: _Change, name: str = "size") -> Any:
        if isinstance(node, Literal):
            return change(node, name) if node.is_number else node
        if not isinstance(node, FunctionCall):
            return node.rebuilt(lambda part: walk(part, change))
        node = _with_defaults(node)
        known = parameters.get(node.function.text) or _parameters(node.function.text)
        names = (*known, *["size"] * len(node.positional))
        return FunctionCall(
            walk(node.function, change),
            tuple(walk(value, change, name) for name, value in zip(names, node.positional, strict=False)),
            tuple((name, walk(value, change, name)) for name, value in node.named),
        )

    made = _changed_init(source, lambda node: walk(node, change))
    return replace(made, forward=tuple(walk(node, change_in_forward or change) for node in source.forward))


def _with_defaults(call: FunctionCall) -> FunctionCall:
    """A call of something of torch with all numbers among its named arguments, in the order of the parameters."""
    defaults = _defaults(call.function.text)
    if not defaults:
        return call
    given = {name: value for name, value in call.named if isinstance(value, Literal) and value.is_number}
    others = tuple((name, value) for name, value in call.named if name not in given)
    left = {name: value for name, value in defaults.items() if name not in dict(others)}
    return replace(call, named=(*others, *{**left, **given}.items()))


def _without_defaults(source: ClassSource) -> ClassSource:
    def change(node: Any) -> Any:
        node = node.rebuilt(change)
        if not isinstance(node, FunctionCall):
            return node
        defaults = _defaults(node.function.text)
        return replace(node, named=tuple(each for each in node.named if defaults.get(each[0]) != each[1]))

    return replace(_changed_init(source, change), forward=tuple(map(change, source.forward)))


@cache
def _parameters(function: str) -> tuple[str, ...]:
    """The parameters of a class ``nn.…`` or a function ``F.…``; none of anything else."""
    return tuple(_signature(function))


@cache
def _defaults(function: str) -> dict[str, Expression]:
    """The parameters whose default is a number → that number."""
    numbers = {name: value for name, value in _signature(function).items() if isinstance(value, (bool, int, float))}
    return {name: literal(value) for name, value in numbers.items()}


def _signature(function: str) -> dict[str, Any]:
    """Parameter → default value (None for no default)."""
    library, _, name = function.rpartition(".")
    if library == "nn" and isinstance(cls := getattr(nn, name, None), type):
        return {entry.name: entry.default for entry in inspect.signature(cls).parameters.values()}
    packet = getattr(torch.ops.aten, name, None) if library == "F" else None
    # Python knows no signature of such functions; the operator behind it has one.
    if packet is None or packet.overloads() != ["default"]:
        return {}
    return {each.name: each.default_value for each in packet.default._schema.arguments}
