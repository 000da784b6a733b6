"""Merge classes in their author's text that run different branches of it, or hold different modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipegraph.codegen.classes.common_text import with_common_text
from pipegraph.codegen.classes.constructor_arguments import NumberGroup, number_group, without_numbers
from pipegraph.codegen.classes.constructor_calls import changed_classes
from pipegraph.codegen.expressions.module_tree import expanded
from pipegraph.codegen.names.identifiers import attribute_variable, unused
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Collection,
    Expression,
    FunctionCall,
    Name,
    Node,
    Passing,
    literal,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, If, SourceText, Statement

_NONE = literal(None)


def without_variants(classes: Sequence[ClassSource]) -> list[ClassSource]:
    """Classes without the variant of those that are alone under the name of their model's class."""
    groups = _groups(classes)
    return [block if len(groups[block.model_class]) > 1 else replace(block, general=None) for block in classes]


def merge_branches(
    classes: Sequence[ClassSource], users: Sequence[ClassSource]
) -> tuple[list[ClassSource], list[ClassSource]] | None:
    """Merge the classes of one name that are one class in their author's text, or let them stay apart.

    The modules in which they differ become arguments of the constructor: ``Layer(feed_forward=Experts())``.

    Returns:
        the changed classes and users; None if no class has a variant.
    """
    waiting = {block.name: block.model_class for block in classes if block.general is not None}
    if not waiting:
        return None
    groups = {name: members for name, members in _groups(classes).items() if name in waiting.values()}
    # The classes inside come first: what they are merged to is in the constructors of those around them.
    inner_first = (name for name, members in groups.items() if not _used(members, waiting) - {name})
    name = next(inner_first, next(iter(groups)))
    group = _group(groups[name])
    if group is None:
        return [replace(block, general=None) if block.model_class == name else block for block in classes], list(users)
    merged, calls = group.merged(), {member.name: group.call(at) for at, member in enumerate(group.numbers.members)}
    blocks = [merged if block.name == merged.name else block for block in classes]
    blocks = [block for block in blocks if block.name == merged.name or block.name not in calls]

    def with_arguments(constructor_call: FunctionCall) -> FunctionCall:
        is_merged = constructor_call.function.text in calls and not constructor_call.arguments
        return calls[constructor_call.function.text] if is_merged else constructor_call

    return (
        changed_classes(blocks, with_arguments, lambda node: node),
        changed_classes(users, with_arguments, lambda node: node),
    )


def _groups(classes: Sequence[ClassSource]) -> dict[str, list[ClassSource]]:
    """The classes that have all of a model's class, by its name."""
    groups: dict[str, list[ClassSource]] = {}
    for block in classes:
        groups.setdefault(block.model_class, [])
        if not block.part:
            groups[block.model_class].append(block)
    return groups


def _used(members: Sequence[ClassSource], waiting: Mapping[str, str]) -> set[str]:
    """The names of the model's classes that wait, and that classes use."""
    return {waiting[name] for member in members for name in member.uses() & waiting.keys()}


@dataclass(frozen=True)
class _Group:
    """Classes that are one class in their author's text.

    Attributes:
        numbers: the classes, which differ in numbers only after the modules in which they differ are arguments.
        values: attribute → its value in each class; None where a class does not have it.
    """

    numbers: NumberGroup
    values: Mapping[str, tuple[Expression | None, ...]]

    def merged(self) -> ClassSource:
        """The class, under the name of the first."""
        merged = self.numbers.merged()
        optional = [name for name, values in self.values.items() if None in values or _NONE in values]
        required = [name for name in self.values if name not in optional]
        common = [dict(member.attributes) for member in self.numbers.members]
        return replace(
            merged,
            init_parameters=(*merged.init_parameters, *required),
            defaults={**merged.defaults, **dict.fromkeys(optional, _NONE)},
            attributes={
                name: value
                for name, value in merged.attributes.items()
                if all(attributes.get(name) == value for attributes in common)
            },
            is_general=True,
        )

    def call(self, index: int) -> FunctionCall:
        """The call of the constructor for one class."""
        numbers = self.numbers.call(index)
        arguments = (
            Argument(values[index] or _NONE, name, Passing.KEYWORD, default=_NONE)
            for name, values in self.values.items()
        )
        return replace(numbers, arguments=(*numbers.arguments, *arguments))


def _group(members: Sequence[ClassSource]) -> _Group | None:
    """Classes as one class; None if they are several, or if one class with arguments reads worse."""
    variants = [member.general for member in members if member.general is not None]
    variants = with_common_text(variants)
    bases = {(member.base, tuple(map(without_numbers, member.children))) for member in members}
    if len(variants) < len(members) or len({variant.text for variant in variants}) > 1 or len(bases) > 1:
        return None
    text = variants[0].text
    statements = _aligned([variant.init for variant in variants])
    arguments = _ModuleArguments(len(members))
    inits: list[list[Statement]] = [[] for _ in members]
    for keyed_row in statements:
        row = _with_unread(keyed_row, members)
        present = [statement for statement in row if statement is not None]
        if len(present) == len(row) and _are_alike(present):
            for init, statement in zip(inits, present, strict=True):
                init.append(statement)
            continue
        attribute = _attribute_in(present)
        if attribute is None:
            return None
        values = [None if statement is None else _value(statement) for statement in row]
        for init, value in zip(inits, arguments.shared(values, attribute), strict=True):
            init.append(_assignment(attribute, value, None in values, text))
    numbers = number_group(
        [
            replace(member, init=tuple(init), forward=(text,), general=None)
            for member, init in zip(members, inits, strict=True)
        ]
    )
    return _Group(numbers, arguments.values) if numbers.fits(len(arguments.values)) else None


