"""The parts of `solve`: schedules timed for many cuts at once, lower bounds, and the search for cuts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.cost import SegmentCost
from pipegraph.planner import solve
from pipegraph.planner.solver import cut_search
from pipegraph.planner.solver.cut_search import equal_parts
from pipegraph.planner.solver.cut_space import CutSpace
from pipegraph.planner.solver.linear_program import MatrixGame
from pipegraph.planner.solver.local_search import neighbours
from pipegraph.planner.solver.makespan import ActionGraph, Makespan
from pipegraph.planner.solver.memory_need import MemoryNeed
from pipegraph.planner.solver.objective import MemoryLimited, Objective, SlowestStage
from pipegraph.planner.solver.prefix_sums import QUANTITIES, TIMES, LinearBound, PrefixSums
from pipegraph.schedule import Schedule, Times, build, names, simulate
from pipegraph.schedule.recipes import trains
from tests.planner.brute_force import (
    costs,
    every_cut,
    links,
    makespan,
    memory,
    memory_factors,
    slowest_stage,
    small_schedules,
)
from tests.slow import LIKE_OTHERS, cases


@pytest.fixture
def _nothing_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_search, "_ALL_STEPS", 0)


@given(st.data(), small_schedules())
def test_a_network_times_many_cuts_as_simulate_does_each(data: st.DataObject, schedule: Schedule) -> None:
    stages, boundaries = schedule.stages, schedule.stages - 1
    figures = st.floats(0, 10)
    times = np.array(data.draw(st.lists(figures, min_size=6 * stages, max_size=6 * stages))).reshape(3, stages, 2)
    transfers = np.array(data.draw(st.lists(st.floats(0.1, 5), min_size=2 * boundaries, max_size=2 * boundaries)))
    transfers = transfers.reshape(boundaries, 2) * data.draw(st.sampled_from([0.0, 1.0]))
    crosses = np.diff(schedule.placement) != 0
    hop, transfers = crosses * data.draw(st.sampled_from([0.0, 0.5])), transfers * crosses[:, None]
    network = ActionGraph(schedule, queued=bool(transfers.any()))
    makespans = network.makespans(times, hop, transfers)
    for number in (0, 1):
        given_times = Times(*times[..., number].tolist(), hop.tolist(), transfers[:, number].tolist())
        assert makespans[number] == pytest.approx(simulate(schedule, given_times).makespan, rel=1e-12)
        path = network.longest_path(times[..., number], hop, transfers[:, number])
        length = (path.work * times[..., number]).sum() + path.hops @ hop + path.transfers @ transfers[:, number]
        assert length == pytest.approx(makespans[number], rel=1e-12)


@settings(max_examples=60)
@given(st.data(), small_schedules())
def test_what_bounds_a_value_is_nowhere_above_it(data: st.DataObject, schedule: Schedule) -> None:
    """Linear figures of an objective, and what a stage costs by itself; at mixtures, too, the largest is tight."""
    chain, link = data.draw(costs(schedule.stages + data.draw(st.integers(0, 3)), st.floats(0, 10))), data.draw(links)
    sums = PrefixSums(chain)
    full = Makespan(sums, schedule, link)
    factors = data.draw(memory_factors)
    need = MemoryNeed(sums, schedule, factors, 2)
    every = every_cut(len(chain), schedule.stages)
    cuts = np.array(every, np.int64).reshape(len(every), schedule.stages - 1)
    limit = float(np.median(need.values(cuts)))
    limited = MemoryLimited(full, MemoryNeed(sums, schedule, factors, 2, [limit] * schedule.ranks), 10.0)
    objectives: list[Objective] = [full, SlowestStage(sums, schedule.stages, schedule.trains), need, limited]
    weight = np.ones(1)
    for objective in objectives:
        values = objective.values(cuts)
        slack = 1e-9 * (1 + values)
        for linear in [*objective.initial_bounds(), objective.tightest_bound(cuts, np.full(len(cuts), 1 / len(cuts)))]:
            assert (linear.at(cuts) <= values + slack).all()
        for value, chosen in zip(values, cuts, strict=True):
            tightest = objective.tightest_bound(chosen[None], weight).at(chosen[None])[0]
            if objective in (full, objectives[1]) or not any(any(cost.transient_bytes) for cost in chain):
                assert tightest == pytest.approx(value, rel=1e-9, abs=1e-9)
            assert tightest <= value + 1e-9 * (1 + value)  # it counts the least transient bytes of any cuts
            edges = np.array([0, *chosen, len(chain)])
            for stage in range(schedule.stages):
                least = objective.stage_bound(stage, edges[stage : stage + 1], edges[stage + 1 : stage + 2])
                assert least[0, 0, 0] <= value * (1 + 1e-9) + 1e-9


@settings(max_examples=60)
@pytest.mark.usefixtures("_nothing_tried")
@given(st.data(), small_schedules(), st.sampled_from([0.0, 0.003, 0.03]))
@pytest.mark.slow
def test_no_cuts_are_below_the_bound(data: st.DataObject, schedule: Schedule, effort: float) -> None:
    chain, link = data.draw(costs(schedule.stages + data.draw(st.integers(1, 4)))), data.draw(links)
    limit, every = None, every_cut(len(chain), schedule.stages)
    if data.draw(st.booleans()):
        peaks = {cuts: max(memory(chain, cuts, schedule)) for cuts in every}
        limit = max(peaks[data.draw(st.sampled_from(every))], 1.02 * min(peaks.values()))
        every = [cuts for cuts in every if peaks[cuts] <= limit]
    bottleneck = schedule.trains and data.draw(st.booleans())
    solution = solve(
        chain,
        schedule.stages,
        schedule,
        objective="bottleneck" if bottleneck else "makespan",
        memory_bytes=limit,
        link=link,
        effort=effort,
    )
    best = min(slowest_stage(chain, cuts) if bottleneck else makespan(chain, cuts, schedule, link) for cuts in every)
    assert solution.cuts in every
    assert solution.lower_bound <= best * (1 + 1e-9) <= solution.value * (1 + 2e-9)


@pytest.mark.usefixtures("_nothing_tried")
@pytest.mark.parametrize("name", cases([name for name in names() if trains(name)], slow=LIKE_OTHERS))
def test_the_search_finds_the_best_without_trying_everything(name: str) -> None:
    random = np.random.default_rng(1)
    schedule = build(name, 3, 6)
    chain = [_cost(random.integers(1, 20, 6).tolist()) for _ in range(schedule.stages + 6)]
    solution = solve(chain, schedule.stages, name, 6, link=(0.5, 20.0))
    every = every_cut(len(chain), schedule.stages)
    assert solution.value == pytest.approx(min(makespan(chain, cuts, schedule, (0.5, 20.0)) for cuts in every))


@pytest.mark.usefixtures("_nothing_tried")
def test_a_random_chain_with_one_stage_on_a_rank_is_proved() -> None:
    random = np.random.default_rng(2)
    chain = [_cost(random.integers(1, 20, 6).tolist()) for _ in range(40)]
    for name in ("1f1b", "zb-h1", "zb-h2", "eager-1f1b"):
        assert solve(chain, 8, name, 32).gap == 0


def _cost(figures: list[int]) -> SegmentCost:
    return SegmentCost(*map(float, figures[:3]), *figures[3:])


def test_neighbours() -> None:
    assert sorted(map(tuple, neighbours(np.array([2, 4]), 6).tolist())) == sorted(
        [(1, 4), (3, 4), (2, 3), (2, 5), (1, 3), (3, 5)]
    )
    assert [1] not in neighbours(np.array([5]), 10).tolist() and [2] in neighbours(np.array([5]), 10).tolist()
    assert neighbours(np.array([], np.int64), 3).shape == (0, 0)


def test_even_cuts_leave_each_stage_a_segment() -> None:
    sums = PrefixSums([_cost([f, 0, 0, 0, 0, 0]) for f in (9, 1, 1, 1)])
    assert equal_parts(sums, 3, TIMES).tolist() == [1, 2] and equal_parts(sums, 4, TIMES).tolist() == [1, 2, 3]
    assert equal_parts(PrefixSums([_cost([0] * 6)] * 5), 3, TIMES).tolist() == [1, 2]


def test_the_equilibrium_of_a_matrix_game() -> None:
    """Rock, paper, scissors; then without scissors, where paper wins; then one choice each."""
    game = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])
    rows, columns = MatrixGame(game).equilibrium()
    assert rows == pytest.approx([1 / 3] * 3) and columns == pytest.approx([1 / 3] * 3)
    assert [mixture.tolist() for mixture in MatrixGame(game[:2, :2]).equilibrium()] == [[0, 1], [0, 1]]
    assert [mixture.tolist() for mixture in MatrixGame(np.zeros((1, 1))).equilibrium()] == [[1], [1]]


def test_a_matrix_game_that_grows() -> None:
    """Rock and scissors; then paper, for the rows alone, which beats rock; then for the columns as well."""
    rows = np.array([[0.0, 1.0], [-1.0, 0.0]])
    game = MatrixGame(rows)
    assert [mixture.tolist() for mixture in game.equilibrium()] == [[1, 0], [1, 0]]
    game.add_row(np.array([1.0, -1.0]))
    first, second = game.equilibrium()
    assert first == pytest.approx([2 / 3, 0, 1 / 3]) and second == pytest.approx([2 / 3, 1 / 3])
    game.add_column(np.array([-1.0, 1.0, 0.0]))
    assert all(mixture == pytest.approx([1 / 3] * 3) for mixture in game.equilibrium())


def test_a_space_of_cuts() -> None:
    space = CutSpace.all_cuts(segments=5, stages=3)
    assert (space.first, space.last) == ((0, 1, 2, 5), (0, 3, 4, 5))
    crossing = [_cost([0, 0, 0, bytes_after, 0, 0]) for bytes_after in (9, 1, 5, 2, 0)]
    linear = LinearBound(PrefixSums(crossing), np.zeros((len(QUANTITIES), 3)), np.ones(2), 10.0)
    cost, cuts = space.minimum(linear)
    assert (cost, cuts.tolist()) == (13.0, [2, 4])
    small = space.restrict(lambda stage, begins, ends: ends[:, None] - begins <= 2)
    assert {tuple(cuts) for cuts in every_cut(5, 3) if small.contains(np.array([cuts]))[0]} == {(1, 3), (2, 3), (2, 4)}
    assert space.restrict_below(linear, 14.0).contains(np.array([[2, 4], [2, 3]])).tolist() == [True, False]
    several = CutSpace.all_cuts(5, 3, np.array([[True, True], [False, True], [True, False]]))
    candidates = np.array([[2, 4, 1, 1, 0], [2, 4, 1, 0, 0], [4, 2, 1, 1, 0]])
    assert several.contains(candidates).tolist() == [True, False, False]
    assert space.restrict_edge(1, 3, 3).first == (0, 3, 4, 5)
    assert space.restrict(lambda stage, begins, ends: ends[:, None] - begins > 2).empty
