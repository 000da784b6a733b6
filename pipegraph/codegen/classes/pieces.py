"""Generated source taken apart into its numbers and the text between them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from pipegraph.codegen.syntax.literals import literal

_STRING = r'"(?:[^"\\]|\\.)*"|' + r"'(?:[^'\\]|\\.)*'"
_NUMBER = r"(?<![\w.])(?:\d+(?:\.\d*)?(?:e-?\d+)?|True|False)(?!\w)"
# A call whose arguments hold no call; nothing else of a constructor's text has brackets but tuples.
_CALL = r"(?<![\w.])(?P<callee>(?:nn\.|F\.)?[A-Za-z_]\w*)\((?P<inside>[^()\"']*)\)"
_PART = re.compile(f"(?P<string>{_STRING})|{_CALL}|(?P<number>{_NUMBER})")
_MADE = re.compile(rf"(?P<string>{_STRING})|(?<![\w.])(?P<callee>[A-Za-z_]\w*)\((?P<bare>\))?")


@dataclass(frozen=True)
class Hole:
    """A number and, where it is an argument of a constructor, what it is called there."""

    value: str
    name: str

    @property
    def template(self) -> object:
        return None


@dataclass(frozen=True)
class Options:
    """The named arguments of a ``torch.nn`` module's constructor, or of a function ``F.…``, that are numbers; those
    left out have defaults."""

    module: str
    given: tuple[tuple[str, str], ...]
    leads: bool

    @property
    def template(self) -> object:
        return self.module, self.leads, tuple(name for name, _ in self.given if name not in _defaults(self.module))

    def everything(self) -> dict[str, str]:
        """All numbers among the named arguments in the constructor's order, defaults included."""
        return {**_defaults(self.module), **dict(self.given)}

    def text(self, replaced: Mapping[str, str]) -> str:
        """The arguments as they stand in a call, some of them ``replaced``."""
        shown = {name: replaced.get(name) or dict(self.given).get(name) for name in self.everything()}
        text = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        return text if self.leads or not text else f", {text}"


Piece = str | Hole | Options


def pieces(text: str, arguments: Mapping[str, tuple[str, ...]]) -> Iterator[Piece]:
    """The text between numbers, numbers, and named numbers of constructors, in order.

    Args:
        arguments: the names of the constructor's arguments of each generated class.
    """
    end = 0
    for match in _PART.finditer(text):
        yield text[end : match.start()]
        end = match.end()
        if match["number"] is not None:
            yield Hole(match["number"], "size")
        elif match["string"] is not None:
            yield match["string"]
        else:
            yield from _call(match["callee"], match["inside"], arguments)
    yield text[end:]


def _call(callee: str, inside: str, arguments: Mapping[str, tuple[str, ...]]) -> Iterator[Piece]:
    """The pieces of ``callee(inside)``."""
    module = callee.removeprefix("nn.")
    is_leaf = callee.startswith(("nn.", "F.")) and bool(_parameters(module))
    formal = _parameters(module) if is_leaf else arguments.get(callee, ())
    given: list[tuple[str, str]] = []
    others = 0
    yield f"{callee}("
    parts = [part for part in inside.split(", ") if part] if is_leaf or callee in arguments else []
    if not parts and inside:
        yield from _numbers(inside)
    for position, part in enumerate(parts):
        name, equals, value = part.rpartition("=")
        number = re.fullmatch(_NUMBER, value) is not None
        if is_leaf and equals and number:
            given.append((name, value))
            continue
        yield f"{', ' if others else ''}{name}{equals}"
        others += 1
        if number:
            yield Hole(value, name or (formal[position] if position < len(formal) else "size"))
        else:
            yield from _numbers(value)
    if is_leaf:
        yield Options(module, tuple(given), leads=not others)
    yield ")"


def _numbers(text: str) -> Iterator[Piece]:
    end = 0
    for match in re.finditer(_NUMBER, text):
        yield text[end : match.start()]
        yield Hole(match[0], "size")
        end = match.end()
    yield text[end:]


@cache
def _parameters(module: str) -> tuple[str, ...]:
    if module.startswith("F."):
        return tuple(argument.name for argument in _schema(module))
    cls = getattr(nn, module, None)
    return tuple(inspect.signature(cls).parameters) if isinstance(cls, type) else ()


@cache
def _defaults(module: str) -> dict[str, str]:
    """The named arguments whose default is a number → that number."""
    if module.startswith("F."):
        defaults = {each.name: each.default_value for each in _schema(module) if each.has_default_value()}
    else:
        entries = inspect.signature(getattr(nn, module)).parameters.values()
        defaults = {each.name: each.default for each in entries}
    return {name: literal(value) for name, value in defaults.items() if isinstance(value, (bool, int, float))}


def _schema(function: str) -> Sequence[torch.Argument]:
    """The arguments of the operation behind ``F.…``, where it is one; Python knows no signature of such functions."""
    packet = getattr(torch.ops.aten, function.removeprefix("F."), None)
    return packet.default._schema.arguments if packet is not None and packet.overloads() == ["default"] else ()


def call_texts(text: str, calls: Mapping[str, str]) -> str:
    """``text`` with the calls ``Block2()`` replaced by those of ``calls``; strings are left alone."""
    return _MADE.sub(lambda match: calls.get(match["callee"] or "", match[0]) if match["bare"] else match[0], text)


def rename_calls(text: str, names: Mapping[str, str]) -> str:
    """``text`` with other names for the classes that it calls, whatever their arguments; strings are left alone."""

    def renamed(match: re.Match[str]) -> str:
        callee = match["callee"]
        return f"{names[callee]}({match['bare'] or ''}" if callee in names else match[0]

    return _MADE.sub(renamed, text)
