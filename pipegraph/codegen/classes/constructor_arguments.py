"""The arguments of constructors: numbers in which classes differ."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import NoneType
from typing import Any, Final

from torch import nn

from pipegraph.codegen.names.author_arguments import AuthorArguments, position_name
from pipegraph.codegen.names.identifiers import attribute_variable, unused
from pipegraph.codegen.syntax.expressions import (
    SELF,
    Argument,
    Attribute,
    Binary,
    Expression,
    FunctionCall,
    Literal,
    Name,
    Node,
    Passing,
    literal,
)
from pipegraph.codegen.syntax.statements import Assign, ClassSource, Evaluate, Statement

# Two copies of a class read better than one class with more arguments than this. Each further copy allows two more.
MAX_ARGUMENTS, PER_COPY = 6, 2
# Replaces every number when classes are compared.
_ANY_NUMBER = Name("…")


@dataclass(frozen=True)
class _NumberPlace:
    """A place of a number.

    Attributes:
        parameter: the parameter that it is passed for.
        author_name: what the author's constructor passes there; empty if that has no name.
        default: the number, if the call leaves it out.
        is_in_forward: whether ``forward`` has the number.
    """

    parameter: str = "size"
    author_name: str = ""
    default: Expression | None = None
    is_in_forward: bool = False


# Takes a number and its place; returns its replacement.
_Change = Callable[[Literal, _NumberPlace], Expression]


def equal_but_for_numbers(classes: Sequence[ClassSource]) -> list[NumberGroup]:
    """The groups of classes that can become one class each."""
    groups: dict[object, list[ClassSource]] = {}
    for block in classes:
        if block.init_parameters or block.defaults or block.general is not None:
            continue
        source = _with_numbers(block, lambda number, place: _ANY_NUMBER)
        common = (block.model_class, block.base, block.parameters, source.children, source.init, source.forward)
        groups.setdefault(common, []).append(block)
    number_groups = [number_group(members) for members in groups.values() if len(members) > 1]
    return [group for group in number_groups if group.fits()]


def without_numbers(node: Node) -> Any:
    """A part of a source with every number replaced by the same name: equal for parts that differ in numbers only."""
    return _NumberChange(lambda number, place: _ANY_NUMBER).changed(node)


def number_group(members: Sequence[ClassSource]) -> NumberGroup:
    """The group of classes that differ in numbers only."""
    places: dict[_Values, list[_NumberPlace]] = {}
    for numbers in zip(*map(_numbers, members), strict=True):
        values = tuple(value for value, _ in numbers)
        if len(set(values)) > 1:
            places.setdefault(values, []).extend(place for _, place in numbers)
    multiples = _multiples(places)
    arguments = {values: of_values for values, of_values in places.items() if values not in multiples}
    names = _names(members, arguments)
    derived = {values: multiple.expression(Name(names[multiple.base])) for values, multiple in multiples.items()}
    author = members[0].author_arguments
    author_names = author.parameters if author is not None else ()
    ordered = dict(sorted(names.items(), key=lambda item: _position(item[1], author_names)))
    return NumberGroup(tuple(members), ordered, _defaults(arguments), derived)


def _position(name: str, names: Sequence[str]) -> int:
    """The position of a name among those of the author's constructor; after them if it has another name."""
    return names.index(name) if name in names else len(names)


_Values = tuple[Literal, ...]
"""A number in each member of a group."""


@dataclass(frozen=True)
class _Multiple:
    """Numbers that are the same multiple, or the square, of those of an argument.

    Attributes:
        base: the numbers of the argument.
        factor: the multiple; None for the square.
    """

    base: _Values
    factor: Fraction | None

    def expression(self, base: Expression) -> Expression:
        """``3 * dim``, ``dim // 2`` or ``dim * dim``."""
        if self.factor is None:
            return Binary("*", base, base)
        numerator, denominator = self.factor.numerator, self.factor.denominator
        product = base if numerator == 1 else Binary("*", literal(numerator), base)
        return product if denominator == 1 else Binary("//", product, literal(denominator))


_LARGEST_FACTOR: Final = 8


