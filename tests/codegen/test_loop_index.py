"""Numbers of two kinds are told apart by the test that a person would write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.codegen.syntax.expressions import Name
from pipegraph.codegen.syntax.loop_index import periodic_test, separating_test


@pytest.mark.parametrize(
    ("start", "kinds", "test", "meant"),
    [
        (0, "ababab", "i % 2", "b"),
        (1, "ababab", "i % 2", "a"),
        (0, "aaaaabaaaaab", "i % 6 == 5", "b"),
        (8, "aaabaaaaabaa", "i % 6 == 5", "b"),
        (0, "aaabbbbb", "i < 3", "a"),
        (4, "abbbbbb", "i < 5", "a"),
        (0, "aaaabaaa", "i == 4", "b"),
        (0, "aabaabbaa", "i in (2, 5, 6)", "b"),
        (0, "abba", "i in (0, 3)", "a"),
        (0, "aabbaabbabba", None, None),
        (0, "abcabc", None, None),
        (0, "aaaa", None, None),
    ],
)
def test_the_test_of_a_row(start: int, kinds: str, test: str | None, meant: str | None) -> None:
    separation = separating_test(range(start, start + len(kinds)), kinds)
    assert (None if separation is None else (separation[0].expression(Name("i")).text, separation[1])) == (
        None if test is None else (test, meant)
    )


@given(st.integers(0, 20), st.text("ab", min_size=1, max_size=14), st.sampled_from([separating_test, periodic_test]))
def test_a_test_holds_for_the_kind_that_it_is_for(start: int, kinds: str, find: object) -> None:
    assert callable(find)
    numbers = range(start, start + len(kinds))
    separation = find(numbers, kinds)
    if separation is not None:
        test, true_kind = separation
        assert [bool(eval(test.expression(Name("i")).text, {"i": number})) for number in numbers] == [
            kind == true_kind for kind in kinds
        ]
