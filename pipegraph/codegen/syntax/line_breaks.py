"""Break long lines of generated source the way a formatter would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

LINE_LENGTH = 120
_OPEN, _CLOSE = "([{", ")]}"
# From those that bind least strongly to those that bind most strongly.
_OPERATORS = (
    ("==", "!=", "<=", ">=", "<", ">"),
    ("|",),
    ("^",),
    ("&",),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "@", "%", "//"),
    ("**",),
)
_INDEX = re.compile(r"[)\]]\[-?\d+\]")
_OPERATOR = re.compile(f" ({'|'.join(re.escape(symbol) for symbols in _OPERATORS for symbol in symbols)}) ")


def wrap(line: str, indent: int) -> list[str]:
    """The lines of a statement at ``indent`` spaces, broken if it is too long for one.

    The value of an assignment or a ``return`` goes into brackets if it is a chain of operators or of methods. All else
    is broken inside its last bracket. The arguments of a call get one line of their own if they fit; otherwise every
    element gets a line with a trailing comma.
    """
    pad = " " * indent
    if len(pad + line) <= LINE_LENGTH:
        return [pad + line]
    target, value = _statement(line)
    if target and _goes_into_brackets(value):
        return [f"{pad}{target}(", *_in_brackets(value, indent + 4), f"{pad})"]
    start, stop = _last_bracket(line, LINE_LENGTH - indent)
    if start < 0:
        return [pad + line]
    names = _split(target.removesuffix(" = "))
    if start + indent >= LINE_LENGTH and len(names) > 1:
        assigned, *after_first = wrap(f"_ = {value}", indent)
        opened = [f"{pad}(", *(f"{pad}    {name}," for name in names)]
        return [*opened, assigned.replace("_", ")", 1), *after_first]
    head, content, tail = line[: start + 1], line[start + 1 : stop], line[stop:]
    elements = _split(content)
    inner = " " * (indent + 4)
    literal = not head[:-1] or head[-2] in " =([{"
    if len(inner + content) <= LINE_LENGTH and not content.endswith(",") and not (literal and len(elements) > 1):
        return [pad + head, inner + content, pad + tail]
    loops = [position for position, depth in _depths(content) if not depth and content.startswith(" for ", position)]
    if loops and len(elements) == 1 and head[-1] in "[{":
        body, clause = content[: loops[-1]], content[loops[-1] + 1 :]
        return [pad + head, *wrap(body, indent + 4), inner + clause, pad + tail]
    if len(elements) == 1 and content[-1] in _CLOSE:
        return [pad + head, *wrap(content, indent + 4), pad + tail]
    lines = [pad + head]
    for element in elements:
        broken = wrap(element, indent + 4)
        lines += [*broken[:-1], f"{broken[-1]},"]
    return [*lines, pad + tail]


def reads_well(line: str, indent: int) -> bool:
    """Return whether a line fits, or can be broken so that no method follows a broken call: ``x.view(…).to(…)``."""
    value = _statement(line)[1]
    return len(line) + indent <= LINE_LENGTH or not _methods(value) or _goes_into_brackets(value)


def _statement(line: str) -> tuple[str, str]:
    """Split a statement into ``x = `` or ``return ``, and its value. All else is a value, after an empty text."""
    if line.startswith("return "):
        return "return ", line.removeprefix("return ")
    positions = [position for position, depth in _depths(line) if not depth and line.startswith(" = ", position)]
    return (line[: positions[0] + 3], line[positions[0] + 3 :]) if positions else ("", line)


def _goes_into_brackets(value: str) -> bool:
    """Return whether a formatter breaks a value at its operators or methods, not inside its last (or first) bracket."""
    if "," in (value[position] for position, depth in _depths(value) if not depth):
        return False
    operators = _loosest_operators(value)
    if operators:
        ends = value[-1] in _CLOSE and value[-2] not in _OPEN
        return len(operators) > 1 or not (ends or value[0] in _OPEN)
    return len(_methods(value)) > 1


def _methods(value: str) -> list[int]:
    """The positions of closing brackets that a method follows, outside other brackets."""
    return [at for at, depth in _depths(value) if not depth and value[at] in _CLOSE and value[at + 1 : at + 2] == "."]


def _in_brackets(value: str, indent: int) -> list[str]:
    """A value on a separate line, or broken before each of its loosest operators."""
    if len(value) + indent <= LINE_LENGTH:
        return [" " * indent + value]
    starts = [0, *(position + 1 for position in _loosest_operators(value)), len(value) + 1]
    parts = [value[start : stop - 1] for start, stop in pairwise(starts)]
    return [line for part in parts for line in wrap(part, indent)]


def _loosest_operators(value: str) -> list[int]:
    """The positions of the spaces before the operators that bind least strongly, outside brackets."""
    by_strength: dict[int, list[int]] = {}
    for position, depth in _depths(value):
        match = _OPERATOR.match(value, position) if not depth else None
        if match:
            strength = next(row for row, symbols in enumerate(_OPERATORS) if match[1] in symbols)
            by_strength.setdefault(strength, []).append(position)
    return by_strength[min(by_strength)] if by_strength else []


def _last_bracket(line: str, width: int) -> tuple[int, int]:
    """The positions of the last outermost pair of brackets that begins before ``width``, or else of the first pair.

    Both are −1 without such a pair. Empty brackets do not count, and neither does an index: ``heads(x)[0]``.
    """
    start, pair = -1, (-1, -1)
    for position, depth in _depths(line):
        if line[position] in _OPEN and not depth:
            start = position
        elif line[position] in _CLOSE and not depth and position - start > 1 and (start < width or pair[0] < 0):
            is_index = start > 0 and _INDEX.fullmatch(line, start - 1, position + 1) is not None
            pair = pair if is_index and pair[0] >= 0 else (start, position)
    return pair


def _split(content: str) -> list[str]:
    """The elements between commas outside brackets and strings."""
    commas = [position for position, depth in _depths(content) if not depth and content[position] == ","]
    elements = [content[start + 1 : stop].strip() for start, stop in pairwise((-1, *commas, len(content)))]
    return [element for element in elements if element]


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """The characters outside string literals: the position of each, and the number of brackets around it. A bracket is
    not inside itself."""
    depth, quote, escaped = 0, "", False
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "\"'":
            quote = character
        else:
            depth -= character in _CLOSE
            yield position, depth
            depth += character in _OPEN
