"""Tables and numbers as a person reads them."""

from __future__ import annotations

import doctest

import pytest

from pipegraph.report import tables
from pipegraph.report.tables import clip, count, size, table


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(tables).failed == 0


def test_table_sets_numbers_right() -> None:
    assert table(["stage", "holds", "size"], [["0", "embed", "9 B"], ["10", "head", ""], ["2", "x", "12 B"]]) == (
        "stage  holds  size\n"
        "    0  embed   9 B\n"
        "   10  head\n"
        "    2  x      12 B"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_949, "999.9 k"), (999_960, "1.0 M"), (8_030_261_248, "8.0 G")],
)
def test_count(number: int, text: str) -> None:
    assert count(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB")])
def test_size(number: int, text: str) -> None:
    assert size(number) == text


def test_clip_keeps_one_line() -> None:
    assert clip("new\nline") == "new\\nline"
    assert clip("–" * 70) == "–" * 59 + "…"
