"""Cuts and a choice for each stage, found together, and the same by trying every combination."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, product
from random import Random
from typing import NamedTuple

import pytest

from pipegraph.cost import SegmentCost, TransientBytes
from pipegraph.errors import PlanError
from pipegraph.planner.solver import cut_search
from pipegraph.planner.solver.solve import MemoryShortage, Problem, Solution, solve
from pipegraph.schedule import Schedule, build, names
from pipegraph.schedule.recipes import find_recipe
from tests.messages import refused
from tests.planner.brute_force import every_cut, makespan, memory
from tests.slow import cases

Chain = list[SegmentCost]


class Case(NamedTuple):
    options: list[Chain]
    schedule: Schedule
    link: tuple[float, float] | None


def random_case(random: Random) -> Case:
    """A chain whose segments keep less and take longer with each further option, the last of which may offload; and a
    schedule with a backward."""
    trained = [name for name in names() if find_recipe(name).trains]
    recipe = find_recipe(random.choice(trained))
    chunks = random.randint(1, 2) if recipe.any_chunks else recipe.chunks
    ranks = random.randint(1, 3 if chunks == 1 else 2)
    microbatches = random.randint(1, 5)
    while recipe.rule(ranks, microbatches):
        microbatches += 1
    schedule = build(recipe.name, ranks, microbatches, chunks)
    segments = schedule.stages + random.randint(0, 2)
    count = random.randint(2, 3 if schedule.stages < 4 else 2)
    options: list[Chain] = [[] for _ in range(count)]
    offloads = random.random() < 0.5
    for _ in range(segments):
        f, i, w = (float(random.randint(0, 20)) for _ in range(3))
        saved, crossing, params = (random.randint(0, 50) for _ in range(3))
        for costs in options:
            reads, away = random.randint(0, saved), saved // 2 if offloads and costs is options[-1] else 0
            transient = TransientBytes(*(random.randint(0, 30) for _ in range(4)))
            costs.append(
                SegmentCost(
                    f, i, w, crossing, saved, params,
                    weight_saved_bytes=reads, offloaded_bytes=away, transient_bytes=transient, added_bytes=params // 2,
                )
            )  # fmt: skip
            i, saved = i + random.randint(0, 9), random.randint(0, saved)
    link = random.choice([None, (0.5, 10.0), (0.0, 100.0)])
    return Case(options, schedule, link)


def flattened(options: Sequence[Chain], cuts: Sequence[int], chosen: Sequence[int]) -> Chain:
    """The segments with the option of their stage."""
    edges = pairwise((0, *cuts, len(options[0])))
    return [options[option][at] for option, (begin, end) in zip(chosen, edges, strict=True) for at in range(begin, end)]


def all_values(case: Case) -> list[tuple[float, float]]:
    """(the value, what the fullest rank needs) of every combination."""
    stages, values = case.schedule.stages, []
    for cuts in every_cut(len(case.options[0]), stages):
        for chosen in product(range(len(case.options)), repeat=stages):
            costs = flattened(case.options, cuts, chosen)
            values.append((makespan(costs, cuts, case.schedule, case.link), max(memory(costs, cuts, case.schedule))))
    return values


def check_against_brute_force(seed: int) -> Solution | None:
    """Compare a random case with a random limit. Returns the solution, or None if nothing fits."""
    random = Random(seed)
    case = random_case(random)
    every = all_values(case)
    needs = sorted({need for _, need in every})
    limit = random.choice([*needs[: 1 + len(needs) // 2], needs[0] - 1])
    fitting = [value for value, need in every if need <= limit]
    if not fitting:
        with pytest.raises(MemoryShortage) as shortage:
            Problem(case.options, case.schedule, memory_bytes=limit, link=case.link).solve()
        assert shortage.value.peak == needs[0]
        return None
    problem = Problem(case.options, case.schedule, memory_bytes=limit, link=case.link)
    assert problem.fractional_bound() <= min(fitting) * (1 + 1e-9)
    improved = problem.solve(effort=0.01, proves=False)
    assert max(improved.memory) <= limit and improved.lower_bound <= min(fitting) * (1 + 1e-9)
    assert min(fitting) * (1 - 1e-9) <= improved.value
    solution = problem.solve()
    costs = flattened(case.options, solution.cuts, solution.options)
    assert makespan(costs, solution.cuts, case.schedule, case.link) == pytest.approx(solution.value, rel=1e-12)
    assert [math.ceil(need) for need in memory(costs, solution.cuts, case.schedule)] == list(solution.memory)
    assert max(solution.memory) <= limit
    assert solution.value == pytest.approx(min(fitting), rel=1e-9)
    assert solution.lower_bound <= solution.value * (1 + 1e-9) and solution.value <= solution.uniform * (1 + 1e-9)
    return solution


@pytest.mark.parametrize("seed", cases(range(30), slow=range(5, 30)))
def test_all_are_valued_if_they_are_few(seed: int) -> None:
    solution = check_against_brute_force(seed)
    assert solution is None or solution.gap == 0


@pytest.mark.parametrize("seed", cases(range(100, 130), slow=range(105, 130)))
def test_others_are_searched_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "_ALL_STEPS", 0)
    check_against_brute_force(seed)


def layers(count: int, saved: int, slower: float) -> Chain:
    return [SegmentCost(1.0, 1.0 + slower, 1.0, 1, saved, 10) for _ in range(count)]


def test_early_stages_recompute_more() -> None:
    """Of 1F1B on four ranks the first holds four microbatches, the last one."""
    options = [layers(32, 16, 0.0), layers(32, 2, 1.0)]
    limit = 4 * 8 * 10 + 2.5 * 8 * 16
    solution = Problem(options, build("1f1b", 4, 16), memory_bytes=limit).solve()
    assert (solution.options, solution.cuts, solution.gap) == ((1, 0, 0, 0), (7, 14, 22), 0)  # and have fewer layers
    uniform_values = [solve(costs, 4, "1f1b", 16, memory_bytes=limit).value for costs in options]
    assert (solution.value, solution.uniform) == (553, min(uniform_values)) == (553, 591)
    problem = Problem(options, build("1f1b", 4, 16), memory_bytes=limit)
    assert 0.85 * 553 <= problem.fractional_bound() <= 553  # parts of a stage may have options of their own
    assert problem.take(solution) == solution
    assert Problem(options, build("1f1b", 4, 16), memory_bytes=0.9 * limit).take(solution) is None
    assert problem.solve(effort=0.05, proves=False).value == 553


@pytest.mark.parametrize("name", ["interleaved-1f1b", "zb-v", "zb-h1"])
def test_stages_of_parts_of_segments_bound_every_order(name: str) -> None:
    """They know that memory makes stages compute again, and how long the way through the stages is."""
    options = [layers(32, 16, 0.0), layers(32, 2, 1.0)]
    chunks = find_recipe(name).chunks
    problem = Problem(options, build(name, 4, 16, chunks), memory_bytes=700)
    solution = problem.solve(effort=0.2)
    assert 16 * 32 * 3 / 4 < problem.fractional_bound() <= solution.value <= 1.3 * problem.fractional_bound()
    impossible = Problem(options, build(name, 4, 16, chunks), memory_bytes=8 * 10 * 4)
    assert math.isinf(impossible.fractional_bound())
    with pytest.raises(MemoryShortage):
        impossible.solve(effort=0.1)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_quick_search_fills_the_memory_of_each_rank(name: str) -> None:
    """It begins with the fastest options that ranks have room for, and so is never slower than the best that has one
    option for all stages: here nothing fits without recompute everywhere, and some stages can do without."""
    options = [layers(40, 16, 0.0), layers(40, 9, 0.4), layers(40, 2, 1.0)]
    schedule = build(name, 4, 16, find_recipe(name).chunks)
    uniform_solutions = [Problem([costs], schedule).solve(effort=0.0, proves=False) for costs in options]
    fastest, _, leanest = uniform_solutions
    limit = max(leanest.memory) + 0.3 * (max(fastest.memory) - max(leanest.memory))
    solution = Problem(options, schedule, memory_bytes=limit).solve(effort=0.0, proves=False)
    assert max(solution.memory) <= limit and len({*solution.options}) > 1
    assert fastest.value <= solution.value < leanest.value


def test_stages_may_have_options_of_their_own() -> None:
    options = [layers(8, 16, 0.0), layers(8, 2, 1.0)]
    solution = Problem(options, build("1f1b", 2, 4), allowed=[[1], [0, 1]]).solve()
    assert solution.options == (1, 0) and solution.uniform > solution.value


def test_stages_without_a_segment_are_refused() -> None:
    with refused(PlanError, "1 segment", "2 stages"):
        Problem([layers(1, 1, 0.0)], build("1f1b", 2, 4))
