"""Whole backwards in the place of divided ones: where nothing waits for them, and nowhere else."""

from __future__ import annotations

import pytest
from hypothesis import given

from pipegraph.errors import ScheduleError
from pipegraph.schedule import (
    Kind,
    Schedule,
    Times,
    build,
    check,
    from_csv,
    join_backwards,
    lower,
    peak_activations,
    search,
    simulate,
    to_csv,
    without_transfers,
)
from tests.messages import refused
from tests.schedule.strategies import schedules


def count(schedule: Schedule, kind: Kind) -> int:
    return sum(action.kind is kind for row in schedule.actions for action in row)


def test_a_backward_is_whole_unless_another_rank_waits_for_its_gradient() -> None:
    """Rank 0 has no one to wait for it. It waits for 1I0, and if its own backward is short, for 1I1 as well."""
    divided = from_csv("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1W0,1I1,1W1\n")
    short, long = (join_backwards(divided, Times([1, 1], [1, 1], [seconds, 1])) for seconds in (2, 3))
    assert to_csv(short).split() == ["0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1W0,1I1,1W1"]
    assert to_csv(long).split() == ["0F0,0F1,0B0,0B1", "1F0,1I0,1F1,1W0,1B1"]
    assert long.name == "csv, joined"


def test_most_of_zero_bubble_needs_no_division() -> None:
    schedule, times = build("zb-v", 2, 8), Times.equal(4)
    joined = join_backwards(schedule, times)
    assert simulate(joined, times).makespan == simulate(schedule, times).makespan
    assert (count(joined, Kind.B), count(joined, Kind.I), count(joined, Kind.W)) == (28, 4, 4)
    check(lower(joined))


@given(schedules())
def test_no_step_is_longer_and_no_rank_holds_more(schedule: Schedule) -> None:
    times = Times.equal(schedule.stages, forward=1, input_grad=1.25, weight_grad=0.75, hop=0.125)
    schedule = without_transfers(schedule)
    joined = join_backwards(schedule, times, tries=20)
    check(joined)
    assert simulate(joined, times).makespan <= simulate(schedule, times).makespan * (1 + 1e-9)
    pairs = zip(peak_activations(joined), peak_activations(schedule), strict=True)
    assert all(peak <= original_peak for peak, original_peak in pairs)
    assert count(joined, Kind.I) + count(joined, Kind.B) == count(schedule, Kind.I) + count(schedule, Kind.B)


def test_what_has_nothing_to_join_is_returned_as_it_is() -> None:
    for schedule in (build("1f1b", 2, 4), build("zb-h1", 2, 4)):
        assert join_backwards(schedule, Times.equal(2), tries=0) is schedule
    assert join_backwards(build("1f1b", 2, 4), Times.equal(2)) == build("1f1b", 2, 4)


def test_search_joins_what_it_finds() -> None:
    times = Times([1.0, 1.0], [0.0, 1.0], [2.0, 1.0])
    schedule = search(times, 2, 8, effort=0.1)
    assert count(schedule, Kind.B) > 0
    assert simulate(schedule, times).makespan == pytest.approx(schedule.makespan)
    sharded = search(times, 2, 8, effort=0.1, resident=1)
    check(lower(sharded), resident=1)


def test_what_depends_on_the_order_is_refused() -> None:
    schedule = build("zb-h1", 2, 4)
    with refused(ScheduleError, "zb-h1", "transfers", advice="without_transfers(schedule)"):
        join_backwards(lower(schedule), Times.equal(2))
    with refused(ScheduleError, "zb-h1", "2 stages", "for 3", advice="2 numbers"):
        join_backwards(schedule, Times.equal(3))
