"""Make texts of one class equal that differ in numbers of statements from the graph: these become attributes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipegraph.codegen.names.identifiers import unused
from pipegraph.codegen.syntax.expressions import SELF, Attribute, literal
from pipegraph.codegen.syntax.statements import Assign, ClassVariant, SourceText

_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
_SIZE = "size"
"""The attribute for a number. The statements from the graph have no name for it."""

Numbers = tuple[str, ...]
"""A number in each of several texts."""


def with_common_text(variants: Sequence[ClassVariant]) -> list[ClassVariant]:
    """Variants with attributes for the whole numbers in which their statements from the graph differ.

    ``x.unflatten(1, (-1, 21))`` and ``x.unflatten(1, (-1, 11))`` are both ``x.unflatten(1, (-1, self.size))``. The
    variants are returned as they are if their texts differ in anything else.
    """
    texts = [variant.text for variant in variants]
    frames = {replace(text, functions=(), written=()) for text in texts}
    if len(frames) != 1 or len({tuple(map(_count, text.functions)) for text in texts}) != 1:
        return list(variants)
    rows = list(zip(*map(_lines, texts), strict=True))
    if any(len(set(row)) > 1 and not _may_be_common(row, at[1]) for row, at in zip(rows, texts[0].places, strict=True)):
        return list(variants)
    words = {word for text in texts for function in text.functions for word in re.findall(r"\w+", function)}
    names: dict[Numbers, str] = {}
    for row in rows:
        for numbers in zip(*map(_NUMBER.findall, row), strict=True):
            if len(set(numbers)) > 1 and numbers not in names:
                names[numbers] = unused(_SIZE, words | set(names.values()))
    lines = iter([_common_line(row, names) for row in rows])
    functions = tuple("\n".join(next(lines) for _ in range(_count(function))) for function in texts[0].functions)
    common = replace(texts[0], functions=functions)
    return [
        ClassVariant((*_assignments(names, at), *variant.init), common) if names else variant
        for at, variant in enumerate(variants)
    ]


def _count(function: str) -> int:
    return function.count("\n") + 1


def _lines(text: SourceText) -> list[str]:
    return [line for function in text.functions for line in function.split("\n")]


def _may_be_common(row: Sequence[str], source_line: int) -> bool:
    """Return whether lines are from the graph, and differ in whole numbers only."""
    return source_line == 0 and len({_NUMBER.sub("0", line) for line in row}) == 1


def _common_line(row: Sequence[str], names: Mapping[Numbers, str]) -> str:
    """The line, with attributes for numbers."""
    columns = zip(*map(_NUMBER.findall, row), strict=True)
    numbers = iter([f"self.{names[column]}" if column in names else column[0] for column in columns])
    return _NUMBER.sub(lambda match: next(numbers), row[0])


def _assignments(names: Mapping[Numbers, str], at: int) -> list[Assign]:
    return [Assign((Attribute(SELF, name),), literal(int(numbers[at]))) for numbers, name in names.items()]
