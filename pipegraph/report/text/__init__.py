"""Text for terminals and for Markdown: tables as wide as there is room, prose broken at words, and safe names."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Sequence
from itertools import groupby

from pipegraph.errors import one_line
from pipegraph.units import UNKNOWN

Table = tuple[list[str], list[list[str]]]
"""Headers and rows."""

_NUMBER = re.compile(r"([+−]?\d+|[^\d+−]*)(.*)", re.DOTALL)
# The space between a number and its unit, at which no line is broken.
_FIGURE = re.compile(r"(?<=\d) (?=(?:%|×|[nµm]?s|min|h|[kMGTP]?i?B|[kMGTP]?FLOP)(?![\w]))")
_NO_BREAK_SPACE = "\u00a0"
_COMMAND = re.compile(r" {2,}(?:pipegraph|tensorboard) ")  # a line to copy, which only the terminal itself may break
_LAYER = re.compile(r"((?:[^.]+\.)*?[0-9]+)\.(.+)")
_LABEL = re.compile(r" *\S+(?: \S+)*  +")
_LEAST_TEXT = 18  # columns of a cell of words that is cut off, before a column is left out
_LEAST_WIDTH = 40  # columns of a terminal; a narrower one breaks lines itself


def table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    optional: Collection[str] = (),
) -> str:
    """Return columns two spaces apart; numbers of a column have their decimal points one below the other.

    >>> print(table(["stage", "size"], [["0", "9 B"], ["1", "12.5 KiB"]]))
    stage      size
        0   9 B
        1  12.5 KiB

    Args:
        headers: the names of the columns.
        rows: the cells of each row, one for each header.
        width: columns of the terminal; None for no limit. If the table is wider, cells of words are cut off and columns
            are left out; a line below the table names the latter.
        optional: the headers of columns that are left out, in this order, until the other columns fit.
    """
    columns = [_Column(name, [row[index] for row in rows], name in optional) for index, name in enumerate(headers)]
    room, dropped = _room(width), list[str]()
    for name in optional:
        if room is None or _least(columns) <= room:
            break
        dropped += [name] if any(column.header == name for column in columns) else []
        columns = [column for column in columns if column.header != name]
    if room is not None:
        _clip_words(columns, room)
    lines = ["  ".join(cells).rstrip() for cells in zip(*(column.lines() for column in columns), strict=True)]
    if dropped:
        lines.append(f"left out: {', '.join(dropped)}; --wide shows all")
    return "\n".join(lines)


def fits(text: str, width: int | None) -> bool:
    """Return whether no line is wider than the terminal."""
    room = _room(width)
    return room is None or all(len(line) <= room for line in text.split("\n"))


def bar_width(used: int, width: int | None, full_width: int) -> int:
    """Return the columns of the longest bar after ``used`` ones: ``full_width`` if they fit, 0 if none fit."""
    room = _room(width)
    columns = full_width if room is None else min(full_width, room - used)
    return columns if columns >= 6 else 0


def wrap(text: str, width: int | None) -> str:
    """Return ``text`` with lines that are too long broken between words; what follows a label continues below itself.

    >>> print(wrap("predicted  250 ms a step of 1f1b with 8 microbatches on h100", 40))
    predicted  250 ms a step of 1f1b with 8
               microbatches on h100
    """
    room = _room(width)
    if room is None:
        return text
    return "\n".join(
        line if len(line) <= room or _COMMAND.match(line) else _broken(line, room) for line in text.split("\n")
    )


def _broken(line: str, room: int) -> str:
    label = _LABEL.match(line)
    margin = len(line) - len(line.lstrip()) + 2 if label is None or label.end() > room // 2 else label.end()
    joined = _FIGURE.sub(_NO_BREAK_SPACE, line)
    filled = textwrap.fill(
        joined, room, subsequent_indent=" " * margin, break_long_words=False, break_on_hyphens=False, tabsize=1
    )
    return filled.replace(_NO_BREAK_SPACE, " ")


def _room(width: int | None) -> int | None:
    return None if width is None else max(width, _LEAST_WIDTH)


class _Column:
    """A column of a table: of numbers, whose points are one below the other, or of words, which may be cut off."""

    def __init__(self, header: str, cells: Sequence[str], is_whole: bool) -> None:
        self.header, self.is_whole = header, is_whole
        self.is_number = any(cells) and all(map(is_number, cells))
        self.cells = _aligned(cells) if self.is_number else list(cells)

    @property
    def width(self) -> int:
        return max(map(len, (self.header, *self.cells)))

    @property
    def least(self) -> int:
        return self.width if self.is_number or self.is_whole else max(len(self.header), min(self.width, _LEAST_TEXT))

    def lines(self) -> list[str]:
        lines = [self.header, *self.cells]
        return [line.rjust(self.width) if self.is_number else line.ljust(self.width) for line in lines]


def _aligned(cells: Sequence[str]) -> list[str]:
    parts = [match.groups() for match in map(_NUMBER.fullmatch, cells) if match is not None]
    integer_width, fraction_width = (max(map(len, column)) for column in zip(*parts, strict=True))
    return [f"{integer:>{integer_width}}{right:<{fraction_width}}" if integer else "" for integer, right in parts]


def _least(columns: Sequence[_Column]) -> int:
    return sum(column.least for column in columns) + 2 * (len(columns) - 1)


def _clip_words(columns: Sequence[_Column], room: int) -> None:
    """Cut off the cells of the widest columns of words until the table fits, or they are as narrow as they may be."""
    while True:
        excess = sum(column.width for column in columns) + 2 * (len(columns) - 1) - room
        wide = [column for column in columns if column.width > column.least]
        if excess <= 0 or not wide:
            return
        widest = max(wide, key=lambda column: column.width)
        target = max(widest.least, widest.width - excess)
        widest.cells = [_clip_cell(cell, target) for cell in widest.cells]


def _clip_cell(cell: str, width: int) -> str:
    """Cut off a cell between two words, unless that leaves less than half of the width."""
    cut = clip(cell, width)
    head, space, _ = cut.rpartition(" ")
    return f"{head} …" if cut != cell and space and len(head) >= width // 2 else cut


def short_modules(modules: str) -> str:
    """Return the modules of a stage with the parts of one layer together.

    >>> short_modules("layers.2.multihead_attn, layers.2.norm2, layers.2.norm3, layers.3 – layers.5, norm")
    'layers.2[multihead_attn…norm3], layers.3 – layers.5, norm'
    """
    short = []
    for layer, group in groupby(modules.split(", "), key=_layer):
        names = list(group)
        ends = names[0].removeprefix(f"{layer}."), names[-1].removeprefix(f"{layer}.")
        short += [f"{layer}[{ends[0]}…{ends[1]}]"] if layer and len(names) > 1 else names
    return ", ".join(short)


def _layer(name: str) -> str:
    match = None if " – " in name else _LAYER.fullmatch(name)
    return match[1] if match else ""


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
    return line if len(line) <= width else f"{line[: width - 1].rstrip('…')}…"
