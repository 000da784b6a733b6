"""Cuts that fit into memory."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.cost import MemoryFactors, SegmentCost, TransientBytes
from pipegraph.errors import PlanError
from pipegraph.planner import solve
from pipegraph.planner.joint_plan.search import FEW_MICROBATCHES
from pipegraph.planner.solver.memory_need import _moments, _receive_buffers
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.schedule import Schedule, build, from_csv
from pipegraph.schedule.recipes import RECIPES
from pipegraph.schedule.recipes.recipe import Recipe
from pipegraph.units import bytes_option, parse_bytes
from tests.messages import missing, refused
from tests.planner.brute_force import costs, every_cut, makespan, memory, memory_factors, slowest_stage, small_schedules

SAVES = [SegmentCost(1.0, 1.0, 1.0, 0, 100, 10)] * 8
"""Segments of which each saves 100 bytes, and has 10 of parameters."""


def test_what_a_rank_needs() -> None:
    """1f1b holds 2, then 1 microbatch; parameters, gradients and optimizer state are four times the parameters."""
    assert solve(SAVES, stages=2).memory == (2 * 400 + 4 * 40, 400 + 4 * 40)
    assert solve(SAVES, stages=2, factors=MemoryFactors(optimizer=0.0)).memory == (2 * 400 + 2 * 40, 400 + 2 * 40)
    assert solve(SAVES, stages=2, schedule="gpipe").memory == (8 * 400 + 160,) * 2


def test_each_stage_of_a_rank_holds_its_own() -> None:
    """In zb-v a rank holds up to 2p microbatches of its two stages together: rank 0 once four of its first."""
    chain = [SegmentCost(1.0, 1.0, 1.0, 0, saved) for saved in (1000, 1, 1, 10)]
    solution = solve(chain, stages=4, schedule="zb-v", microbatches=6)
    assert list(solution.memory) == memory(chain, (1, 2, 3), solution.schedule) == [4 * 1000, 4]


@pytest.mark.parametrize(
    ("transient", "needed"),
    [
        (TransientBytes(forward=30), [230, 130]),  # on top of what two microbatches keep, and one
        (TransientBytes(backward=30), [230, 130]),
        (TransientBytes(input_grad=30, weight_grad=30), [200, 100]),  # which 1f1b does not run
    ],
)
def test_what_actions_need_while_they_run(transient: TransientBytes, needed: list[int]) -> None:
    small = SegmentCost(1.0, 1.0, 1.0, 0, 50)
    chain = [small, SegmentCost(1.0, 1.0, 1.0, 0, 50, transient_bytes=transient)] * 2
    solution = solve(chain, 2, "1f1b", 4)
    assert list(solution.memory) == memory(chain, (2,), solution.schedule) == needed
    # At the end of a backward that saves nothing, the gradients of parameters are in memory a second time.
    equal_chain = [SegmentCost(1.0, 1.0, 1.0, 0, 50, 80)] * 2
    assert solve(equal_chain, 2, "1f1b", 4).memory == (100 + 4 * 80 + 30, 4 * 80 + 80)


PARTED = from_csv("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1F1,1I0,1I1,1W0,1W1\n")


@pytest.mark.parametrize(("reads", "last"), [(None, 200), (10, 200), (130, 260)])
def test_w_keeps_what_it_reads(reads: int | None, last: int) -> None:
    """After the Is of rank 1, only these values are kept. The first stage's I has nothing to do: its W keeps
    everything, and the gradient that the stage received."""
    chain = [SegmentCost(1.0, 1.0, 1.0, 7, 100, weight_saved_bytes=reads)] * 2
    solution = solve(chain, 2, PARTED, receives_ahead=0)
    assert list(solution.memory) == memory(chain, (1,), PARTED, ahead=0)
    buffer = solve([SegmentCost(1.0, 1.0, 1.0, 7)] * 2, 2, "gpipe", 2, receives_ahead=0).memory[1]
    assert solution.memory == (2 * 107 + buffer, last + buffer)


def test_frozen_parameters_and_buffers_are_held_once() -> None:
    chain = [SegmentCost(1.0, 1.0, 1.0, parameter_bytes=100, trained_bytes=10, buffer_bytes=7)] * 4
    assert solve(chain, stages=2).memory == (2 * (107 + 3 * 10 + 10),) * 2  # and gradients that have just been made
    assert solve(chain, stages=2, schedule="forward").memory == (2 * 107,) * 2
    with refused(PlanError, "Segment 0", "trained_bytes=101", "parameter_bytes, 100"):
        solve([SegmentCost(1.0, 1.0, 1.0, parameter_bytes=100, trained_bytes=101)] * 2, stages=2)
    with refused(PlanError, "Segment 0", "added_bytes=11", "trained_bytes, 10"):
        solve([SegmentCost(1.0, 1.0, 1.0, parameter_bytes=100, trained_bytes=10, added_bytes=11)] * 2, stages=2)


def test_where_nothing_crosses_no_bytes_are_counted() -> None:
    """In zb-v three boundaries share two links."""
    chain = [SegmentCost(1.0, 1.0, 1.0, crossing) for crossing in (0, 5, 100, 0)]
    solution = solve(chain, 4, "zb-v", 6, link=(0.5, 10.0))
    assert list(solution.memory) == memory(chain, (1, 2, 3), solution.schedule)
    assert solution.times.transfer == (0.0, 0.0, 10.0) and solution.lower_bound == solution.value
    assert solution.value == makespan(chain, (1, 2, 3), solution.schedule, (0.5, 10.0))
    assert solve(chain, 4, "zb-v", 6, link=(0.5, 10.0), memory_bytes=max(solution.memory)).cuts == (1, 2, 3)


@given(st.integers(1, 2**45))
def test_a_limit_that_is_told_does_and_is_close(required_bytes: int) -> None:
    limit = parse_bytes(bytes_option(required_bytes))
    assert required_bytes <= limit <= max(2**20, 1.001 * required_bytes)


def test_buffers_to_receive_into() -> None:
    chain = [SegmentCost(1.0, 1.0, 1.0, 1000)] * 2
    early, late = (solve(chain, stages=2, receives_ahead=ahead) for ahead in (0, 4))
    assert early.memory == (1000, 1000) and late.memory > early.memory


def test_less_memory_moves_the_cut() -> None:
    assert solve(SAVES, stages=2).cuts == (4,)
    tight = solve(SAVES, stages=2, memory_bytes=800)
    assert tight.cuts == (3,) and tight.memory == (720, 700) and tight.value > solve(SAVES, stages=2).value
    assert solve(SAVES, stages=2, memory_bytes=[480, 10**6]).cuts == (2,)
    assert all(max(alternative.memory) <= 800 for alternative in tight.alternatives)
    assert tight.moved == ((math.inf, math.inf),)


@settings(max_examples=30)
@given(st.data(), small_schedules(), st.sampled_from([1.0, 1.1, 1.5]), st.booleans())
def test_the_best_that_fit_are_found(data: st.DataObject, schedule: Schedule, room: float, bottleneck: bool) -> None:
    stages = schedule.stages
    chain, factors = data.draw(costs(stages + data.draw(st.integers(0, 3)))), data.draw(memory_factors)
    needs = {cuts: memory(chain, cuts, schedule, factors) for cuts in every_cut(len(chain), stages)}
    limit = room * min(map(max, needs.values()))
    fitting = [cuts for cuts, ranks in needs.items() if max(ranks) <= limit]
    solution = solve(
        chain,
        stages,
        schedule,
        memory_bytes=limit,
        objective="bottleneck" if bottleneck and schedule.trains else "makespan",
        factors=factors,
    )
    assert solution.memory == tuple(map(math.ceil, needs[solution.cuts])) and solution.cuts in fitting
    if bottleneck and schedule.trains:
        best = min(slowest_stage(chain, cuts) for cuts in fitting)
    else:
        best = min(makespan(chain, cuts, schedule) for cuts in fitting)
    assert solution.value == pytest.approx(best, rel=1e-9) and solution.gap == 0


@settings(max_examples=20)
@given(st.data(), small_schedules())
def test_too_little_memory_names_the_least_that_would_do(data: st.DataObject, schedule: Schedule) -> None:
    chain, factors = data.draw(costs(schedule.stages + data.draw(st.integers(0, 3)))), data.draw(memory_factors)
    every = every_cut(len(chain), schedule.stages)
    least = math.ceil(min(max(memory(chain, cuts, schedule, factors)) for cuts in every))
    if least > 0:
        with refused(MemoryShortage, f"({least} bytes)"):
            solve(chain, schedule.stages, schedule, memory_bytes=least - 1, factors=factors)
    assert max(solve(chain, schedule.stages, schedule, memory_bytes=least, factors=factors).memory) <= least


def test_too_little_memory_says_what_to_do() -> None:
    with refused(MemoryShortage, "600 B on each rank", "(960 bytes)") as caught:
        solve(SAVES, stages=2, schedule="zb-h1", microbatches=4, memory_bytes=600)
    _, parts, other_numbers = caught.value.problem.splitlines()
    assert not missing(parts, "rank 0 needs 160 B for parameters", "800 B for saved activations", "0 B for receive")
    assert not missing(other_numbers, "4 stages on 4 ranks it is 880 B", "8 stages on 8 ranks it is 440 B")


def test_ranks_with_different_memory() -> None:
    with pytest.raises(PlanError) as caught:
        solve(SAVES, stages=2, memory_bytes=[100, 300])
    shortage = int(re.search(r"\((\d+) bytes\) more on each would be enough, and no less", str(caught.value))[1])
    assert solve(SAVES, stages=2, memory_bytes=[100 + shortage, 300 + shortage])
    with pytest.raises(PlanError):
        solve(SAVES, stages=2, memory_bytes=[99 + shortage, 299 + shortage])


MORE_MICROBATCHES = [
    (recipe, ranks, FEW_MICROBATCHES * ranks, rounds * ranks)
    for recipe, ranks, rounds in product(RECIPES, (2, 3, 4, 8), (3, 5, 8))
    if recipe.trains and not any(recipe.rule(ranks, count * ranks) for count in (FEW_MICROBATCHES, rounds))
]


@pytest.mark.parametrize(("recipe", "ranks", "few", "many"), MORE_MICROBATCHES)
def test_ranks_hold_no_less_with_more_microbatches(recipe: Recipe, ranks: int, few: int, many: int) -> None:
    """So that what does not fit with few of them does not fit with many."""
    schedules = [build(recipe.name, ranks, count, recipe.chunks) for count in (few, many)]
    fewer, more = (_moments(schedule, False) for schedule in schedules)
    for place, counts in enumerate(fewer.counts):
        alike = (more.rank == fewer.rank[place]) & (more.stage == fewer.stage[place])
        alike &= (more.kind == fewer.kind[place]) & (more.adds >= fewer.adds[place])
        assert (more.counts[alike] >= counts).all(axis=1).any()
    assert (_receive_buffers(schedules[1], 4) >= _receive_buffers(schedules[0], 1)).all()
