"""Where to cut: the best of all cuts, what comes with them, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Link as HardwareLink
from pipegraph.errors import ArgumentError, PlanError, ScheduleError
from pipegraph.planner import Solution, solve
from pipegraph.schedule import Schedule, build, from_csv, lower, simulate
from tests.messages import refused
from tests.planner.brute_force import Link, costs, every_cut, links, makespan, slowest_stage, small_schedules
from tests.speed import timed

PUBLISHED = [SegmentCost(f, f, f) for f in (8.0, 11.0, 2.0, 1.0, 18.0, 5.0, 4.0, 11.0)]
FOUR = [SegmentCost(1.0, 1.0, 1.0)] * 4


def transformer(layers: int, spread: float = 0.0) -> list[SegmentCost]:
    """Embedding, halves of layers, norm and head: (2 · layers + 3) segments."""
    random = np.random.default_rng(0)
    seconds = [0.05, *[0.4, 0.6] * layers, 0.02, 1.8]
    seconds = [duration * (1 + spread * random.uniform(-1, 1)) for duration in seconds]
    return [SegmentCost(f, 1.1 * f, 0.9 * f, 100, int(1000 * f), int(500 * f)) for f in seconds]


def check_best(solution: Solution, chain: list[SegmentCost], schedule: Schedule, link: Link = None) -> None:
    """The solution is as good as the best of all cuts, and tells the truth of itself and of the others."""
    values = {cuts: makespan(chain, cuts, schedule, link) for cuts in every_cut(len(chain), schedule.stages)}
    best = min(values.values())
    assert solution.value == pytest.approx(best, rel=1e-9)
    assert solution.lower_bound == solution.value and solution.gap == 0
    alternative_cuts = [alternative.cuts for alternative in solution.alternatives]
    assert len({solution.cuts, *alternative_cuts}) == 1 + len(alternative_cuts)
    for candidate in (solution, *solution.alternatives):
        assert candidate.value == pytest.approx(values[candidate.cuts], rel=1e-9)


def test_a_chain_for_which_closed_forms_miss_the_best() -> None:
    solution = solve(PUBLISHED, stages=4, schedule="1f1b", microbatches=8)
    assert (solution.cuts, solution.value, solution.lower_bound, solution.gap) == ((3, 5, 7), 573, 573, 0)
    assert solution.schedule.name == "1f1b" and simulate(solution.schedule, solution.times).makespan == 573
    assert [(alternative.cuts, alternative.value) for alternative in solution.alternatives[:3]] == [
        ((3, 5, 6), 573),
        ((2, 5, 6), 579),
        ((2, 5, 7), 579),
    ]
    assert solution.moved == ((579, 586), (720, 639), (573, math.inf))


def test_equal_segments() -> None:
    solution = solve([SegmentCost(1.0, 1.0, 1.0)] * 12, stages=4, microbatches=16)
    assert solution.cuts == (3, 6, 9) and solution.value == (16 + 3) * 9
    assert solution.times.forward == (3,) * 4
    assert solution.times.input_grad == (0, 3, 3, 3) and solution.times.weight_grad == (6, 3, 3, 3)


def test_a_heavy_head_leaves_the_last_stage_fewer_layers() -> None:
    chain = [*[SegmentCost(1.0, 1.0, 1.0)] * 12, SegmentCost(2.0, 2.0, 2.0)]
    assert solve(chain, stages=2, microbatches=32).cuts == (7,)


def test_one_stage_has_no_cuts() -> None:
    solution = solve(FOUR, stages=1, microbatches=3)
    assert (solution.cuts, solution.value, solution.moved, solution.alternatives) == ((), 36, (), ())


def test_without_a_backward_only_forwards_count() -> None:
    chain = [SegmentCost(float(f), 100.0, 100.0, parameter_bytes=10) for f in (3, 1, 1, 1)]
    solution = solve(chain, stages=2, schedule="forward", microbatches=4)
    assert (solution.cuts, solution.value, solution.memory) == ((1,), 15, (10, 30))
    assert solve(chain, stages=2, schedule="forward", objective="bottleneck").value == 3


def test_a_slow_link_moves_the_cut_to_where_little_crosses() -> None:
    chain = [SegmentCost(1.0, 1.0, 1.0, crossing) for crossing in (900, 900, 900, 5, 900, 900)]
    assert solve(chain, stages=2, microbatches=4).cuts == (3,)
    assert solve(chain, stages=2, microbatches=4, link=(0.0, 100.0)).cuts == (4,)


def test_a_link_that_depends_on_the_ranks() -> None:
    rank_pairs = []

    def between(rank: int, other_rank: int) -> HardwareLink:
        rank_pairs.append((rank, other_rank))
        return HardwareLink(latency=0.5, bandwidth=math.inf)

    solution = solve(FOUR, stages=4, schedule="zb-v", microbatches=4, link=between)
    assert rank_pairs == [(0, 1), (1, 0)]  # stages 1 and 2 are both on rank 1
    assert solution.times.hop == (0.5, 0.0, 0.5)


@settings(max_examples=25)
@given(st.data())
def test_1f1b_is_cut_as_well_as_by_trying_everything(data: st.DataObject) -> None:
    segments = data.draw(st.integers(4, 10))
    chain, link = data.draw(costs(segments)), data.draw(links)
    stages, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 12))
    solution = solve(chain, stages, "1f1b", microbatches, link=link)
    check_best(solution, chain, build("1f1b", stages, microbatches), link)


@settings(max_examples=40)
@given(st.data(), small_schedules())
def test_every_schedule_is_cut_as_well_as_by_trying_everything(data: st.DataObject, schedule: Schedule) -> None:
    chain = data.draw(costs(schedule.stages + data.draw(st.integers(0, 3)), st.floats(0, 10)))
    link = data.draw(links)
    solution = solve(chain, schedule.stages, schedule.name, schedule.microbatches, ranks=schedule.ranks, link=link)
    check_best(solution, chain, schedule, link)


@settings(max_examples=40)
@given(st.data(), st.integers(1, 4))
def test_the_bottleneck_is_the_least_that_the_slowest_stage_can_take(data: st.DataObject, stages: int) -> None:
    chain = data.draw(costs(stages + data.draw(st.integers(0, 6))))
    solution = solve(chain, stages, objective="bottleneck")
    assert solution.value == solution.lower_bound == slowest_stage(chain, solution.cuts)
    assert solution.value == min(slowest_stage(chain, cuts) for cuts in every_cut(len(chain), stages))


def test_of_equal_bottlenecks_the_most_even_is_taken() -> None:
    chain = [SegmentCost(float(f), 0.0, 0.0) for f in (9, 1, 1, 1, 1, 1, 1)]
    assert solve(chain, stages=3, objective="bottleneck").cuts == (1, 4)


def test_names_of_torch_and_ready_schedules() -> None:
    by_name = solve(PUBLISHED, 4, "zb-v", 6)
    assert solve(PUBLISHED, 4, "ScheduleZBVZeroBubble", 6) == by_name
    assert solve(PUBLISHED, 4, build("zb-v", 2, 6)).cuts == by_name.cuts
    assert solve(PUBLISHED, 4, lower(build("zb-v", 2, 6))).value == by_name.value
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1F1,1B1,1B0\n")
    check_best(solve(PUBLISHED, 2, schedule), PUBLISHED, schedule)


@pytest.mark.slow
def test_large_chains_are_solved_in_seconds() -> None:
    chain = transformer(126, spread=0.03)
    solution, loops = timed(lambda: solve(chain, stages=16, schedule="1f1b", microbatches=64))
    assert loops < 50 and solution.gap < 0.01
    solution, loops = timed(lambda: solve(chain, stages=32, schedule="zb-v", microbatches=64))
    assert loops < 50 and solution.gap < 0.03


def test_the_same_arguments_give_the_same_result() -> None:
    chain = transformer(10, spread=0.3)
    assert solve(chain, 8, "interleaved-1f1b", 8, effort=0.1) == solve(chain, 8, "interleaved-1f1b", 8, effort=0.1)


def test_importing_it_loads_no_torch() -> None:
    code = (
        "from pipegraph.planner import solve\n"
        "from pipegraph.cost import SegmentCost\n"
        "solve([SegmentCost(1.0, 1.0, 1.0)] * 4, 2)\n"
        "import sys; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("arguments", "kind", "parts", "advice"),
    [
        ({"stages": 5}, PlanError, ["4 segments", "5 stages"], "stages=4"),
        ({"stages": 0}, PlanError, ["0 stages"], ""),
        ({"stages": 2.0}, PlanError, ["2.0 stages"], ""),
        ({"objective": "botleneck"}, PlanError, ['"botleneck"', '"bottleneck"'], ""),
        ({"ranks": 3}, PlanError, ["1f1b", "4 stages on 4 ranks", "3"], ""),
        ({"schedule": "interleaved-1f1b", "ranks": 3}, PlanError, ["4 stages on 2 ranks", "3"], "ranks=2, or 6 stages"),
        ({"placement": "v"}, PlanError, ['placement "v"'], ""),
        ({"placement": "lop"}, PlanError, ['"lop"', '"loop"'], ""),
        ({"link": (1e-5, 0.0)}, PlanError, ["ranks 0 and 1"], ""),
        ({"link": (-1.0, 1.0)}, PlanError, ["latency of -1.0"], ""),
        ({"memory_bytes": [1, 2]}, ArgumentError, ["memory_bytes", "each rank: 4", "2 were given"], ""),
        ({"memory_bytes": "80 boxes"}, ArgumentError, ["'80 boxes'", "80GiB"], ""),
        ({"effort": -1.0}, PlanError, ["effort", "-1.0"], ""),
        ({"alternatives": -1}, PlanError, ["alternatives", "from 0 on"], ""),
        ({"names": ["embed"]}, PlanError, ["4 segments", "1 names"], ""),
    ],
)
def test_bad_arguments(arguments: dict, kind: type[PlanError], parts: list[str], advice: str) -> None:
    with refused(kind, *parts, advice=advice):
        solve(FOUR, **{"stages": 4, **arguments})


@pytest.mark.parametrize(
    ("arguments", "parts", "advice"),
    [
        ({"schedule": "1f2b"}, ['"1f2b"', '"1f1b"'], "1f1b"),
        ({"schedule": "zb-v", "microbatches": 2}, ["zb-v", "2 microbatches", "2 ranks"], "3 microbatches"),
        ({"schedule": "zb-v", "stages": 3}, ["zb-v", "3 stages"], "2 or 4 stages"),
        ({"schedule": build("gpipe", 2, 4)}, ["gpipe", "2 stages", "4"], "for 4"),
        ({"microbatches": 0}, ["1f1b", "0 microbatches"], "whole number"),
        ({"schedule": Schedule("wrong", (0, 1), 1, ((), ()))}, ["wrong", "missing"], ""),
    ],
)
def test_bad_schedules(arguments: dict, parts: list[str], advice: str) -> None:
    with refused(ScheduleError, *parts, advice=advice):
        solve(FOUR, **{"stages": 4, **arguments})


@pytest.mark.parametrize("field", ["forward", "input_grad", "boundary_bytes", "saved_bytes", "parameter_bytes"])
@pytest.mark.parametrize("figure", [-1, math.nan, math.inf, "1", None])
def test_costs_that_are_none_name_the_segment(field: str, figure: object) -> None:
    wrong = SegmentCost(**{"forward": 1.0, "input_grad": 1.0, "weight_grad": 1.0, field: figure})
    with refused(PlanError, "Segment 1 (layers.0)", f"{field}={figure!r}"):
        solve([FOUR[0], wrong], 2, names=["embed", "layers.0"])
    with refused(PlanError, "Segment 0", "SegmentCost", "1.0"):
        solve([1.0, 2.0], 2)
