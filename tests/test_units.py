"""Figures as a person reads and writes them."""

from __future__ import annotations

import doctest

import pytest

from pipegraph import units
from pipegraph.units import TimeFormat, format_bytes, format_count, format_seconds, parse_bytes, tick_marks


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 s"), (3e-9, "3 ns"), (2.5e-5, "25 µs"), (0.9999, "999.9 ms"), (7200.0, "7200 s")]
)
def test_a_time_is_shown_in_its_unit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("end", [1e-9, 0.3, 1.0, 9.99, 33.0, 1e7])
@pytest.mark.parametrize("most", [2, 3, 7, 40])
def test_ticks_are_few_and_reach_the_end(end: float, most: int) -> None:
    ticks = tick_marks(end, most)
    assert ticks[0] == 0.0 and ticks[-1] <= end
    assert len(ticks) <= most
    step = end if len(ticks) == 1 else ticks[1]
    assert end - ticks[-1] <= step


@pytest.mark.parametrize(
    ("times", "unit", "texts"),
    [
        ([0.0185, 0.0005, 0.0], "ms", ["18.50", "0.50", "0.00"]),
        ([1.5, None], "s", ["1.500", "—"]),
        ([12345.6, 1.0], "s", ["12346", "1"]),
        ([], "s", []),
    ],
)
def test_a_column_has_one_unit_and_fixed_decimals(times: list[float | None], unit: str, texts: list[str]) -> None:
    column = TimeFormat.of_column(times)
    assert (column.unit, [column.number(time) for time in times]) == (unit, texts)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_949, "999.9 k"), (999_960, "1.0 M"), (8_030_261_248, "8.0 B")],
)
def test_count(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB")])
def test_bytes(number: int, text: str) -> None:
    assert format_bytes(number) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [("80GiB", 80 * 2**30), ("16GB", 16 * 10**9), ("500MB", 5 * 10**8), ("1.5 gib", 3 * 2**29), ("2000000", 2_000_000)],
)
def test_bytes_are_read(text: str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "80XB", "GiB", "-1GiB", "1KiB", "1e3GiB", "2000TiB"])
def test_what_is_no_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="80GiB"):
        parse_bytes(text)
