"""Planted faults: each is found, named, and marked in the grid."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, build, check, from_csv, lower, peak_activations
from tests.messages import refused
from tests.schedule.strategies import schedules
from tests.torch_version import TORCH

Rows = list[list[Action]]


def changed(schedule: Schedule, change: Callable[[Rows], object]) -> Schedule:
    rows = [list(row) for row in schedule.actions]
    change(rows)
    return replace(schedule, actions=rows)  # type: ignore[arg-type]


def marked(schedule: Schedule, forward: str, backward: str) -> Schedule:
    return replace(schedule, overlapped=frozenset({(Action.parse(forward), Action.parse(backward))}))


def two_ranks(first: str, second: str) -> Schedule:
    """Two microbatches through stage 0 on rank 0 and stage 1 on rank 1, in the orders given."""
    return Schedule("two", (0, 1), 2, tuple(tuple(map(Action.parse, order.split())) for order in (first, second)))


def test_a_whole_message() -> None:
    with pytest.raises(ScheduleError) as caught:
        check(changed(build("1f1b", 3, 3), lambda rows: rows[1].insert(4, Action.parse("1F1"))))
    assert str(caught.value) == (
        "1f1b: 1F1 cannot be on rank 1: it is there already.\n"
        "rank 0  0F0 0F1 0F2         0B0         0B1\n"
        "rank 1      1F0 1F1     1B0 1F2 1F1 <-- ERROR HERE\n"
        "rank 2          2F0 2B0 2F1 2B1 2F2 2B2\n"
        "Try: remove one of the two."
    )


SOUND = "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"
SENT = "0F0 0SEND_F0 0F1 0SEND_F1", "1RECV_F0 1F0 1RECV_F1 1F1"


def test_what_the_faults_are_planted_in_is_sound() -> None:
    check(two_ranks(*SOUND))
    check(two_ranks(*SENT))
    assert two_ranks(*SOUND).actions == build("1f1b", 2, 2).actions
    assert two_ranks(*SENT).actions == lower(build("forward", 2, 2)).actions


@pytest.mark.parametrize(
    ("first", "second", "parts", "marked"),
    [
        ("0F0 0F1 0B0 0B1 0F0", SOUND[1], ["0F0 cannot be on rank 0", "already"], "0B1 0F0"),
        ("0F0 0B0 0B1", SOUND[1], ["0F1 is missing on rank 0", "stage 0"], "0B1"),
        (SOUND[0], "1F0 1B0 1F1", ["1B1 is missing on rank 1", "stage 1"], "1F1"),
        ("", SOUND[1], ["0F0 is missing on rank 0", "stage 0"], "rank 0"),
        (SOUND[0], "1B0 1F0 1F1 1B1", ["rank 1", "1B0 comes before 1F0"], "1B0"),
        ("0F0 0F1 0B0 0B1 1B1", "1F0 1B0 1F1", ["1B1 cannot be on rank 0", "stage 1", "rank 1"], "1B1"),
        ("0F0 0F1 0B0 0B1 2F0", SOUND[1], ["2F0 cannot be on rank 0", "stages 0 to 1"], "2F0"),
        ("0F0 0F1 0B0 0B1 0F2", SOUND[1], ["0F2 cannot be on rank 0", "microbatches 0 to 1"], "0F2"),
        (SOUND[0], "1F0 1B0 1W0 1F1 1B1", ["1B0 and 1W0", "rank 1"], "1W0"),
        (SOUND[0], "1F0 1I0 1F1 1B1", ["1W0 is missing on rank 1", "stage 1"], "1B1"),
        (SOUND[0], "1F0 1W0 1F1 1B1", ["1I0 is missing on rank 1", "stage 1"], "1B1"),
        (SOUND[0], "1F0 1W0 1I0 1F1 1B1", ["rank 1", "1W0 comes before 1I0"], "1W0"),
        ("0F0 0F1", "1F0 1F1 1B0", ["0B0 is missing on rank 0", "stage 0"], "0F1"),
        ("0SEND_F0 0F0 0F1 0SEND_F1", SENT[1], ["rank 0", "0SEND_F0 comes before 0F0"], "0SEND_F0"),
        (SENT[0], "1F0 1RECV_F0 1RECV_F1 1F1", ["rank 1", "1F0 comes before 1RECV_F0"], "1F0"),
        ("0F0 0SEND_F0 0F1", SENT[1], ["0SEND_F1 is missing on rank 0", "1RECV_F1 is on rank 1"], "0F1"),
        (SENT[0], "1RECV_F0 1F0 1F1", ["1RECV_F1 is missing on rank 1", "0SEND_F1 is on rank 0"], "1F1"),
        ("0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1F1", ["0SEND_F1 is missing on rank 0", "1RECV_F1 on rank 1"], "0F1"),
        (f"{SENT[0]} 0SEND_F1", SENT[1], ["0SEND_F1 cannot be on rank 0", "already"], "0SEND_F1"),
        (f"{SENT[0]} 1RECV_F1", SENT[1], ["1RECV_F1 cannot be on rank 0", "stage 1", "rank 1"], "1RECV_F1"),
        (f"{SENT[0]} 0SEND_F1>5", SENT[1], ["0SEND_F1>5 cannot be on rank 0", "stages 0 to 1"], ">5"),
        (f"{SENT[0]} 0RECV_B0", SENT[1], ["0RECV_B0 cannot be on rank 0", "no backward"], "0RECV_B0"),
    ],
)
def test_planted_faults(first: str, second: str, parts: list[str], marked: str) -> None:
    with refused(ScheduleError, "two: ", *parts) as caught:
        check(two_ranks(first, second))
    grid = caught.value.problem.splitlines()[1:]
    assert [line.endswith(f"{marked} <-- ERROR HERE") for line in grid if "<--" in line] == [True]


def test_orders_that_must_be_rejected() -> None:
    with pytest.raises(ScheduleError):
        check(from_csv("0SEND_F1,2RECV_F0\n1SEND_F0,1RECV_F1\n"))
    rows = "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2RECV_F1,2F1\n1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1\n"
    parts = "at 0SEND_F1 and waits for 1RECV_F1 of rank 1", "at 1SEND_F0 and waits for 2RECV_F0 of rank 0"
    with refused(ScheduleError, *parts, advice="lower()") as caught:
        check(from_csv(rows))
    assert caught.value.problem.splitlines()[1:] == [
        "rank 0  0F0 0SEND_F0 0F1 0SEND_F1 <-- ERROR HERE",
        "rank 1      1RECV_F0 1F0 1SEND_F0 <-- ERROR HERE",
    ]


def test_crossed_transfers() -> None:
    crossed = from_csv("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F1,1RECV_F0,1F0,1F1\n")
    with refused(ScheduleError, "0SEND_F0 and waits for 1RECV_F0 of rank 1", "rank 1 is at 1RECV_F1", advice="order"):
        check(crossed)
    check(from_csv("0F0,0F1,0SEND_F1,0SEND_F0\n1RECV_F1,1RECV_F0,1F0,1F1\n"))


def test_ranks_that_wait_in_a_circle_without_transfers() -> None:
    circle = from_csv("0F0,2F0,0F1,2F1\n1F1,1F0\n")
    with refused(ScheduleError, "rank 0 is at 2F0 and waits for 1F0", "rank 1 is at 1F1 and waits for 0F1") as caught:
        check(circle)
    assert caught.value.problem.count("<-- ERROR HERE") == 2


@pytest.mark.skipif(TORCH < (2, 13), reason="torch defers no order yet")
def test_orders_that_torch_defers_into_a_deadlock() -> None:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = get_schedule_ops("Interleaved1F1B", 4, 8, with_comms=True, defer_pp_recv=True)
    with refused(ScheduleError, "deadlocks"):
        check(from_csv("\n".join(",".join(map(str, row)) for row in rows)))


def test_transfers_that_no_edge_asks_for() -> None:
    forward = build("forward", 3, 1)
    skipping = lower(forward, edges=[(0, 1), (1, 2), (0, 2)])
    chained = replace(skipping, edges=((0, 1), (1, 2)), gradient_edges=())
    with refused(ScheduleError, "no value", "from stage 0 to stage 2"):
        check(chained)
    both_ways = lower(build("gpipe", 2, 1))
    without = replace(both_ways, edges=((0, 1),), gradient_edges=())
    with refused(ScheduleError, "no gradient", "from stage 1 to stage 0"):
        check(without)
    at_home = from_csv("0F0,0SEND_F0,1RECV_F0,1F0\n")
    with refused(ScheduleError, "stages 0 and 1", "the same rank"):
        check(at_home)


def test_a_schedule_lowered_over_one_edge_only_is_missing_the_others() -> None:
    with refused(ScheduleError, "1SEND_F0 is missing on rank 1", "2RECV_F0 on rank 2"):
        check(from_csv("0F0,0SEND_F0\n1RECV_F0,1F0\n2F0\n"))
    with refused(ScheduleError, "1SEND_B0 is missing on rank 1", "0RECV_B0"):
        check(from_csv("0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0\n"))


def test_memory_limit() -> None:
    schedule = build("1f1b", 4, 6)
    check(schedule, memory_limit=4)
    with refused(ScheduleError, "0F3", "rank 0", "4 activations", advice="the limit of 3") as caught:
        check(schedule, memory_limit=3)
    assert caught.value.problem.splitlines()[1:] == [
        "rank 0  0F0 0F1 0F2 0F3 <-- ERROR HERE",
        "rank 1      1F0 1F1 1F2",
        "rank 2          2F0 2F1     2B0",
        "rank 3              3F0 3B0 3F1",
    ]
    check(lower(schedule), memory_limit=4)
    check(build("forward", 2, 9), memory_limit=0)  # without a backward nothing is saved


def test_activations_are_held_until_w() -> None:
    late = from_csv("0F0,0I0,0F1,0I1,0W0,0W1\n")
    assert peak_activations(late) == (2,)
    with refused(ScheduleError, "0F1", "rank 0", "2 activations"):
        check(late, memory_limit=1)
    check(from_csv("0F0,0I0,0W0,0F1,0I1,0W1\n"), memory_limit=1)


def test_overlapped_pairs_stand_on_one_rank_in_order() -> None:
    check(marked(build("1f1b", 2, 3), "0F2", "0B1"))
    check(marked(build("gpipe", 2, 2), "0F0", "0B1"))  # which do not stand together
    for pair in [("0F1", "1B0"), ("7F0", "0B0"), ("7F0", "7B0")]:
        with refused(ScheduleError, f"{pair[0]} and {pair[1]} cannot overlap"):
            check(marked(build("gpipe", 2, 2), *pair))
    with refused(ScheduleError, "0F0 and 0B0 cannot overlap", "0B0 needs"):
        check(marked(build("gpipe", 2, 2), "0F0", "0B0"))


def test_an_overlapped_pair_begins_when_both_can() -> None:
    """In this order 0B0 comes after 1F1, which needs 0F1."""
    parts = "at (0F1;0B0)OVERLAP_F_B and waits for 1B0 of rank 1", "at 1F1 and waits for 0F1 of rank 0"
    with refused(ScheduleError, *parts, advice="unmark the pair") as caught:
        check(marked(build("gpipe", 2, 2), "0F1", "0B0"))
    assert caught.value.problem.splitlines()[1:] == [
        "rank 0  0F0     0F1 <-- ERROR HERE",
        "rank 1      1F0 1F1 <-- ERROR HERE",
    ]


def test_a_large_grid_is_cut_down_to_the_place() -> None:
    wrong = changed(build("1f1b", 64, 128), lambda rows: rows[40].insert(60, rows[40][59]))
    with pytest.raises(ScheduleError) as caught:
        check(wrong)
    lines = str(caught.value).splitlines()
    assert [line.split("  ")[0] for line in lines[1:-1]] == ["rank 38", "rank 39", "rank 40", "rank 41", "rank 42"]
    assert max(map(len, lines)) < 120


def test_huge_numbers_end_soon() -> None:
    with refused(ScheduleError, "0F0 is missing"):
        check(from_csv("0F999999999\n"))
    with refused(ScheduleError, "1F0 is missing"):
        check(Schedule("n", (0,) * 9999, 10**30, ((Action(0, Kind.F, 0),),)))
    with refused(ScheduleError, "0 to 999999999", "1000000000"):
        Action(0, Kind.F, 10**9)


@pytest.mark.parametrize("nonsense", [None, "1f1b", [[Action(0, Kind.F, 0)]]])
def test_what_is_no_schedule(nonsense: object) -> None:
    with refused(ScheduleError, "check()", "Schedule", advice="from_csv(text)"):
        check(nonsense)  # type: ignore[arg-type]


def test_a_limit_that_is_no_number() -> None:
    for limit in ("3GiB", float("nan")):
        with refused(ScheduleError, "number of activations", "memory_limit=4", f"not {limit!r}"):
            check(build("gpipe", 2, 2), memory_limit=limit)  # type: ignore[arg-type]


actions = st.builds(Action, st.integers(0, 3), st.sampled_from([Kind.F, Kind.B, Kind.I, Kind.W]), st.integers(0, 3))
transfers = st.sampled_from(["0SEND_F0", "1RECV_F0", "0SEND_F1>2", "2RECV_F1<0", "2SEND_B0", "1RECV_B0", "0RECV_B1<9"])


@settings(max_examples=300)
@given(
    schedules(ranks=4, microbatches=4),
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99), actions | transfers.map(Action.parse) | st.none())),
    st.none() | st.integers(0, 3),
)
def test_damage_raises_nothing_but_schedule_errors_with_the_place(
    schedule: Schedule, damage: list[tuple[int, int, Action | None]], memory_limit: int | None
) -> None:
    rows = [list(row) for row in schedule.actions]
    for rank, at, action in damage:
        row = rows[rank % len(rows)]
        if action is not None:
            row.insert(at % (len(row) + 1), action)
        elif row:
            row.insert(at % len(row), row.pop())
    damaged = replace(schedule, actions=rows)  # type: ignore[arg-type]
    assert str(damaged)
    places, marked_ranks = {}, []
    try:
        check(damaged, memory_limit)
    except ScheduleError as error:
        places, grid = error.places, str(error).splitlines()[1:-1]
        marked_ranks = [rank for rank, line in enumerate(grid) if line.endswith("<-- ERROR HERE")]
    assert marked_ranks == sorted(places)
