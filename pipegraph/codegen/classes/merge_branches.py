"""Merge classes in their author's text that run different branches of it, or hold different modules."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipegraph.codegen.classes.constructor_arguments import NumberGroup, number_group, without_numbers
from pipegraph.codegen.classes.constructor_calls import changed_classes
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Expression,
    FunctionCall,
    Name,
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
    texts = {variant.text for variant in variants}
    if len(variants) < len(members) or len(texts) > 1:
        return None
    (text,) = texts
    statements = _aligned([variant.init for variant in variants])
    values: dict[str, tuple[Expression | None, ...]] = {}
    inits: list[list[Statement]] = [[] for _ in members]
    for row in statements:
        present = [statement for statement in row if statement is not None]
        if len(present) == len(row) and len({without_numbers(statement) for statement in present}) == 1:
            for init, statement in zip(inits, present, strict=True):
                init.append(statement)
            continue
        attribute = _attribute_in(present)
        if attribute is None:
            return None
        values[attribute] = tuple(None if statement is None else _value(statement) for statement in row)
        shared = _assignment(attribute, None in values[attribute], text)
        for init in inits:
            init.append(shared)
    numbers = number_group(
        [
            replace(member, init=tuple(init), forward=(text,), general=None)
            for member, init in zip(members, inits, strict=True)
        ]
    )
    return _Group(numbers, values) if numbers.fits(len(values)) else None


def _aligned(inits: Sequence[Sequence[Statement]]) -> list[tuple[Statement | None, ...]]:
    """The statements of constructors side by side: those that assign one attribute, with None where there is none."""
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


def _assignment(attribute: str, is_absent: bool, text: SourceText) -> Statement:
    """The statement that assigns an argument; not to a module without the attribute whose text asks for it."""
    assign = Assign((Attribute(SELF, attribute),), Name(attribute))
    asks = any(re.search(rf"hasattr\(self, [\"']{attribute}[\"']\)", function) for function in text.functions)
    return If(Binary("is not", Name(attribute), _NONE), (assign,)) if is_absent and asks else assign
