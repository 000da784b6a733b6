"""Edit the text of a function at the places of its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, NamedTuple

from pipegraph.codegen.author_text.cut import TextLine, UnwritableError
from pipegraph.codegen.syntax.line_breaks import LINE_LENGTH

_CLASS_INDENT: Final = 4

Place = tuple[int, int]
"""A line, from 1, and a column, in bytes of UTF-8."""


class Edit(NamedTuple):
    """A part of a text between two places, and the text instead of it."""

    start: Place
    end: Place
    text: str

    def is_within(self, node: ast.expr) -> bool:
        """Return whether it changes a part of a node."""
        return start_of(node) <= self.start and self.end <= end_of(node)


def replacement(node: ast.expr, text: str) -> Edit:
    """The edit that replaces a node. Raises UnwritableError if that is on several lines."""
    if node.lineno != node.end_lineno:
        raise UnwritableError("an attribute stands on two lines")
    return Edit(start_of(node), end_of(node), text)


def edited(lines: Sequence[TextLine], edits: Iterable[Edit]) -> list[TextLine | None]:
    """Lines after edits, with None for those that an edit joins to the line before."""
    changed: list[TextLine | None] = list(lines)
    for edit in sorted(edits, reverse=True):
        first, last = edit.start[0] - 1, edit.end[0] - 1
        head, tail = _text(changed, first)[: edit.start[1]], _text(changed, last)[edit.end[1] :]
        numbers = [number for line in changed[first : last + 1] if line is not None for number in line.numbers]
        changed[first] = TextLine((head + edit.text.encode() + tail).decode(), numbers[0], tuple(numbers[1:]))
        changed[first + 1 : last + 1] = [None] * (last - first)
    return changed


def present(lines: Iterable[TextLine | None]) -> list[TextLine]:
    """The lines that are left after edits."""
    return [line for line in lines if line is not None]


def _text(lines: Sequence[TextLine | None], at: int) -> bytes:
    line = lines[at]
    if line is None:
        raise UnwritableError("two edits share a line")
    return line.text.encode()


def on_one_line(lines: Sequence[str]) -> str | None:
    """Lines of one statement or header as one; None if it is too long, or has a comment or a long text in it."""
    text = lines[0]
    for line in map(str.strip, lines[1:]):
        if line.startswith((")", "]")):
            text = text.removesuffix(",") + line
        else:
            text += line if text.endswith(("(", "[")) else f" {line}"
    has_comment = any(mark in line for line in lines[:-1] for mark in ("#", "\\", '"""', "'''"))
    return None if has_comment or len(text) > LINE_LENGTH - _CLASS_INDENT else text


def side_edits(lines: Sequence[TextLine], choice: ast.IfExp, side: ast.expr) -> list[Edit]:
    """The edits that leave one side of a conditional expression, without parentheses if these are on other lines."""
    start, end = start_of(choice), end_of(choice)
    first, last = start[0] - 1, end[0] - 1
    opened = first > 0 and lines[first - 1].text.endswith("= (") and not _text_before(lines[first], start[1]).strip()
    if opened and last + 1 < len(lines) and lines[last + 1].text.strip() == ")":
        start, end = (first, len(lines[first - 1].text.encode()) - 1), (last + 2, len(lines[last + 1].text.encode()))
    return [Edit(start, start_of(side), ""), Edit(end_of(side), end, "")]


def _text_before(line: TextLine, column: int) -> str:
    return line.text.encode()[:column].decode()


class UsedSides(ast.NodeTransformer):
    """Replaces conditional expressions of which one side never ran by the other side.

    ``torch_int(x) if torch.jit.is_tracing() else int(x)`` is ``int(x)`` if ``torch_int`` never ran. So is one whose
    sides are on lines of their own, of which those of one side never ran.

    Args:
        lines: the text.
        ran: returns whether the function of a call may have run.
        ran_lines: the numbers of the lines that ran.

    Attributes:
        edits: of the text.
    """

    def __init__(self, lines: Sequence[TextLine], ran: Callable[[ast.expr], bool], ran_lines: AbstractSet[int]) -> None:
        self._lines, self._ran, self._ran_lines = lines, ran, ran_lines
        self.edits: list[Edit] = []

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        """Replace a conditional expression."""
        self.generic_visit(node)
        unused = [side for side in (node.body, node.orelse) if not all(map(self._ran, _functions_called(side)))]
        unused = unused or self._sides_on_lines_that_never_ran(node)
        if len(unused) != 1:
            return node
        used = node.orelse if unused[0] is node.body else node.body
        self.edits = [edit for edit in self.edits if edit.is_within(used) or not edit.is_within(node)]
        self.edits += side_edits(self._lines, node, used)
        return used

    def _sides_on_lines_that_never_ran(self, node: ast.IfExp) -> list[ast.expr]:
        body, test, orelse = (_lines_of(part) for part in (node.body, node.test, node.orelse))
        if not (body.isdisjoint(test | orelse) and orelse.isdisjoint(test)):
            return []
        sides = (node.body, body), (node.orelse, orelse)
        return [side for side, places in sides if not any(self._has_run(self._lines[place - 1]) for place in places)]

    def _has_run(self, line: TextLine) -> bool:
        return not self._ran_lines.isdisjoint(line.numbers)


def _lines_of(node: ast.expr) -> set[int]:
    return {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}


class OpenSizes(ast.NodeTransformer):
    """Replaces sizes by -1.

    Args:
        sizes: the sizes.

    Attributes:
        edits: of the text.
    """

    def __init__(self, sizes: Iterable[ast.expr]) -> None:
        self._sizes = {id(size) for size in sizes if size.lineno == size.end_lineno}
        self.edits: list[Edit] = []

    def visit(self, node: ast.AST) -> Any:
        """Replace a size, or visit the parts of any other node."""
        if id(node) not in self._sizes or not isinstance(node, ast.expr):
            return self.generic_visit(node)
        self.edits.append(replacement(node, "-1"))
        return ast.copy_location(ast.UnaryOp(ast.USub(), ast.Constant(1)), node)


_MAY_SKIP = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
"""Expressions that may not evaluate their parts."""


def _functions_called(node: ast.expr) -> Iterator[ast.expr]:
    """The functions that an expression calls whenever it is evaluated."""
    if isinstance(node, ast.Call):
        yield node.func
    if not isinstance(node, _MAY_SKIP):
        for child in ast.iter_child_nodes(node):
            yield from _functions_called(child) if isinstance(child, ast.expr) else ()


def start_of(node: ast.expr | ast.keyword) -> Place:
    """The place of the first character of a node."""
    return node.lineno, node.col_offset


def end_of(node: ast.expr | ast.keyword) -> Place:
    """The place after the last character of a node."""
    return node.end_lineno or node.lineno, node.end_col_offset or 0
