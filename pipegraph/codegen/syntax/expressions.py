"""Python expressions as data: built from parts, compared as a whole, and turned into text when they are written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import cached_property
from typing import Any, Self

import torch

from pipegraph.codegen.names.identifiers import is_plain

# How strongly Python's operators bind. An operand that binds less strongly needs brackets.
ATOM, _POWER, _UNARY, _SUM, _COMPARISON, _AND, _CONDITIONAL, _NONE = 20, 15, 14, 12, 7, 3, 1, 0
_STRENGTHS = {
    **dict.fromkeys(("in", "is not", "==", "!=", "<", "<=", ">", ">="), _COMPARISON),
    **{"|": 8, "^": 9, "&": 10},
    **dict.fromkeys("+-", _SUM),
    **dict.fromkeys(("*", "/", "//", "@", "%"), 13),
    "**": _POWER,
    "and": _AND,
}
# Operands around which a formatter leaves no space: x**2.
_SIMPLE = re.compile(r"-?[\w.]+(\*\*-?[\w.]+)*")
# Names and numbers in a slice, around which it leaves none: x[1:n].
_PLAIN = re.compile(r"(-?\w+)?")


class Node:
    """A part of a program: a frozen dataclass whose fields hold other nodes, or tuples of them."""

    def parts(self) -> Iterator[Node]:
        """The nodes directly inside this one, in the order of the source."""
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            yield from (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Node))

    def walk(self) -> Iterator[Node]:
        """This node and all nodes inside it, in the order of the source."""
        yield self
        for part in self.parts():
            yield from part.walk()

    def rebuilt(self, change: Callable[[Any], Any]) -> Self:
        """The same node, with ``change`` applied to each node directly inside; the node itself if nothing changes."""
        changed: dict[str, Any] = {}
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            if isinstance(value, tuple):
                parts = tuple(change(part) if isinstance(part, Node) else part for part in value)
                if any(new is not old for new, old in zip(parts, value, strict=True)):
                    changed[entry.name] = parts
            elif isinstance(value, Node) and (part := change(value)) is not value:
                changed[entry.name] = part
        return replace(self, **changed) if changed else self  # type: ignore[type-var]


class Expression(Node):
    """An expression."""

    @property
    def text(self) -> str:
        """Source text on one line."""
        raise NotImplementedError

    @property
    def strength(self) -> int:
        """How strongly the outermost operator binds."""
        return ATOM

    def within(self, strength: int) -> str:
        """The text as an operand of an operator of that strength."""
        return self.text if self.strength >= strength else f"({self.text})"

    def names(self) -> set[str]:
        """The variables, modules and functions that it reads."""
        return {node.name for node in self.walk() if isinstance(node, Name)}


@dataclass(frozen=True)
class Name(Expression):
    """A variable, or a member of a module by its dotted name: ``x``, ``torch.float32``."""

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


class Passing(Enum):
    """How an argument is passed."""

    POSITIONAL = "by its position"
    KEYWORD = "by its name"
    DEFAULT = "not at all, because the parameter has this default"


@dataclass(frozen=True)
class Argument(Node):
    """An argument of a call.

    Attributes:
        value: of the argument.
        name: of the parameter, "" if it is not known.
        passing: how it is passed.
        default: of the parameter, if other calls of the same function do not pass it.
    """

    value: Expression
    name: str = ""
    passing: Passing = Passing.POSITIONAL
    default: Expression | None = field(default=None, compare=False)

    @property
    def is_left_out(self) -> bool:
        """Whether the call does not mention it."""
        return self.passing is Passing.DEFAULT or self.value == self.default

    def changed(self, value: Expression) -> Argument:
        """The argument with another value."""
        if self.passing is not Passing.DEFAULT or value == self.value:
            return replace(self, value=value)
        return Argument(value, self.name, Passing.KEYWORD, default=self.value)


@dataclass(frozen=True)
class FunctionCall(Expression):
    """``function(value, name=value, …)``; positional arguments come first."""

    function: Expression
    arguments: tuple[Argument, ...] = ()

    @cached_property
    def text(self) -> str:
        passed = [argument for argument in self.arguments if not argument.is_left_out]
        prefixes = ("" if argument.passing is Passing.POSITIONAL else f"{argument.name}=" for argument in passed)
        inside = ", ".join(f"{prefix}{argument.value.text}" for prefix, argument in zip(prefixes, passed, strict=True))
        return f"{self.function.within(ATOM)}({inside})"


@dataclass(frozen=True)
class ModuleInvocation(FunctionCall):
    """The call of a module of a generated class: ``self.attention(hidden_states, mask)``.

    Attributes:
        classes: the class of the module. In a loop over modules of several classes, all of them.
    """

    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Subscript(Expression):
    """``owner[index, …]``."""

    owner: Expression
    indices: tuple[Expression, ...]

    @cached_property
    def text(self) -> str:
        return f"{self.owner.within(ATOM)}[{', '.join(index.text for index in self.indices)}]"


@dataclass(frozen=True)
class TensorSubscript(Subscript):
    """The subscript of a tensor by slices and numbers."""

    def of_dimensions(self, count: int) -> list[Expression]:
        """The indices of all dimensions of the tensor, of which ``count`` are left."""
        start, *tail = self.indices
        indices = tail if start == Literal("...") else [start, *tail]
        padding = [Slice()] * (count - sum(isinstance(index, Slice) for index in indices))
        return [*indices, *padding] if indices[0] is start else [*padding, *indices]


@dataclass(frozen=True)
class Slice(Expression):
    """``start:stop:step`` inside a subscript; a formatter leaves space around the colons of ``start : stop + 1``."""

    start: Expression | None = None
    stop: Expression | None = None
    step: Expression | None = None

    @cached_property
    def text(self) -> str:
        start, stop, step = ("" if part is None else part.text for part in (self.start, self.stop, self.step))
        if all(_PLAIN.fullmatch(part) for part in (start, stop, step)):
            return f"{start}:{stop}{':' if step else ''}{step}"
        parts = [start, ":", stop, *((":", step) if step else ())]
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Collection(Expression):
    """``(a, b)``, ``[a, b]`` or ``{a: b}``."""

    items: tuple[Expression, ...]
    brackets: str

    @cached_property
    def text(self) -> str:
        comma = "," if self.brackets == "()" and len(self.items) == 1 else ""
        return f"{self.brackets[0]}{', '.join(element.text for element in self.items)}{comma}{self.brackets[1]}"


@dataclass(frozen=True)
class Binary(Expression):
    """``left + right``."""

    symbol: str
    left: Expression
    right: Expression

    @property
    def strength(self) -> int:
        return _STRENGTHS[self.symbol]

    @cached_property
    def text(self) -> str:
        left_text = self.left.within(self.strength + (self.symbol == "**" or self.strength == _COMPARISON))
        right = self.right.within(self.strength + (self.symbol != "**"))
        close = self.symbol == "**" and _SIMPLE.fullmatch(left_text) and _SIMPLE.fullmatch(right)
        return f"{left_text}**{right}" if close else f"{left_text} {self.symbol} {right}"


@dataclass(frozen=True)
class Template(Expression):
    """Any other expression: its text with ``{}`` for each operand.

    Attributes:
        outer: the strength of the expression.
        inner: the strength that its operands need.
    """

    template: str
    operands: tuple[Expression, ...]
    outer: int = ATOM
    inner: int = _NONE

    @property
    def strength(self) -> int:
        return self.outer

    @cached_property
    def text(self) -> str:
        return self.template.format(*(operand.within(self.inner) for operand in self.operands))


SELF = Name("self")


def attribute(owner: Expression, name: str) -> Expression:
    """The attribute of any name: ``owner.name`` or, if the name is not an identifier, ``getattr(owner, "…")``."""
    return Attribute(owner, name) if is_plain(name) else call("getattr", owner, string(name))


def call(function: str | Expression, *positional: Expression, **named: Expression) -> FunctionCall:
    """``function(positional…, name=value…)``; a function may be given by its dotted name."""
    keywords = (Argument(value, name, Passing.KEYWORD) for name, value in named.items())
    called = Name(function) if isinstance(function, str) else function
    return FunctionCall(called, (*map(Argument, positional), *keywords))


def method(owner: Expression, name: str, *positional: Expression, **named: Expression) -> FunctionCall:
    """``owner.name(positional…, name=value…)``."""
    return call(Attribute(owner, name), *positional, **named)


def string(text: str) -> Literal:
    """A string literal in ASCII, on one line, with the quotes that a formatter would choose."""
    body = text.encode("unicode_escape").decode("ascii")
    if '"' in body and "'" not in body:
        return Literal(f"'{body}'")
    return Literal('"' + body.replace('"', '\\"') + '"')


def unary(symbol: str, operand: Expression) -> Template:
    """``-operand``."""
    return Template(f"{symbol}{{}}", (operand,), outer=_UNARY, inner=ATOM)


def conditional(value: Expression, test: Expression, orelse: Expression) -> Template:
    """``value if test else other``."""
    return Template("{} if {} else {}", (value, test, orelse), outer=_CONDITIONAL)


def literal(value: Any) -> Expression:
    """The expression that evaluates to ``value`` if only ``torch`` is imported; an expression is returned as it is.

    Raises:
        TypeError: the value is of a type that no ATen argument has.
    """
    if isinstance(value, Expression):
        return value
    if value is None or value is ...:
        return Literal("None" if value is None else "...")
    if type(value) in (bool, int):  # a dynamic size has no literal
        return Literal(str(value), is_number=True)
    if isinstance(value, float):
        if not math.isfinite(value):
            return call("float", string(str(value)))
        return Literal(float.__repr__(value).replace("e+", "e"), is_number=True)  # numpy's floats say np.float64(…)
    if isinstance(value, complex):
        return call("complex", literal(value.real), literal(value.imag))
    if isinstance(value, str):
        return string(value)
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return Name(str(value))
    if isinstance(value, torch.device):
        return call("torch.device", string(str(value)))
    if isinstance(value, (tuple, list)):
        return Collection(tuple(map(literal, value)), "()" if isinstance(value, tuple) else "[]")
    raise TypeError(f"no literal for {type(value).__name__}")