_MOST_INNER = 2  # arguments for what differs inside of one attribute; an argument for all of it reads better then


class _ModuleArguments:
    """The arguments of a constructor for the modules in which classes differ.

    Args:
        count: of the classes.

    Attributes:
        values: argument → its value in each class; None where a class does not have it.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.values: dict[str, tuple[Expression | None, ...]] = {}

    def shared(self, values: Sequence[Expression | None], name: str) -> Sequence[Expression]:
        """The value of an attribute in each class, alike but for numbers, with arguments for what differs in it."""
        values_of_others = dict(self.values)
        inside = self._inside(values, name) if None not in values else None
        if inside is not None and len(self.values) - len(values_of_others) <= _MOST_INNER:
            return inside
        self.values = values_of_others
        return self._argument(values, name)

    def _inside(self, values: Sequence[Any], name: str) -> Sequence[Expression] | None:
        """The same with arguments for parts of the values; None if they have no parts in common."""
        if _are_alike(values) or _are_alike(values := [expanded(value) for value in values]):
            return values
        match values:
            case [FunctionCall(function=function, arguments=arguments), *_]:
                shapes = {
                    (value.function, tuple(argument.name for argument in value.arguments))
                    if isinstance(value, FunctionCall)
                    else None
                    for value in values
                }
                if len(shapes) > 1 or not arguments or function.text == "nn.Parameter":
                    return None
                columns = list(zip(*(value.arguments for value in values), strict=True))
                if any(argument.value.text.startswith("*") for column in columns for argument in column):
                    return None  # several arguments have no name
                parts = [self._part(column, f"{name}_{column[0].name}".rstrip("_")) for column in columns]
                return [
                    replace(value, arguments=row) for value, row in zip(values, zip(*parts, strict=True), strict=True)
                ]
            case [Collection(brackets="[]", items=items), *_]:
                counts = {len(value.items) if isinstance(value, Collection) else -1 for value in values}
                if counts != {len(items)}:
                    return None
                entries = zip(*(value.items for value in values), strict=True)
                items_of = [self._inside(entry, name) or self._argument(entry, name) for entry in entries]
                rows = zip(*items_of, strict=True)
                return [replace(value, items=row) for value, row in zip(values, rows, strict=True)]
        return None

    def _part(self, arguments: Sequence[Argument], name: str) -> list[Argument]:
        values = [argument.value for argument in arguments]
        parts = self._inside(values, name) or self._argument(values, name)
        return [argument.changed(part) for argument, part in zip(arguments, parts, strict=True)]

    def _argument(self, values: Sequence[Expression | None], name: str) -> Sequence[Expression]:
        argument = unused(attribute_variable(name, "module"), self.values)
        self.values[argument] = tuple(values)
        return [Name(argument)] * self._count


def _are_alike(nodes: Sequence[Node]) -> bool:
    """Return whether nodes differ in numbers only."""
    return len({without_numbers(node) for node in nodes}) == 1


def _aligned(inits: Sequence[Sequence[Statement]]) -> list[tuple[Statement | None, ...]]:
    """The statements of constructors that assign the same attribute, with None for a constructor without one."""
    by_key = [{_key(statement): statement for statement in init} for init in inits]
    order: list[object] = []
    for keys in sorted(by_key, key=len, reverse=True):
        place = 0
        for key in keys:
            if key in order:
                place = order.index(key) + 1
            else:
                order.insert(place, key)
                place += 1
    return [tuple(statements.get(key) for statements in by_key) for key in order]


def _with_unread(row: Sequence[Statement | None], members: Sequence[ClassSource]) -> Sequence[Statement | None]:
    """Statements that assign an attribute; those of the classes that do not read it, too, if all have the same value.

    Otherwise these have None for it: modules that differ in what they do not read would not share their kernels.
    """
    present = [statement for statement in row if statement is not None]
    name = _attribute_in(present)
    values = {member.attributes.get(name or "") for member in members}
    is_same = len(present) < len(row) and len(set(present)) == 1 and len(values) == 1 and None not in values
    return [present[0]] * len(row) if is_same else row


def _key(statement: Statement) -> object:
    """What a statement of ``__init__`` assigns; all of it, but for its numbers, if it assigns nothing."""
    match statement:
        case Assign(targets=(Attribute() as target,)):
            return target.text
    return without_numbers(statement)


def _attribute_in(statements: Sequence[Statement]) -> str | None:
    """The attribute of the module that statements assign and that may be an argument; None if it may not."""
    names = set[str]()
    for statement in statements:
        match statement:
            case Assign(targets=(Attribute(owner=owner, name=name),), value=value) if owner == SELF:
                if isinstance(value, FunctionCall) and value.function.text == "nn.Parameter":
                    return None
                names.add(name)
            case _:
                return None
    return names.pop() if len(names) == 1 else None


def _value(statement: Statement) -> Expression:
    assert isinstance(statement, Assign)
    return statement.value


def _assignment(attribute: str, value: Expression, is_absent: bool, text: SourceText) -> Statement:
    """The statement that assigns a value; none to a module without the attribute whose text asks for it."""
    assign = Assign((Attribute(SELF, attribute),), value)
    asks = any(re.search(rf"hasattr\(self, [\"']{attribute}[\"']\)", function) for function in text.functions)
    return If(Binary("is not", value, _NONE), (assign,)) if is_absent and asks else assign
