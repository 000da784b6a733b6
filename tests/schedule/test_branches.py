"""Orders for stages of which some stand side by side."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipegraph.schedule import Times, build, check, lower, simulate
from pipegraph.schedule.branches import branch_schedules, have_branches, stages_to_end
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.stages import Edge, chain

TOWERS = ((0, 1), (1, 4), (2, 3), (3, 4))
ONES = Times((1.0,) * 5, (1.0,) * 5, (1.0,) * 5)


def test_a_stage_counts_the_stages_to_the_end() -> None:
    assert stages_to_end(5, TOWERS) == [3, 2, 3, 2, 1]
    assert stages_to_end(4, chain(4)) == [4, 3, 2, 1]
    assert stages_to_end(3, ()) == [1, 1, 1]
    assert have_branches(5, TOWERS)
    assert not have_branches(4, (*chain(4), (0, 3)))


def test_the_orders_of_two_branches() -> None:
    whole, divided = branch_schedules(ONES, 4, TOWERS, TOWERS)
    assert str(whole).splitlines()[1:] == [
        "rank 0  0F0 0F1 0F2         0B0 0F3 0B1     0B2     0B3",
        "rank 1      1F0 1F1     1B0 1F2 1B1 1F3 1B2     1B3",
        "rank 2  2F0 2F1 2F2         2B0 2F3 2B1     2B2     2B3",
        "rank 3      3F0 3F1     3B0 3F2 3B1 3F3 3B2     3B3",
        "rank 4          4F0 4B0 4F1 4B1 4F2 4B2 4F3 4B3",
    ]
    assert str(divided).splitlines()[1:] == [
        "rank 0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1     0I2 0W2     0I3 0W3",
        "rank 1      1F0 1F1     1I0 1W0 1F2 1I1 1W1 1F3 1I2 1W2     1I3 1W3",
        "rank 2  2F0 2F1 2F2         2I0 2W0 2F3 2I1 2W1     2I2 2W2     2I3 2W3",
        "rank 3      3F0 3F1     3I0 3W0 3F2 3I1 3W1 3F3 3I2 3W2     3I3 3W3",
        "rank 4          4F0 4I0 4W0 4F1 4I1 4W1 4F2 4I2 4W2 4F3 4I3 4W3",
    ]
    assert peak_activations(whole) == peak_activations(divided) == (3, 2, 3, 2, 1)
    assert peak_activations(build("1f1b", 5, 4)) == (4, 4, 3, 2, 1)
    times = [simulate(schedule, ONES).makespan for schedule in (build("1f1b", 5, 4), whole, divided)]
    assert times == [24, 18, 16]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[int, tuple[Edge, ...], Times, int]:
    stages = draw(st.integers(2, 7))
    edges = {(draw(st.integers(0, consumer - 1)), consumer) for consumer in range(1, stages) if draw(st.booleans())}
    edges |= {(producer, draw(st.integers(producer + 1, stages - 1))) for producer in range(stages - 1)}
    figures = st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages).map(tuple)
    hop = draw(st.integers(0, 3).map(float))
    times = Times(draw(figures), draw(figures), draw(figures), hop=(hop,) * (stages - 1))
    return stages, tuple(sorted(edges)), times, draw(st.integers(1, 9))


@given(graphs())
def test_the_orders_of_any_graph_run_and_hold_no_more_than_there_are_stages_to_the_end(
    graph: tuple[int, tuple[Edge, ...], Times, int],
) -> None:
    stages, edges, times, microbatches = graph
    limits = [min(count, microbatches) for count in stages_to_end(stages, edges)]
    whole, divided = branch_schedules(times, microbatches, edges, edges)
    for schedule in (whole, divided):
        check(schedule)
        check(lower(schedule))
        assert all(peak <= limit for peak, limit in zip(peak_activations(schedule), limits, strict=True))
    equal = Times((1.0,) * stages, (1.0,) * stages, (1.0,) * stages)
    assert simulate(whole, equal).makespan <= simulate(build("1f1b", stages, microbatches), equal).makespan
