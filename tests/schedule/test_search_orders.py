"""Searched schedules: sound, within memory, never slower than a named one, close to what is possible."""

import random
import statistics
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    lower_bound,
    names,
    peak_activations,
    search,
    simulate,
    to_csv,
)
from pipegraph.schedule.order_problem import OrderProblem, orders_of
from tests.messages import refused
from tests.speed import timed

QUICK = 0.02


def unequal(seed: int, stages: int, spread: float = 0.4, hop: float = 0.1) -> Times:
    draw = random.Random(seed)
    forward = [1 + draw.uniform(-spread, spread) for _ in range(stages)]
    return Times(
        forward,
        [figure * draw.uniform(0.8, 1.2) for figure in forward],
        [figure * draw.uniform(0.5, 1.1) for figure in forward],
        hop,
    )


def best_named(times: Times, ranks: int, microbatches: int, placement: tuple[int, ...], limit: float) -> float:
    """The makespan of the fastest named schedule with this placement that fits."""
    makespans = [float("inf")]
    for name in names():
        try:
            schedule = build(name, ranks, microbatches, len(placement) // ranks)
        except ScheduleError:
            continue
        fits = schedule.trains and max(peak_activations(schedule)) <= limit
        if schedule.placement == placement and fits:
            makespans.append(simulate(schedule, times).makespan)
    return min(makespans)


@settings(max_examples=40)
@given(
    st.integers(1, 5),
    st.integers(1, 8),
    st.sampled_from([("loop", 1), ("loop", 2), ("loop", 3), ("v", 2)]),
    st.floats(0, 3),
    st.integers(0, 999),
)
def test_what_is_found_is_sound_fits_and_is_no_slower_than_any_named_schedule(
    ranks: int, microbatches: int, form: tuple[str, int], generosity: float, seed: int
) -> None:
    placement, chunks = form
    times = unequal(seed, ranks * chunks)
    limit = int(chunks + generosity * ranks * chunks)
    schedule = search(times, ranks, microbatches, placement, limit, effort=QUICK)
    check(lower(schedule), limit)
    assert schedule.makespan == simulate(schedule, times).makespan
    assert schedule.lower_bound == lower_bound(times, schedule.placement, microbatches, limit)
    assert schedule.lower_bound <= schedule.makespan * (1 + 1e-9)
    named = best_named(times, ranks, microbatches, schedule.placement, limit)
    assert schedule.makespan <= named * (1 + 1e-9)


def test_the_same_arguments_give_the_same_schedule() -> None:
    times = unequal(1, 4)
    assert search(times, 4, 8, memory_limit=5, effort=QUICK) == search(times, 4, 8, memory_limit=5, effort=QUICK)


def test_unequal_stages_between_p_and_2p() -> None:
    """Better than every named schedule in most settings."""
    better = 0
    for seed in range(12):
        ranks, microbatches = (4, 8) if seed % 2 else (6, 12)
        times, limit = unequal(seed, ranks), int((1 + seed % 4 / 4) * ranks)
        schedule = search(times, ranks, microbatches, memory_limit=limit, effort=0.1)
        better += schedule.makespan < best_named(times, ranks, microbatches, schedule.placement, limit) * (1 - 1e-6)
    assert better > 6


def test_twice_the_memory_comes_close_to_the_bound() -> None:
    gaps = []
    for seed in range(12):
        ranks = 2 + seed % 7
        schedule = search(unequal(seed, ranks), ranks, 3 * ranks, memory_limit=2 * ranks, effort=0.1)
        gaps.append(schedule.makespan / schedule.lower_bound - 1)
    assert statistics.median(gaps) < 0.03


# Makespans, in chunk times of the greedy search over V orders that was published with ZB-V (Qi et al., 2024), with the
# memory of an activation held until its W. Its orders were timed by simulate.
@pytest.mark.parametrize(
    ("ranks", "microbatches", "figures", "hop", "published"),
    [
        (4, 8, (1, 1, 1), 0.0, 51.0),
        (4, 12, (1, 1, 0.5), 0.3, 67.9),
        (6, 18, (1, 1.5, 0.7), 0.2, 128.1),
        (8, 24, (1, 1.2, 0.8), 0.1, 155.9),
        (8, 24, (9261, 9043, 4668.5), 601, 1188655),
        (8, 24, (14859, 14722, 9963.5), 527, 2020610),
    ],
)
@pytest.mark.slow
def test_v_is_no_worse_than_the_published_search(
    ranks: int, microbatches: int, figures: tuple[float, float, float], hop: float, published: float
) -> None:
    schedule = search(Times.equal(2 * ranks, *figures, hop=hop), ranks, microbatches, "v", 2 * ranks, effort=0.2)
    assert schedule.makespan <= published


@pytest.mark.slow
def test_eight_ranks_and_32_microbatches_in_time() -> None:
    for placement, stages, limit in (("loop", 8, 10), ("v", 16, 16)):
        _, loops = timed(partial(search, unequal(2, stages), 8, 32, placement, limit))
        assert loops < 300


def test_where_a_named_schedule_reaches_the_bound_the_one_with_the_least_memory_is_taken() -> None:
    schedule = search(Times.equal(1), 1, 4)
    assert (schedule.makespan, schedule.lower_bound, peak_activations(schedule)) == (12, 12, (1,))
    schedule = search(Times.equal(4), 4, 8, memory_limit=8)
    joined = join_backwards(build("zb-h1", 4, 8), Times.equal(4))
    assert (schedule.makespan, schedule.origin, schedule.actions) == (27, "zb-h1", joined.actions)


def test_it_is_a_schedule_like_any_other() -> None:
    schedule = search(unequal(3, 4), 4, 6, memory_limit=4, effort=QUICK)
    assert str(schedule).startswith("searched: 4 ranks, 4 stages, 6 microbatches\nrank 0  0F0 0F1")
    assert schedule.origin in (*names(), "greedy")
    assert from_csv(to_csv(schedule)).actions == schedule.actions
    assert type(lower(schedule)) is Schedule  # the makespan of other actions would be another one


@pytest.mark.parametrize(
    ("arguments", "parts", "advice"),
    [
        ((Times.equal(4), 3, 4), ['"loop"', "3 ranks", "3 stages", "for 4"], ""),
        ((Times.equal(4), 4, 4, "v"), ['"v"', "4 ranks", "8 stages", "for 4"], ""),
        ((Times.equal(4), 4, 0), ["0 microbatches"], ""),
        ((Times.equal(4), "4", 4), ["'4' ranks"], ""),
        ((Times.equal(4), 4, 4, "loops"), ['"loops"', '"loop"'], ""),
        ((Times.equal(8), 4, 8, "v", 1), ["room for 1 ", "2 activations"], "2 or more"),
        ((Times.equal(4), 4, 8, "loop", float("nan")), ["room for nan"], "1 or more"),
        ((Times.equal(4), 4, 8, "loop", "2GiB"), ["number of activations", "'2GiB'"], ""),
        ((Times.equal(4), 4, 8, "loop", [4, 4, 4]), ["each of 4 ranks", "3"], ""),
        ((Times.equal(4), 4, 8, "loop", [4, 3, 2, 0]), ["room for 0 "], "1 or more"),
        ((1.0, 4, 8), ["search()", "Times", "1.0"], "Times.equal(stages)"),
        ((Times.equal(4), 4, 8, "loop", 4, float("nan")), ["effort", "nan"], ""),
        ((Times.equal(4), 4, 8, "loop", 4, -1), ["effort", "-1"], ""),
    ],
)
def test_arguments_that_do_not_fit(arguments: tuple, parts: list[str], advice: str) -> None:
    with refused(ScheduleError, *parts, advice=advice):
        search(*arguments)


def test_each_rank_keeps_its_limit() -> None:
    times, limits = Times.equal(4, hop=2.0), [6, 4, 3, 2]
    schedule = search(times, 4, 12, memory_limit=limits, effort=QUICK)
    peaks = peak_activations(schedule)
    assert all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))
    assert schedule.makespan < simulate(build("1f1b", 4, 12), times).makespan


@given(st.sampled_from(["zb-h1", "zb-h2", "zb-v", "v-half", "interleaved-zb"]), st.integers(1, 4), st.integers(0, 99))
def test_the_search_times_orders_as_simulate_does(name: str, ranks: int, seed: int) -> None:
    schedule = build(name, ranks, 3 * ranks)
    costs = unequal(seed, schedule.stages)
    for times in (costs, Times(costs.forward, costs.input_grad, costs.weight_grad, 0.2, transfer=0.3)):
        problem = OrderProblem(times, schedule.placement, schedule.microbatches, [10**6] * schedule.ranks)
        assert all(action.kind is not Kind.B for row in schedule.actions for action in row)
        run = problem.run(orders_of(schedule))
        assert run.makespan == pytest.approx(simulate(schedule, times).makespan)
        path = problem.critical_path(run)
        rank, at = path[-1]
        assert run.ends[rank][at] == run.makespan
        first, at = path[0]
        assert run.ends[first][at] == problem.duration[run.orders[first][at]]
