"""Text for terminals and for Markdown: its tables, and names that are safe in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pipegraph.errors import one_line
from pipegraph.units import UNKNOWN

Table = tuple[list[str], list[list[str]]]
"""Headers and rows."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns of equal width, two spaces apart; a column of numbers is set right.

    >>> print(table(["stage", "size"], [["0", "9 B"], ["1", "12 B"]]))
    stage  size
        0   9 B
        1  12 B
    """
    lines = [list(headers), *map(list, rows)]
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [any(column[1:]) and all(map(is_number, column[1:])) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def markdown_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for what renders Markdown.

    >>> print(markdown_table(["stage", "holds"], [["0", "a_b | c"]]))
    | stage | holds |
    | --- | --- |
    | 0 | a\\_b \\| c |
    """
    lines = [headers, ["---"] * len(headers), *rows]
    cells = [[cell if number == 1 else markdown(cell) for cell in line] for number, line in enumerate(lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def markdown(text: str) -> str:
    """Return ``text`` on one line, escaped so that Markdown shows it as it is.

    >>> markdown("layers.*<b>")
    'layers.\\\\*\\\\<b\\\\>'
    """
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~&$])", r"\\\1", one_line(text))


def is_number(cell: str) -> bool:
    """Return whether a cell belongs in a column of numbers: an empty or unknown one does."""
    return cell.lstrip("+−")[:1].isdigit() or cell in ("", UNKNOWN, "inf", "nan")


def clip(text: str, width: int = 60) -> str:
    """Return ``text`` on one line of at most ``width`` characters."""
    line = one_line(text)
    return line if len(line) <= width else f"{line[: width - 1]}…"
