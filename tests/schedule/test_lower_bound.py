"""The lower bound: each of its parts, in a case in which that part is the largest."""

import math

import pytest

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Times, build, lower_bound, simulate
from tests.messages import refused


def test_work_behind_the_ranks_before() -> None:
    assert lower_bound(Times.equal(4, 1, 1, 1, hop=0.5), (0, 1, 2, 3), 8) == 3 * 1.5 + 8 * 3
    assert lower_bound(Times.equal(4, 1, 1, 1, hop=0.5), (0, 1, 1, 0), 8) == 1.5 + 8 * 6  # v: rank 1 begins at 1.5


def test_drain_over_a_slow_early_stage() -> None:
    times = Times((1, 1), (5, 1), (0, 0))
    assert lower_bound(times, (0, 1), 2) == 3 + 2 * 5  # of stage 0's I alone, which begin at 3
    assert lower_bound(Times((5, 1), (5, 1), (0, 0)), (0, 1), 1) == 12
    last_is_slow = Times((1, 3), (5, 3), (2, 0))
    assert lower_bound(last_is_slow, (0, 1), 10) == max(10 * 8, 1 + 10 * 6 + 5 + 2)


def test_the_way_back_of_the_last_microbatch() -> None:
    """Stage 0's forwards alone, and the actions after the last of them."""
    times = Times((10, 1, 1), (1, 1, 1), (1, 1, 5))
    assert lower_bound(times, (0, 1, 2), 4) == 4 * 10 + 1 + 1 + 1 + 5


def test_one_microbatch() -> None:
    assert lower_bound(Times.equal(3, 1, 2, 4, hop=0.5), (0, 1, 2), 1) == 3 * 1 + 3 * 2 + 4 * 0.5 + 4
    assert simulate(build("zb-h1", 3, 1), Times.equal(3, 1, 2, 4, hop=0.5)).makespan == 15


def test_one_activation_at_a_time() -> None:
    """Then nothing overlaps on stage 0: each microbatch goes all the way before the next begins."""
    times = Times.equal(3, 1, 1, 1)
    assert lower_bound(times, (0, 1, 2), 5, memory_limit=1) == 5 * (3 + 3 + 1)
    assert lower_bound(times, (0, 1, 2), 5) == 2 + 5 * 3


def test_more_memory_than_there_is_to_hold() -> None:
    times = Times.equal(3, 1, 1, 1)
    assert lower_bound(times, (0, 1, 2), 5, memory_limit=10**9) == lower_bound(times, (0, 1, 2), 5, memory_limit=5)
    assert lower_bound(times, (0, 1, 2), 5, memory_limit=math.inf) == lower_bound(times, (0, 1, 2), 5, memory_limit=5)


def test_a_placement_of_other_stages() -> None:
    with refused(ScheduleError, "2 stages", "for 3"):
        lower_bound(Times.equal(3), (0, 1), 5)


@pytest.mark.parametrize(
    ("arguments", "parts", "advice"),
    [
        (((0, 1), 0), ["0 microbatches", "from 1 on"], ""),
        (((0, 1), 1.5), ["1.5 microbatches", "from 1 on"], ""),
        (((0, 1), 2, 0), ["memory limit", "0 activations"], "1 or more"),
        (((0, 1), 2, float("nan")), ["memory limit", "nan activations"], "1 or more"),
    ],
)
def test_numbers_that_are_none(arguments: tuple, parts: list[str], advice: str) -> None:
    with refused(ScheduleError, *parts, advice=advice):
        lower_bound(Times.equal(2), *arguments)