def _multiples(places: Mapping[_Values, Sequence[_NumberPlace]]) -> dict[_Values, _Multiple]:
    """The numbers of constructors that follow from those of arguments. Numbers that have a name in the author's
    constructor are arguments."""
    multiples: dict[_Values, _Multiple] = {}
    named = [values for values, of_values in places.items() if any(place.author_name for place in of_values)]
    bases = [values for values in named if all(value.text.isdigit() for value in values)]
    unnamed = [values for values in places if values not in named and all(value.text.isdigit() for value in values)]
    for values in sorted(unnamed, key=_integers):
        in_constructor = not any(place.is_in_forward or place.default is not None for place in places[values])
        multiple = next(filter(None, (_multiple(values, base) for base in bases)), None) if in_constructor else None
        if multiple is None:
            bases.append(values)
        else:
            multiples[values] = multiple
    return multiples


def _multiple(values: _Values, base: _Values) -> _Multiple | None:
    """What the numbers are of those of an argument; None if they are no simple multiple."""
    pairs = list(zip(_integers(values), _integers(base), strict=True))
    if any(number == 0 for pair in pairs for number in pair):
        return None
    factors = {Fraction(value, number) for value, number in pairs}
    if len(factors) == 1:
        factor = factors.pop()
        is_simple = factor.denominator.bit_count() == 1  # widths are divided by powers of two; 4 / 3 is a coincidence
        is_small = max(factor.numerator, factor.denominator) <= _LARGEST_FACTOR
        return _Multiple(base, factor) if is_simple and is_small else None
    return _Multiple(base, None) if all(value == number * number for value, number in pairs) else None


def _integers(values: _Values) -> tuple[int, ...]:
    return tuple(int(value.text) for value in values)


def _names(members: Sequence[ClassSource], places: Mapping[_Values, Sequence[_NumberPlace]]) -> dict[_Values, str]:
    """The names of the arguments that replace numbers."""
    first = members[0]
    assigned = [assigned_attributes(member.init) for member in members]
    names: dict[_Values, str] = {}
    for values, of_values in places.items():
        keys = [name for name in first.attributes if tuple(cls.attributes.get(name) for cls in members) == values]
        parameter = of_values[0].parameter
        author_name = next((place.author_name for place in of_values if place.author_name), "")
        name = author_name or (parameter if parameter in keys or not keys else keys[0])
        targets = {target for target in assigned[0] if tuple(member.get(target) for member in assigned) != values}
        used_names = {*first.parameters, *names.values(), *registered_names(first.init)}
        if not author_name or any(place.is_in_forward for place in of_values):
            used_names |= targets  # forward reads the argument as an attribute
        names[values] = unused(attribute_variable(name, "size"), used_names)
    return names


def _defaults(places: Mapping[_Values, Sequence[_NumberPlace]]) -> dict[_Values, Expression]:
    """The defaults of the arguments that replace numbers: what calls leave out."""
    defaults: dict[_Values, Expression] = {}
    for values, of_values in places.items():
        left_out = {place.default for place in of_values if place.default is not None}
        if len(left_out) == 1:
            defaults[values] = left_out.pop()
    return defaults


@dataclass(frozen=True)
class NumberGroup:
    """Classes that are equal except for numbers.

    Attributes:
        members: the classes.
        varying: the numbers that differ: their values in all members → the name of the argument that replaces them.
        defaults: the defaults of these arguments, by the values of the numbers.
        derived: the other numbers that differ: their values in all members → their expression of an argument.
    """

    members: tuple[ClassSource, ...]
    varying: Mapping[_Values, str]
    defaults: Mapping[_Values, Expression]
    derived: Mapping[_Values, Expression]

    def fits(self, other_arguments: int = 0) -> bool:
        """Return whether one class with arguments reads better than its copies."""
        return len(self.varying) + other_arguments <= MAX_ARGUMENTS + PER_COPY * (len(self.members) - 2)

    def call(self, index: int) -> FunctionCall:
        """The call of the constructor for one member."""
        short = len(self.varying) <= 2 and all(values[index].text.isdigit() for values in self.varying)
        passing = Passing.POSITIONAL if short and not self.defaults else Passing.KEYWORD
        arguments = (
            Argument(values[index], name, passing, self.defaults.get(values)) for values, name in self.varying.items()
        )
        return FunctionCall(Name(self.members[0].name), tuple(arguments))

    def merged(self) -> ClassSource:
        """The class of the first member, with arguments for the numbers. ``forward`` reads them as attributes."""
        per_member = [[value for value, _ in _numbers(member)] for member in self.members]
        values = zip(*per_member, strict=True)
        stored: dict[str, None] = {}

        def in_init(number: Literal, place: _NumberPlace) -> Expression:
            numbers = next(values)
            argument = self.varying.get(numbers)
            return self.derived.get(numbers, number) if argument is None else Name(argument)

        def in_forward(number: Literal, place: _NumberPlace) -> Expression:
            argument = in_init(number, place)
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
        return replace(
            source,
            init_parameters=tuple(name for values, name in self.varying.items() if values not in self.defaults),
            defaults={name: self.defaults[values] for values, name in self.varying.items() if values in self.defaults},
            init=(*assignments, *source.init),
        )


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


