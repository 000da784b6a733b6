"""Figures over sizes."""

from __future__ import annotations

import json

import msgspec
import pytest

from pipegraph.cost.hardware import SizeTable
from pipegraph.package.json_file import FieldError
from tests.messages import refused

OVER_TWO = SizeTable({"m": (10.0, 1000.0), "n": (1.0, 4.0)}, ((1.0, 16.0), (100.0, 1600.0)))


def test_what_was_measured_comes_back() -> None:
    assert OVER_TWO.at(m=10, n=4) == pytest.approx(16)
    assert OVER_TWO.at(m=1000, n=1) == pytest.approx(100)


def test_between_sizes_a_power_law_is_exact() -> None:
    assert OVER_TWO.at(m=100, n=2) == pytest.approx(10 * 4)


def test_outside_it_is_constant() -> None:
    assert OVER_TWO.at(m=1e9, n=0.1) == pytest.approx(100)


def test_sizes_that_are_no_axis_are_ignored() -> None:
    assert OVER_TWO.at(m=10, n=1, k=7) == pytest.approx(1)


def test_one_figure_needs_no_sizes() -> None:
    assert SizeTable({}, 0.25).at(m=3) == pytest.approx(0.25)


def test_json_and_back() -> None:
    assert msgspec.convert(json.loads(msgspec.json.encode(OVER_TWO)), SizeTable) == OVER_TWO


def test_tables_are_stacked_along_an_axis() -> None:
    low, high = SizeTable({"k": (1.0, 2.0)}, (1.0, 2.0)), SizeTable({"k": (1.0, 2.0)}, (10.0, 20.0))
    assert SizeTable.stacked("footprint", {1.0: low, 100.0: high}).at(k=2, footprint=10) == pytest.approx(40**0.5)
    assert SizeTable.stacked("footprint", {1.0: low}) == low


@pytest.mark.parametrize(
    ("axes", "values", "parts"),
    [
        ({"m": (1.0, 1.0)}, (1.0, 2.0), ["axes.m", "[1.0, 1.0]"]),
        ({"m": (0.0, 1.0)}, (1.0, 2.0), ["axes.m", "[0.0, 1.0]"]),
        ({"m": (1.0, 2.0)}, (1.0, 2.0, 3.0), ["values:", "3 entries", "2 sizes along m"]),
        ({"m": (1.0,), "n": (1.0, 2.0)}, (1.0,), ["values[0]", "0 entries", "2 sizes along n"]),
        ({"m": (1.0,)}, ((1.0,),), ["values[0]", "a tuple"]),
        ({}, -1.0, ["-1.0"]),
    ],
)
def test_refusals(axes: dict[str, tuple[float, ...]], values: object, parts: list[str]) -> None:
    with refused(FieldError, *parts):
        SizeTable(axes, values)  # type: ignore[arg-type]
