"""Belady's rule against every other choice."""

from collections.abc import Sequence
from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.schedule import build
from pipegraph.schedule.collectives import Residency, earliest_gathers, residencies

Uses = Sequence[tuple[int, ...]]


def fewest_gathers(uses: Uses, resident: int) -> int:
    """The least number of gathers of all ways to have up to ``resident`` stages whole in each use, needed or not."""
    used_stages = sorted({stage for stages in uses for stage in stages})
    cost = {frozenset[int](): 0}  # of each set of whole stages, the least number of gathers that lead to it
    for stages in uses:
        required = frozenset(stages)
        other_stages = [stage for stage in used_stages if stage not in required]
        extra = chain.from_iterable(combinations(other_stages, size) for size in range(resident - len(required) + 1))
        cost = {
            stage_set: min(gathers + len(stage_set - previous) for previous, gathers in cost.items())
            for stage_set in (required | {*subset} for subset in extra)
        }
    return min(cost.values())


def test_the_stage_that_is_needed_last_makes_room() -> None:
    uses = [(0,), (1,), (2,), (0,), (1,)]
    assert residencies(uses, 2) == [Residency(0, 0, 3), Residency(1, 1, 1), Residency(2, 2, 2), Residency(1, 4, 4)]
    assert earliest_gathers(residencies(uses, 2), 2) == [0, 0, 2, 3]
    assert residencies(uses) == [Residency(0, 0, 3), Residency(1, 1, 4), Residency(2, 2, 2)]
    assert earliest_gathers(residencies(uses)) == [0, 0, 0]


def test_a_stage_makes_room_that_leaves_time_for_the_gather() -> None:
    spans = residencies([(0,), (1,), (2,), (3,), (1,), (0,), (2,)], 3)
    # Belady's rule alone frees 2 for 3, which can then be gathered no earlier than it is needed.
    assert [(span.stage, span.last) for span in spans] == [(0, 0), (1, 4), (2, 6), (3, 3), (0, 5)]
    assert earliest_gathers(spans, 3) == [0, 0, 0, 1, 4]


def test_what_is_needed_at_once_stays() -> None:
    spans = residencies([(0,), (1,), (1, 2), (0,)], 2)
    assert [span.stage for span in spans] == [0, 1, 2, 0]
    assert earliest_gathers(spans, 2) == [0, 0, 1, 3]


def unprefetched(uses: Uses, resident: int) -> int:
    """How many gathers, but for the first, have to wait until a place is free right before the first use."""
    spans = residencies(uses, resident)
    first_uses = [min(at for at in range(span.first, len(uses)) if span.stage in uses[at]) for span in spans]
    return sum(begin == first > 0 for begin, first in zip(earliest_gathers(spans, resident), first_uses, strict=True))


@pytest.mark.parametrize("rank", range(4))
def test_of_as_few_gathers_those_are_chosen_that_can_be_prefetched(rank: int) -> None:
    uses = [(action.stage,) for action in build("interleaved-1f1b", 4, 16, 8).actions[rank]]
    assert (len(residencies(uses, 3)), unprefetched(uses, 3)) == (43, 0)


@st.composite
def uses_of(draw: st.DrawFn, most: int = 14) -> Uses:
    """Uses of up to 4 stages, some of them two at once."""
    stage = st.integers(0, draw(st.integers(0, 3)))
    use = st.lists(stage, min_size=1, max_size=2, unique=True).map(tuple)
    return draw(st.lists(use, max_size=most))


@settings(max_examples=150, deadline=None)
@given(uses_of(), st.integers(2, 4))
def test_no_choice_needs_fewer_gathers(uses: Uses, resident: int) -> None:
    assert len(residencies(uses, resident)) == fewest_gathers(uses, resident)


@pytest.mark.parametrize(("resident", "fewest"), [(1, 25), (2, 18), (3, 11), (4, 4)])
def test_the_order_of_a_schedule(resident: int, fewest: int) -> None:
    row = build("interleaved-1f1b", 1, 4, 4).actions[0]
    uses = [(action.stage,) for action in row]
    assert len(residencies(uses, resident)) == fewest_gathers(uses, resident) == fewest


@given(uses_of(40), st.integers(2, 4))
def test_stages_are_whole_where_they_are_used_and_never_too_many(uses: Uses, resident: int) -> None:
    spans = residencies(uses, resident)
    begins = earliest_gathers(spans, resident)
    assert begins == sorted(begins)
    assert all(begin <= span.first for begin, span in zip(begins, spans, strict=True))
    for number, stages in enumerate(uses):
        gathered = [span.stage for begin, span in zip(begins, spans, strict=True) if begin <= number <= span.last]
        assert len(gathered) == len({*gathered}) <= resident
        assert {*stages} <= {*gathered}
    for number, begin in enumerate(begins):  # one use earlier there is no room
        occupants = [pair for pair in zip(begins[:number], spans[:number], strict=True) if pair[1].last >= begin - 1]
        assert begin == 0 or len(occupants) >= resident