def _numbers(source: ClassSource) -> Iterator[tuple[Literal, _NumberPlace]]:
    """Every number, with its place, in the order of the source."""
    numbers: list[tuple[Literal, _NumberPlace]] = []

    def collect(number: Literal, place: _NumberPlace) -> Expression:
        numbers.append((number, place))
        return number

    def collect_in_forward(number: Literal, place: _NumberPlace) -> Expression:
        return collect(number, replace(place, is_in_forward=True))

    _with_numbers(source, collect, collect_in_forward)
    return iter(numbers)


def author_numbers(init: Iterable[Statement], names: AuthorArguments) -> dict[str, int | float]:
    """The names that the author's constructor has for the numbers in statements of ``__init__`` → the numbers."""
    numbers: dict[str, set[Literal]] = {}

    def collect(number: Literal, place: _NumberPlace) -> Expression:
        if place.author_name:
            numbers.setdefault(place.author_name, set()).add(number)
        return number

    for statement in init:
        _NumberChange(collect, names, statement).changed(statement)
    return {name: ast.literal_eval(values.pop().text) for name, values in numbers.items() if len(values) == 1}


def _with_numbers(source: ClassSource, change: _Change, change_in_forward: _Change | None = None) -> ClassSource:
    """A class with its numbers changed, including those that a call leaves to a default."""

    names = source.author_arguments
    children, init = (
        tuple(_NumberChange(change, names, node).changed(node) for node in nodes)
        for nodes in (source.children, source.init)
    )
    forward = tuple(_NumberChange(change_in_forward or change).changed(node) for node in source.forward)
    return replace(source, children=children, init=init, forward=forward)


class _NumberChange:
    """Changes the numbers of one statement.

    Args:
        change: what changes them.
        names: the names that the author's constructor has for numbers.
        statement: the statement of the constructor.
    """

    def __init__(self, change: _Change, names: AuthorArguments | None = None, statement: Node | None = None) -> None:
        self._change = change
        self._names = names
        self._attribute = ""
        match statement:
            case Assign(targets=(Attribute(owner=owner, name=name),)) if owner == SELF and names is not None:
                self._attribute = name
                calls = (_class_name(node) for node in statement.walk() if isinstance(node, FunctionCall))
                self._counts = Counter(calls)
        self._begun: Counter[str] = Counter()

    def changed(self, node: Any, place: _NumberPlace = _NumberPlace()) -> Any:
        """A node with its numbers changed."""
        if isinstance(node, Literal):
            return self._change(node, place) if node.is_number else node
        if isinstance(node, FunctionCall) and self._attribute:
            return self._changed_call(node)
        if isinstance(node, Argument):
            return self._changed_argument(node, "")
        return node.rebuilt(self.changed)

    def _changed_argument(self, argument: Argument, author_name: str) -> Argument:
        default = argument.value if argument.is_left_out else None
        return argument.changed(
            self.changed(argument.value, _NumberPlace(argument.name or "size", author_name, default))
        )

    def _changed_call(self, call: FunctionCall) -> FunctionCall:
        assert self._names is not None
        class_name = _class_name(call)
        index, count = self._begun[class_name], self._counts[class_name]
        self._begun[class_name] += 1
        arguments: list[Argument] = []
        for position, argument in enumerate(call.arguments):
            parameter = argument.name or position_name(position)
            name = self._names.name(self._attribute, class_name, parameter, index, count)
            arguments.append(self._changed_argument(argument, name))
        function = self.changed(call.function)
        return replace(call, function=function, arguments=tuple(arguments))


def _class_name(call: FunctionCall) -> str:
    """The name of the class that a call makes, without the number of a class of several under one name."""
    return call.function.text.rpartition(".")[2].rstrip("0123456789") or call.function.text


def module_attributes(module: nn.Module) -> dict[str, Expression]:
    """The numbers, texts and None among the attributes of a module. Arguments of the constructor come first."""
    values = {
        name: literal(value)
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, NoneType)) and name != "training" and not name.startswith("_")
    }
    order = (*inspect.signature(type(module).__init__).parameters, *values)
    return {name: values[name] for name in order if name in values}
