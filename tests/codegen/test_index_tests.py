"""Numbers of two kinds are told apart by the test that a person would write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.codegen.forward.index_tests import period, told_apart


@pytest.mark.parametrize(
    ("start", "kinds", "test", "meant"),
    [
        (0, "ababab", "{} % 2", "b"),
        (1, "ababab", "{} % 2", "a"),
        (0, "aaaaabaaaaab", "{} % 6 == 5", "b"),
        (8, "aaabaaaaabaa", "{} % 6 == 5", "b"),
        (0, "aaabbbbb", "{} < 3", "a"),
        (4, "abbbbbb", "{} < 5", "a"),
        (0, "aaaabaaa", "{} == 4", "b"),
        (0, "aabaabbaa", "{} in (2, 5, 6)", "b"),
        (0, "abba", "{} in (0, 3)", "a"),
        (0, "aabbaabbabba", None, None),
        (0, "abcabc", None, None),
        (0, "aaaa", None, None),
    ],
)
def test_the_test_of_a_row(start: int, kinds: str, test: str | None, meant: str | None) -> None:
    found = told_apart(range(start, start + len(kinds)), kinds)
    assert found == (None if test is None else (test, meant))


@given(st.integers(0, 20), st.text("ab", min_size=1, max_size=14), st.sampled_from([told_apart, period]))
def test_a_test_holds_for_the_kind_that_it_is_for(start: int, kinds: str, find: object) -> None:
    assert callable(find)
    numbers = range(start, start + len(kinds))
    found = find(numbers, kinds)
    if found is not None:
        test, meant = found
        assert [bool(eval(test.format(number))) for number in numbers] == [kind == meant for kind in kinds]
