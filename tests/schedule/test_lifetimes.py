"""How long things are needed, and how many received messages are held at one time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.schedule import Schedule, What, build, from_csv, lifetimes, lower, peak_activations, receive_buffers
from tests.schedule.strategies import schedules


def lifetime_texts(schedule: Schedule) -> list[list[str]]:
    """Of each rank, each thing that it holds: what, whose, and from which action to which."""
    return [
        [f"{span.what} {span.stages[0]}-{span.stages[1]}: {row[span.made]} to {row[span.last_read]}" for span in rank]
        for rank, row in zip(lifetimes(schedule), schedule.actions, strict=True)
    ]


def test_between_ranks_values_last_until_they_are_sent_and_used() -> None:
    assert lifetime_texts(lower(build("1f1b", 2, 1))) == [
        ["values 0-1: 0F0 to 0SEND_F0", "gradients 1-0: 0RECV_B0 to 0B0", "saved 0-0: 0F0 to 0B0"],
        ["values 0-1: 1RECV_F0 to 1F0", "saved 1-1: 1F0 to 1B0", "gradients 1-0: 1B0 to 1SEND_B0"],
    ]


def test_on_one_rank_they_last_from_stage_to_stage_and_what_is_saved_until_w() -> None:
    assert lifetime_texts(from_csv("0F0,1F0,1I0,0I0,1W0,0W0\n")) == [
        [
            "values 0-1: 0F0 to 1F0",
            "gradients 1-0: 1I0 to 0I0",
            "saved 1-1: 1F0 to 1W0",
            "saved 0-0: 0F0 to 0W0",
        ]
    ]


def test_each_consumer_has_its_own() -> None:
    first, *_ = lifetime_texts(lower(build("forward", 3, 1), edges=[(0, 1), (1, 2), (0, 2)]))
    assert first == ["values 0-1: 0F0 to 0SEND_F0", "values 0-2: 0F0 to 0SEND_F0>2"]


def test_without_transfers_only_what_stays_is_told() -> None:
    assert lifetime_texts(build("1f1b", 2, 1)) == [["saved 0-0: 0F0 to 0B0"], ["saved 1-1: 1F0 to 1B0"]]


@given(schedules(lowered=True))
def test_everything_is_made_and_read_once_and_what_is_saved_is_the_memory(schedule: Schedule) -> None:
    for rank, row in enumerate(lifetimes(schedule)):
        assert [span.last_read for span in row] == sorted(span.last_read for span in row)
        assert all(span.made < span.last_read for span in row)
        saved = [span for span in row if span.what is What.SAVED]
        alive = [sum(span.made <= at <= span.last_read for span in saved) for at in range(len(schedule.actions[rank]))]
        assert max(alive) == peak_activations(schedule)[rank]
    every = [span.what for row in lifetimes(schedule) for span in row]
    crossing = sum(map(schedule.dependencies.crosses, schedule.dependencies.edges))
    parts = schedule.stages - 1 + crossing  # an edge between ranks has one at each end
    assert every.count(What.VALUES) == schedule.microbatches * parts
    assert every.count(What.GRADIENTS) == schedule.microbatches * parts * schedule.trains
    assert every.count(What.SAVED) == schedule.microbatches * schedule.stages * schedule.trains


@pytest.mark.parametrize(
    ("name", "saved", "read"),
    [
        ("1f1b", {(0, 1): 4, (1, 0): 1, (1, 2): 3, (2, 1): 1, (2, 3): 2, (3, 2): 1}, 2),
        ("gpipe", {(0, 1): 9, (1, 0): 1, (1, 2): 9, (2, 1): 1, (2, 3): 9, (3, 2): 1}, 1),
    ],
)
def test_received_messages_at_one_time(name: str, saved: dict[tuple[int, int], int], read: int) -> None:
    """Under 1F1B a rank holds p − r activations; the values for the next arrive while it does a backward."""
    schedule = lower(build(name, 4, 9))
    assert receive_buffers(schedule) == saved
    assert max(receive_buffers(schedule, saved=False).values()) <= read


def test_receives_posted_ahead_need_buffers_too() -> None:
    schedule = lower(build("forward", 2, 9))
    assert [receive_buffers(schedule, ahead) for ahead in range(4)] == [{(0, 1): 1 + ahead} for ahead in range(4)]
    assert receive_buffers(schedule, ahead=99) == {(0, 1): 9}


@given(schedules(lowered=True), st.integers(0, 4))
def test_there_are_never_more_messages_than_microbatches(schedule: Schedule, ahead: int) -> None:
    crossing = [*filter(schedule.dependencies.crosses, schedule.dependencies.edges)]
    back = [(consumer, producer) for producer, consumer in crossing] if schedule.trains else []
    buffers = receive_buffers(schedule, ahead)
    assert sorted(buffers) == sorted([*crossing, *back])
    assert all(1 <= most <= schedule.microbatches for most in buffers.values())
    read = receive_buffers(schedule, ahead, saved=False)
    assert all(read[edge] <= most for edge, most in buffers.items())


def test_a_lifetime_reads_well() -> None:
    (lifetime,), _ = lifetimes(lower(build("forward", 2, 1)))
    assert lifetime == (What.VALUES, (0, 1), 0, 0, 1)
