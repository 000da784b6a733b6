"""Transfers: where they stand, and that no order of them can deadlock."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, build, check, from_csv, lower, to_csv
from tests.messages import refused
from tests.schedule.strategies import schedules


def test_grid_of_1f1b() -> None:
    assert str(lower(build("1f1b", 2, 2))) == (
        "1f1b: 2 ranks, 2 stages, 2 microbatches\n"
        "rank 0  0F0 0SEND_F0 0F1 0SEND_F1     0RECV_B0 0B0     0RECV_B1 0B1\n"
        "rank 1      1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    )


def test_a_rank_passes_on_what_it_made_before_it_receives_the_next() -> None:
    assert to_csv(lower(build("forward", 3, 2))) == (
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1\n2RECV_F0,2F0,2RECV_F1,2F1\n"
    )


def test_a_skip_goes_straight_to_its_consumer_and_its_gradient_straight_back() -> None:
    schedule = lower(build("gpipe", 3, 1), edges=[(0, 1), (1, 2), (0, 2)])
    assert to_csv(schedule) == (
        "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0<2,0RECV_B0,0B0\n"
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0\n"
        "2RECV_F0<0,2RECV_F0,2F0,2B0,2SEND_B0>0,2SEND_B0\n"
    )


def test_gradients_come_back_over_gradient_edges_only() -> None:
    schedule = lower(build("gpipe", 3, 1), edges=[(0, 1), (1, 2), (0, 2)], gradient_edges=[(1, 2)])
    assert to_csv(schedule) == (
        "0F0,0SEND_F0,0SEND_F0>2,0B0\n1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0\n2RECV_F0<0,2RECV_F0,2F0,2B0,2SEND_B0\n"
    )
    check(schedule)


def test_edges_between_strangers_only() -> None:
    schedule = lower(build("forward", 4, 1), edges=[(0, 3)])
    assert to_csv(schedule) == "0F0,0SEND_F0>3\n1F0\n2F0\n3RECV_F0<0,3F0\n"
    check(schedule)


def test_no_transfer_between_stages_on_one_rank() -> None:
    v = from_csv("0F0,3F0,3I0,3W0,0I0,0W0\n1F0,2F0,2B0,1B0\n")
    lowered = lower(v, edges=[(0, 1), (1, 2), (2, 3), (0, 3)])
    assert to_csv(lowered) == (
        "0F0,0SEND_F0,3RECV_F0,3F0,3I0,3SEND_B0,3W0,0RECV_B0,0I0,0W0\n"
        "1RECV_F0,1F0,2F0,2SEND_F0,2RECV_B0,2B0,1B0,1SEND_B0\n"
    )
    assert lower(build("1f1b", 1, 3)).actions == build("1f1b", 1, 3).actions


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, list[tuple[int, int]], list[tuple[int, int]]]:
    """A schedule, any edges that lead to later stages, and those of them that carry gradients."""
    schedule = draw(schedules(lowered=False))
    pairs = list(combinations(range(schedule.stages), 2))
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    gradient_edges = draw(st.lists(st.sampled_from(edges), unique=True)) if edges else []
    return schedule, edges, gradient_edges


@given(pipelines())
def test_every_lowered_schedule_passes_the_check(
    pipeline: tuple[Schedule, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    schedule, edges, gradient_edges = pipeline
    lowered = lower(schedule, edges, gradient_edges)
    check(lowered)
    compute = tuple(tuple(action for action in row if action.peer is None) for row in lowered.actions)
    assert compute == schedule.actions
    transfers = [action for row in lowered.actions for action in row if action.peer is not None]
    crosses = schedule.dependencies.crosses
    carrying = [*filter(crosses, edges), *(filter(crosses, gradient_edges) if schedule.trains else ())]
    assert len(transfers) == len(set(transfers)) == 2 * schedule.microbatches * len(carrying)


@given(pipelines())
def test_every_two_ranks_transfer_in_the_same_order(
    pipeline: tuple[Schedule, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    lowered = lower(*pipeline)
    orders: dict[tuple[int, int], list[Action]] = {}  # (rank, the rank at the other end) → SENDs, or RECVs' partners
    for rank, row in enumerate(lowered.actions):
        for action in row:
            if action.peer is not None:
                send = action if action.sends else action.partner
                orders.setdefault((rank, lowered.placement[action.peer]), []).append(send)
    for (rank, peer), order in orders.items():
        assert order == orders[peer, rank]


@given(pipelines())
def test_no_transfer_comes_between_the_actions_of_an_overlapped_pair(
    pipeline: tuple[Schedule, list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    schedule, *_ = pipeline
    lowered = lower(*pipeline)
    assert lowered.overlapped == schedule.overlapped == from_csv(to_csv(lowered)).overlapped


def test_an_overlapped_pair_is_sent_from_when_both_are_done() -> None:
    alone = from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    pair = from_csv("0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    assert to_csv(lower(alone)).splitlines()[0] == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2"
    )
    assert to_csv(lower(pair)).splitlines()[0] == (
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,(0F2;0B0)OVERLAP_F_B,0SEND_F2,0RECV_B1,0B1,0RECV_B2,0B2"
    )


def test_the_edges_stay_with_the_schedule() -> None:
    schedule = build("gpipe", 3, 2)
    assert lower(schedule).edges is None
    lowered = lower(schedule, edges=iter([(1, 2), (0, 2), (1, 2)]), gradient_edges=[(0, 2)])
    assert (lowered.edges, lowered.gradient_edges) == (((0, 2), (1, 2)), ((0, 2),))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"edges": [(1, 0)]}, ["(1, 0)", "stages 0 to 2"]),
        ({"edges": [(0, 3)]}, ["(0, 3)", "stages 0 to 2"]),
        ({"edges": [(0, 1)], "gradient_edges": [(1, 2)]}, ["gradient", "over (1, 2)"]),
        ({"gradient_edges": [(0, 2)]}, ["gradient", "over (0, 2)"]),
    ],
)
def test_edges_that_do_not_fit(arguments: dict, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        lower(build("gpipe", 3, 1), **arguments)


def test_only_a_sound_schedule_without_transfers_is_lowered() -> None:
    with refused(ScheduleError, "gpipe", "transfers", "without_transfers"):
        lower(lower(build("gpipe", 2, 1)))
    with refused(ScheduleError, "rank 0", "0B0", "0F0", advice="move 0B0 after 0F0"):
        lower(Schedule("wrong", (0,), 1, ((Action(0, Kind.B, 0), Action(0, Kind.F, 0)),)))
