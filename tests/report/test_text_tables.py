"""Tables and numbers as a person reads them."""

from __future__ import annotations

import doctest

from pipegraph.report import text
from pipegraph.report.text import clip, table


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(text).failed == 0


def test_table_sets_numbers_right() -> None:
    assert table(["stage", "holds", "size"], [["0", "embed", "9 B"], ["10", "head", ""], ["2", "x", "12 B"]]) == (
        "stage  holds  size\n"
        "    0  embed   9 B\n"
        "   10  head\n"
        "    2  x      12 B"
    )  # fmt: skip


def test_clip_keeps_one_line() -> None:
    assert clip("new\nline") == "new\\nline"
    assert clip("–" * 70) == "–" * 59 + "…"
