"""Cut the text of a function to the branches that ran. Comments, names and formatting stay as they are.

if mask is not None:        ran, and was never false        scores = scores + mask
    scores = scores + mask  ──────────────────────────▶
if self.debug:              never ran
    check(scores)           ──────────────────────────▶     (nothing)
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import FunctionType
from typing import NamedTuple

from pipegraph.codegen.names.source_statements import functions_in, source_tree
from pipegraph.graph.captured import LineStep
from pipegraph.graph.model_structure import ASKS_ABOUT_EXPORT

_INDENT = "    "


class TextLine(NamedTuple):
    """A line of a text.

    Attributes:
        text: the line.
        number: in the file that it is from; 0 for one that is not in it.
        joined: the numbers of the lines after it that are now parts of it.
    """

    text: str
    number: int
    joined: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of all lines in it."""
        return (self.number, *self.joined)


class UnwritableError(Exception):
    """The text of a function or of a class cannot stand in a package; says why."""


def definition(function: FunctionType) -> ast.FunctionDef:
    """The statement of a function in its file. Raises UnwritableError."""
    return _definition(function.__code__.co_filename, function.__code__.co_firstlineno)


def _definition(file: str, first_line: int) -> ast.FunctionDef:
    functions = functions_in(source_tree(file))
    function = next((node for node in functions if _first_line(node) == first_line), None)
    if function is None:
        raise UnwritableError(f"no function of {file} begins on line {first_line}")
    return function


