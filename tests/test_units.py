"""Times as a person reads them."""

from __future__ import annotations

import doctest

import pytest

from pipegraph import units
from pipegraph.units import ticks, unit_of


def test_examples_in_the_docstrings() -> None:
    assert doctest.testmod(units).failed == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ns"), (3e-9, "3 ns"), (2.5e-5, "25 µs"), (0.9999, "999.9 ms"), (7200.0, "7200 s")]
)
def test_a_time_is_shown_in_its_unit(seconds: float, text: str) -> None:
    assert unit_of(seconds).text(seconds) == text


@pytest.mark.parametrize("end", [1e-9, 0.3, 1.0, 9.99, 33.0, 1e7])
@pytest.mark.parametrize("most", [2, 3, 7, 40])
def test_ticks_are_few_and_reach_the_end(end: float, most: int) -> None:
    found = ticks(end, most)
    assert found[0] == 0.0 and found[-1] <= end
    assert len(found) <= most
    step = end if len(found) == 1 else found[1]
    assert end - found[-1] <= step
