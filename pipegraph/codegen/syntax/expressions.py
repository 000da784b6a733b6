"""Python expressions as data: built from parts, compared as wholes, turned into text when they are written."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from pipegraph.codegen.names.identifiers import is_plain

# How strongly Python's operators bind; an operand that binds less strongly is put into brackets.
ATOM, UNARY, CONDITIONAL = 20, 14, 1
_POWER, _SUM, _COMPARISON = 15, 12, 7
_STRENGTHS = {
    **dict.fromkeys(("in", "==", "!=", "<", "<=", ">", ">="), _COMPARISON),
    **{"|": 8, "^": 9, "&": 10},
    **dict.fromkeys("+-", _SUM),
    **dict.fromkeys("*/@%", 13),
    "**": _POWER,
}
# Operands around which a formatter leaves no space: x**2.
_SIMPLE = re.compile(r"-?[\w.]+(\*\*-?[\w.]+)*")


class Node:
    """A part of a program: a frozen dataclass whose fields hold other nodes, or tuples of them."""

    def parts(self) -> Iterator[Node]:
        """The nodes directly inside, in the order of the source."""
        for entry in fields(self):  # type: ignore[arg-type]
            yield from _nodes(getattr(self, entry.name))

    def walk(self) -> Iterator[Node]:
        """This node and all inside it."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def rebuilt(self, change: Callable[[Any], Any]) -> Self:
        """The same node, with ``change`` applied to each node directly inside."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]
        return replace(self, **{name: _changed(value, change) for name, value in values.items()})  # type: ignore[type-var]


def _nodes(value: object) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _nodes(part)


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, Node):
        return change(value)
    return tuple(_changed(part, change) for part in value) if isinstance(value, tuple) else value


class Expression(Node):
    """An expression. ``strength`` is how strongly its outermost operator binds."""

    strength: ClassVar[int] = ATOM

    @cached_property
    def text(self) -> str:
        """Source text on one line."""
        raise NotImplementedError

    def within(self, strength: int) -> str:
        """The text as an operand of an operator of that strength."""
        return self.text if self.strength >= strength else f"({self.text})"

    def names(self) -> set[str]:
        """The variables, modules and functions that it mentions."""
        return {node.name for node in self.walk() if isinstance(node, Name)}


@dataclass(frozen=True)
class Name(Expression):
    """A variable, or something of a module under its dotted name: ``x``, ``torch.float32``."""

    name: str

    @property
    def text(self) -> str:
        return self.name


@dataclass(frozen=True)
class Literal(Expression):
    """A constant as it is written. ``is_number`` is true for integers, floats and booleans."""

    source: str
    is_number: bool = False

    @property
    def text(self) -> str:
        return self.source

    def within(self, strength: int) -> str:
        closer = strength > _POWER or strength == _SUM + 1
        return f"({self.source})" if closer and self.source.startswith("-") else self.source


@dataclass(frozen=True)
class Attribute(Expression):
    """``owner.name``."""

    owner: Expression
    name: str

    @cached_property
    def text(self) -> str:
        return f"{self.owner.within(ATOM)}.{self.name}"


@dataclass(frozen=True)
class FunctionCall(Expression):
    """``function(positional…, name=value…)``."""

    function: Expression
    positional: tuple[Expression, ...] = ()
    named: tuple[tuple[str, Expression], ...] = ()

    @cached_property
    def text(self) -> str:
        arguments = [*(each.text for each in self.positional), *(f"{name}={each.text}" for name, each in self.named)]
        return f"{self.function.within(ATOM)}({', '.join(arguments)})"


@dataclass(frozen=True)
class Subscript(Expression):
    """``owner[index, …]``."""

    owner: Expression
    indices: tuple[Expression, ...]

    @cached_property
    def text(self) -> str:
        return f"{self.owner.within(ATOM)}[{', '.join(each.text for each in self.indices)}]"


@dataclass(frozen=True)
class Slice(Expression):
    """``start:stop:step`` inside a subscript."""

    start: Expression | None = None
    stop: Expression | None = None
    step: Expression | None = None

    @cached_property
    def text(self) -> str:
        start, stop = (each.text if each is not None else "" for each in (self.start, self.stop))
        return f"{start}:{stop}" + (f":{self.step.text}" if self.step is not None else "")


@dataclass(frozen=True)
class Collection(Expression):
    """``(a, b)``, ``[a, b]`` or, if the items are ``KeyValue``s, ``{a: b}``."""

    items: tuple[Expression, ...]
    brackets: str

    @cached_property
    def text(self) -> str:
        comma = "," if self.brackets == "()" and len(self.items) == 1 else ""
        return f"{self.brackets[0]}{', '.join(each.text for each in self.items)}{comma}{self.brackets[1]}"


@dataclass(frozen=True)
class Comprehension(Expression):
    """``[element for variable in iterable]``, or ``{key: value for …}`` if the element is a ``KeyValue``."""

    element: Expression
    variable: str
    iterable: Expression
    brackets: str

    @cached_property
    def text(self) -> str:
        inside = f"{self.element.text} for {self.variable} in {self.iterable.text}"
        return f"{self.brackets[0]}{inside}{self.brackets[1]}"


@dataclass(frozen=True)
class KeyValue(Expression):
    """``key: value`` inside a dict."""

    key: Expression
    value: Expression

    @cached_property
    def text(self) -> str:
        return f"{self.key.text}: {self.value.text}"


@dataclass(frozen=True)
class Unpacked(Expression):
    """``*value`` inside a call."""

    value: Expression

    @cached_property
    def text(self) -> str:
        return f"*{self.value.text}"


@dataclass(frozen=True)
class Unary(Expression):
    """``-operand`` or ``~operand``."""

    symbol: str
    operand: Expression
    strength: ClassVar[int] = UNARY

    @cached_property
    def text(self) -> str:
        return f"{self.symbol}{self.operand.within(ATOM)}"


@dataclass(frozen=True)
class Binary(Expression):
    """``left + right``."""

    symbol: str
    left: Expression
    right: Expression

    @property
    def strength(self) -> int:  # type: ignore[override]
        return _STRENGTHS[self.symbol]

    @cached_property
    def text(self) -> str:
        left = self.left.within(self.strength + (self.symbol == "**" or self.strength == _COMPARISON))
        right = self.right.within(self.strength + (self.symbol != "**"))
        close = self.symbol == "**" and _SIMPLE.fullmatch(left) and _SIMPLE.fullmatch(right)
        return f"{left}**{right}" if close else f"{left} {self.symbol} {right}"


@dataclass(frozen=True)
class Conditional(Expression):
    """``value if test else other``."""

    value: Expression
    test: Expression
    other: Expression
    strength: ClassVar[int] = CONDITIONAL

    @cached_property
    def text(self) -> str:
        return f"{self.value.text} if {self.test.text} else {self.other.text}"


SELF = Name("self")


def attribute(owner: Expression, name: str) -> Expression:
    """The attribute of that name, whatever it is called: ``owner.name`` or ``getattr(owner, "…")``."""
    return Attribute(owner, name) if is_plain(name) else call("getattr", owner, string(name))


def call(function: str, *positional: Expression, **named: Expression) -> FunctionCall:
    """``function(positional…, name=value…)``; ``function`` is the name of a variable or of something in a module."""
    return FunctionCall(Name(function), positional, tuple(named.items()))


def method(owner: Expression, name: str, *positional: Expression, **named: Expression) -> FunctionCall:
    """``owner.name(positional…, name=value…)``."""
    return FunctionCall(Attribute(owner, name), positional, tuple(named.items()))


def string(text: str) -> Literal:
    """A string literal: ASCII, on one line, in the quotes that a formatter would choose."""
    body = text.encode("unicode_escape").decode("ascii")
    if '"' in body and "'" not in body:
        return Literal(f"'{body}'")
    return Literal('"' + body.replace('"', '\\"') + '"')