class FunctionCut:
    """A function of a file, cut to what ran.

    Args:
        file: of the function.
        first_line: the first line of the function, its decorators included.
        steps: the lines that ran.
    """

    def __init__(self, file: str, first_line: int, steps: Iterable[LineStep]) -> None:
        self._lines = ["", *(line.rstrip("\n") for line in linecache.getlines(file))]  # counted from 1
        self._steps = {(step.start, step.end) for step in steps if step.file == file}
        self._ran = {line for step in self._steps for line in step}
        self._function = _definition(file, first_line)

    @property
    def decorators(self) -> list[str]:
        """Its decorators, without the ``@``."""
        return [ast.unparse(decorator) for decorator in self._function.decorator_list]

    @property
    def text(self) -> str:
        """The function at an indentation of 0, without its decorators.

        Raises:
            UnwritableError: it has statements that cannot be cut line by line.
        """
        return "\n".join(line.text for line in self.lines)

    @cached_property
    def lines(self) -> list[TextLine]:
        """The lines of `text`.

        Raises:
            UnwritableError: it has statements that cannot be cut line by line.
        """
        function = self._function
        shift, body = function.col_offset, without_docstring(function.body)
        if not body:
            raise UnwritableError("its forward has no statement")
        end = self._header_end(function.lineno, function.body[0])
        header = self._moved(function.lineno, end, shift)
        if body is not function.body:
            docstring_end = function.body[0].end_lineno or end
            header += self._moved(end + 1, docstring_end, shift)
            end = docstring_end
        block = self._block(body, end, shift)
        lines = _trimmed(block)
        if not lines:
            raise UnwritableError("it never ran")
        if body is not function.body:
            header += itertools.takewhile(lambda line: not line.text, block)
        if not all(line.text.isprintable() for line in (*header, *lines)):
            # Tabs do not mix with the spaces of a package; other such characters show a text that is not what runs.
            raise UnwritableError("it has characters that cannot be printed")
        return [*header, *lines]

    def _header_end(self, first: int, statement: ast.stmt) -> int:
        """The last line of the header of a block, which ends with a colon; comments follow it."""
        for line in range(_first_line(statement) - 1, first - 1, -1):
            if self._lines[line].split("#")[0].rstrip().endswith(":"):
                return line
        raise UnwritableError("a block begins on the line of its header")

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _block(self, statements: Sequence[ast.stmt], start: int, shift: int) -> list[TextLine]:
        """The statements that ran, each with the comments before it.

        Args:
            start: the line before the block.
            shift: how many columns the block moves to the left.
        """
        lines: list[TextLine] = []
        for statement in statements:
            first = _first_line(statement)
            if first <= start:
                raise UnwritableError("two statements share a line")
            text = self._statement(statement, shift)
            if text:
                lines += [*self._comments(statement, start + 1, first - 1, shift), *text]
            start = statement.end_lineno or first
        return lines

    def _comments(self, statement: ast.stmt, first: int, last: int, shift: int) -> list[TextLine]:
        """The lines before a statement. Of an ``if`` that was never true, those before the branch that ran, if it has
        some."""
        lines = self._moved(first, last, shift)
        if isinstance(statement, ast.If) and ASKS_ABOUT_EXPORT.search(ast.unparse(statement.test)):
            return list(itertools.takewhile(lambda line: not line.text, lines))  # they say what exporters cannot do
        if not isinstance(statement, ast.If) or not statement.orelse or self._has_run(statement.body):
            return lines
        branch: ast.stmt = statement
        while isinstance(branch, ast.If) and branch.orelse and not self._has_run(branch.body):
            end, following = branch.body[-1].end_lineno or branch.lineno, branch.orelse[0]
            is_elif = _is_elif(branch, self._lines)
            header = following.lineno if is_elif else self._header_end(end, following)
            if not is_elif:
                break
            branch = following
        comments = _trimmed(self._moved(end + 1, header - 1, shift))
        return [*itertools.takewhile(lambda line: not line.text, lines), *comments] if comments else lines

    def _statement(self, statement: ast.stmt, shift: int) -> list[TextLine]:
        first, last = _first_line(statement), statement.end_lineno or statement.lineno
        if not any(line in self._ran for line in range(first, last + 1)):
            return []
        match statement:
            case ast.If():
                return self._if(statement, shift)
            case ast.For() | ast.While() | ast.With() if _first_line(statement.body[0]) == statement.lineno:
                return self._on_one_line(statement, shift)
            case ast.For() | ast.While() | ast.With():
                end = self._header_end(first, statement.body[0])
                body = self._block(statement.body, end, shift)
                if not isinstance(statement, ast.With) and statement.orelse:
                    raise UnwritableError("a loop has an else")
                return [*self._moved(first, end, shift), *body] if body else []
            case ast.Try():
                if any(self._has_run(handler.body) for handler in statement.handlers):
                    raise UnwritableError("it handles an error")
                end = self._header_end(first, statement.body[0])
                inner = shift + statement.body[0].col_offset - statement.col_offset
                lines = self._block(statement.body, end, inner)
                for part in (statement.orelse, statement.finalbody):
                    if part:
                        lines += self._block(part, self._header_end(end, part[0]), inner)
                return lines
        return self._moved(first, last, shift)

    def _if(self, statement: ast.If, shift: int) -> list[TextLine]:
        """An ``if`` that went both ways, or the side that ran."""
        first, end = statement.lineno, statement.test.end_lineno or statement.lineno
        if _first_line(statement.body[0]) <= end:
            return self._on_one_line(statement, shift)
        end = self._header_end(first, statement.body[0])
        has_run, was_false = self._has_run(statement.body), self._was_false(statement)
        inner = shift + statement.body[0].col_offset - statement.col_offset
        if has_run and not was_false:
            return self._block(statement.body, end, inner)
        if not has_run:
            return self._orelse(statement, inner)
        lines = self._moved(first, end, shift)
        if lines[0].text.lstrip().startswith("elif"):
            lines[0] = TextLine(lines[0].text.replace("elif", "if", 1), first)
        lines += self._block(statement.body, end, shift)
        orelse = _trimmed(self._orelse(statement, inner)) if statement.orelse else []
        if not orelse:
            return lines
        margin = " " * (statement.col_offset - shift)
        if (
            _is_elif(statement, self._lines)
            and orelse[0].text.startswith(f"{margin}if ")
            and self._is_one_if(orelse, margin)
        ):
            return [*lines, TextLine(f"{margin}el{orelse[0].text.lstrip()}", orelse[0].number), *orelse[1:]]
        indented = (TextLine(f"{_INDENT}{line.text}" if line.text else "", line.number) for line in orelse)
        return [*lines, TextLine(f"{margin}else:", 0), *indented]

    def _on_one_line(self, statement: ast.If | ast.For | ast.While | ast.With, shift: int) -> list[TextLine]:
        """A block whose body is on the line of its header, on two lines; none if it would only have raised an error.
        One with an ``else`` or several statements stays as it is."""
        first, body = statement.lineno, statement.body[0]
        if len(statement.body) > 1 or first != statement.end_lineno:
            return self._moved(first, statement.end_lineno or first, shift)
        if isinstance(body, ast.Raise):
            return []
        line = self._lines[first].encode()  # columns are bytes of UTF-8
        header, text = line[shift : body.col_offset].decode().rstrip(), line[body.col_offset :].decode()
        margin = " " * (statement.col_offset - shift)
        return [TextLine(header, first), TextLine(f"{margin}{_INDENT}{text}", first)]

    def _orelse(self, statement: ast.If, inner: int) -> list[TextLine]:
        """What ran of the ``else`` of an ``if``, in the place of the ``if``."""
        if not statement.orelse:
            return []
        if _is_elif(statement, self._lines):
            branch = statement.orelse[0]
            return self._statement(branch, inner - statement.body[0].col_offset + statement.col_offset)
        first = statement.orelse[0]
        last_of_body = statement.body[-1].end_lineno or statement.lineno
        return self._block(statement.orelse, self._header_end(last_of_body, first), inner)

    def _is_one_if(self, lines: Sequence[TextLine], margin: str) -> bool:
        """Return whether lines are one ``if`` with its branches, and no statement after it."""
        texts = (line.text for line in lines[1:])
        outer = [text for text in texts if text.strip() and not text.startswith(f"{margin} ")]
        return all(line.startswith((f"{margin}el", f"{margin}#", f"{margin})")) for line in outer)

    def _has_run(self, statements: Sequence[ast.stmt]) -> bool:
        first, last = _first_line(statements[0]), statements[-1].end_lineno or 0
        return any(line in self._ran for line in range(first, last + 1))

    def _was_false(self, statement: ast.If) -> bool:
        """Return whether a function once went from a test to somewhere outside of its body."""
        test = range(statement.lineno, (statement.test.end_lineno or statement.lineno) + 1)
        body = range(_first_line(statement.body[0]), (statement.body[-1].end_lineno or 0) + 1)
        return any(start in test and end not in test and end not in body for start, end in self._steps)

    def _moved(self, first: int, last: int, shift: int) -> list[TextLine]:
        """Lines, moved to the left."""
        moved = []
        for number, line in enumerate(self._lines[first : last + 1], first):
            is_code = bool(line.strip()) and not line.lstrip().startswith("#")
            columns = shift if is_code else min(shift, len(line) - len(line.lstrip()))
            if line[:columns].strip():
                raise UnwritableError("a line of a text stands left of its statement")
            moved.append(TextLine(line[columns:].rstrip(), number))
        return moved


def _first_line(node: ast.stmt) -> int:
    """The first line of a statement, its decorators included."""
    decorators = getattr(node, "decorator_list", ())
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _is_elif(statement: ast.If, lines: Sequence[str]) -> bool:
    branch = statement.orelse[0]
    return (
        len(statement.orelse) == 1
        and isinstance(branch, ast.If)
        and lines[branch.lineno][branch.col_offset :].startswith("elif")
    )


def without_docstring(body: Sequence[ast.stmt]) -> Sequence[ast.stmt]:
    """The statements of a function after its docstring."""
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring else body


def _trimmed(lines: Sequence[TextLine]) -> list[TextLine]:
    """Lines without the empty ones at the beginning and the end."""
    trimmed = list(lines)
    while trimmed and not trimmed[0].text.strip():
        trimmed.pop(0)
    while trimmed and not trimmed[-1].text.strip():
        trimmed.pop()
    return trimmed
