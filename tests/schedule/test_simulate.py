"""Simulated time: the events, what they wait for, and both measures."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import (
    Action,
    Kind,
    Schedule,
    Times,
    build,
    from_csv,
    lower,
    lower_bound,
    names,
    peak_activations,
    simulate,
)
from pipegraph.schedule.recipes import trains
from pipegraph.schedule.replay import UNIT as SLOTS
from pipegraph.schedule.replay import replay
from tests.messages import refused
from tests.schedule.strategies import schedules

UNIT = Times.equal(2)


def rows(schedule: Schedule, times: Times) -> list[str]:
    """Every rank's events as ``action start–end``."""
    events = simulate(schedule, times).events
    return [" ".join(f"{event.action} {event.start:g}–{event.end:g}" for event in row) for row in events]


def test_a_full_backward_lasts_as_long_as_both_its_parts() -> None:
    assert rows(build("1f1b", 2, 2), Times((1, 2), (3, 4), (5, 6))) == [
        "0F0 0–1 0F1 1–2 0B0 13–21 0B1 25–33",
        "1F0 1–3 1B0 3–13 1F1 13–15 1B1 15–25",
    ]


def test_an_input_gradient_leaves_before_the_weight_gradient_runs() -> None:
    divided = from_csv("0F0,0I0,0W0\n1F0,1I0,1W0\n")
    assert rows(divided, Times((1, 1), (2, 2), (4, 4), hop=0.5)) == [
        "0F0 0–1 0I0 5–7 0W0 7–11",
        "1F0 1.5–2.5 1I0 2.5–4.5 1W0 4.5–8.5",
    ]


def test_a_hop_is_of_a_boundary_between_ranks_only() -> None:
    v = from_csv("0F0,3F0\n1F0,2F0\n")
    assert rows(v, Times.equal(4, hop=(0.5, 9.0, 0.25))) == ["0F0 0–1 3F0 3.75–4.75", "1F0 1.5–2.5 2F0 2.5–3.5"]


def test_transfers_over_one_link_wait_for_each_other_and_hops_do_not() -> None:
    forward = build("forward", 2, 3)
    assert rows(forward, Times.equal(2, hop=5.0))[1] == "1F0 6–7 1F1 7–8 1F2 8–9"
    assert rows(forward, Times.equal(2, transfer=2.0, hop=5.0))[1] == "1F0 8–9 1F1 10–11 1F2 12–13"


def test_each_direction_is_a_link_of_its_own() -> None:
    schedule = from_csv("0F0,3F0,0F1,3F1\n1F0,2F0,1F1,2F1\n")
    assert rows(schedule, Times.equal(4, transfer=1.0))[0] == "0F0 0–1 3F0 5–6 0F1 6–7 3F1 11–12"


def test_skip_edges_go_straight() -> None:
    lowered = lower(build("gpipe", 3, 1), edges=[(0, 1), (0, 2), (1, 2)])
    times = Times.equal(3, hop={(0, 1): 1.0, (1, 2): 1.0, (0, 2): 7.0})
    assert rows(lowered, times)[2] == "2F0 8–9 2B0 9–11"  # the skip, 1 + 7, arrives after 1F0, 2 + 1 + 1
    assert rows(lowered, Times.equal(3, hop=(1.0, 4.0)))[2] == "2F0 7–8 2B0 8–10"  # it takes the longer of 1 and 4


def test_a_send_leaves_when_its_rank_arrives_there() -> None:
    late = from_csv("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n")
    assert rows(late, UNIT)[1] == "1F0 2–3 1F1 3–4"


def test_an_overlapped_pair_is_one_block() -> None:
    apart = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    pair = from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n")
    assert rows(apart, UNIT) == ["0F0 0–1 0F1 1–2 0B0 4–6 0B1 7–9", "1F0 1–2 1B0 2–4 1F1 4–5 1B1 5–7"]
    assert rows(pair, UNIT) == ["0F0 0–1 0F1 4–5 0B0 5–7 0B1 10–12", "1F0 1–2 1B0 2–4 1F1 7–8 1B1 8–10"]


def test_both_measures() -> None:
    timeline = simulate(build("zb-h2", 4, 8), Times.equal(4))
    assert (timeline.makespan, timeline.span, timeline.busy) == (27, 24, (24,) * 4)
    assert (timeline.bubble, timeline.span_bubble) == (1 - 24 / 27, 0)
    assert timeline.peak_activations == peak_activations(build("zb-h2", 4, 8)) == (7, 7, 7, 7)
    assert repr(timeline) == "Timeline(makespan 27, bubble 11.1 %, 96 actions on 4 ranks, at most 7 saved activations)"


def test_the_bubble_is_the_mean_over_ranks() -> None:
    timeline = simulate(build("gpipe", 2, 2), Times((1, 3), (1, 3), (1, 3)))
    assert timeline.busy == (6, 18) and timeline.makespan == 21 and timeline.bubble == 1 - 12 / 21


def test_critical_path() -> None:
    timeline = simulate(build("1f1b", 3, 2), Times((1, 1, 4), (1, 1, 4), (1, 1, 4), hop=0.5))
    assert [str(event.action) for event in timeline.critical_path] == (
        ["0F0", "1F0", "2F0", "2B0", "2F1", "2B1", "1B1", "0B1"]
    )
    assert timeline.describe_critical_path() == (
        "0F0 → 2F0 → 2B1 → 0B1: rank 2 75 %, rank 0 9 %, rank 1 9 %, transfers 6 %"
    )


def test_a_long_critical_path_is_cut_down() -> None:
    text = simulate(build("1f1b", 8, 64), Times.equal(8, hop=0.1)).describe_critical_path()
    assert "…" in text and len(text) < 200


def test_a_critical_path_names_the_ranks_with_most_of_it() -> None:
    text = simulate(build("1f1b", 64, 64), Times.equal(64, hop=0.1)).describe_critical_path()
    shares = text.partition(": ")[2].split(", ")
    assert len(shares) == 7
    assert shares[-1].partition(" others ")[0].isdecimal()
    assert sum(int(share.split()[-2]) for share in shares) in range(95, 106)


def test_nothing_takes_time() -> None:
    timeline = simulate(build("1f1b", 2, 2), Times.equal(2, 0, 0, 0))
    assert timeline.makespan == timeline.bubble == timeline.span_bubble == 0
    assert timeline.describe_critical_path() == "0F0 → 0B1"


def test_orders_that_cannot_run() -> None:
    with refused(
        ScheduleError, "at 2F0 and waits for 1F0 of rank 1", "at 1F1 and waits for 0F1 of rank 0", advice="order"
    ):
        simulate(from_csv("0F0,2F0,0F1,2F1\n1F1,1F0\n"), Times.equal(3))
    with refused(ScheduleError, "rank 0", "0W0", "0I0", advice="move 0W0 after 0I0"):
        simulate(from_csv("0F0,0W0,0I0\n"), Times.equal(1))
    with refused(ScheduleError, "rank 0", "0SEND_F0", "0F0", advice="move 0SEND_F0 after 0F0"):
        simulate(from_csv("0SEND_F0,0F0\n1RECV_F0,1F0\n"), UNIT)


@pytest.mark.parametrize(
    ("first", "second", "parts", "advice"),
    [
        ("0F0", "1F7", ["1F7 cannot be on rank 1", "microbatches 0 to 1"], "one of those"),
        ("0F0", "9F0", ["9F0 cannot be on rank 1", "stages 0 to 1"], "more stages"),
        ("1F0", "0F0", ["1F0 cannot be on rank 0", "stage 1", "rank 1"], "move 1F0 to rank 1"),
        ("0F0 0F1 0F0", "1F0 1F1", ["0F0 cannot be on rank 0", "already"], "remove one"),
        ("0F0 0F1", "1F0", ["1F1 is missing on rank 1"], "add 1F1 to rank 1"),
    ],
)
def test_actions_that_are_wrong_whatever_their_order(first: str, second: str, parts: list[str], advice: str) -> None:
    actions = tuple(tuple(map(Action.parse, order.split())) for order in (first, second))
    with refused(ScheduleError, *parts, advice=advice):
        simulate(Schedule("wrong", (0, 1), 2, actions), UNIT)


@given(schedules(lowered=False))
def test_without_transfers_the_check_runs_a_schedule_as_simulate_does(schedule: Schedule) -> None:
    starts = replay(schedule.arrays, {**SLOTS, Kind.B: 2}).tolist()
    events = simulate(schedule, Times.equal(schedule.stages)).events
    assert starts == [event.start for row in events for event in row]


def test_arguments_that_do_not_fit() -> None:
    with refused(ScheduleError, "gpipe", "2 stages", "for 3", advice="2 numbers"):
        simulate(build("gpipe", 2, 2), Times.equal(3))
    with refused(ScheduleError, "simulate()", "Times", "1.0", advice="Times.equal(stages)"):
        simulate(build("gpipe", 2, 2), 1.0)  # type: ignore[arg-type]
    with refused(ScheduleError, "hop", "edge (1, 2)"):
        simulate(build("gpipe", 3, 2), Times.equal(3, hop={(0, 1): 1.0}))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (((), (), ()), ["1 stage or more"]),
        (((1, 2), (1,), (1, 2)), ["forward has 2", "input_grad has 1"]),
        (((1, 2), (1, 2), (1, -2)), ["weight_grad", "not -2"]),
        (((1, float("nan")), (1, 2), (1, 2)), ["forward", "not nan"]),
        (((1, True), (1, 2), (1, 2)), ["forward", "not True"]),
        (((1, 10**400), (1, 2), (1, 2)), ["forward", "not 1000"]),
        ((1.0, (1,), (1,)), ["forward", "per stage", "not 1.0"]),
        (("12", (1, 1), (1, 1)), ["forward", "per stage", "not '12'"]),
        (((1, 2), (1, 2), (1, 2), (0.1, 0.2)), ["hop", "2 stages have 1", "2 were given"]),
        (((1, 2), (1, 2), (1, 2), "x"), ["hop", "not 'x'"]),
        (((1, 2), (1, 2), (1, 2), 0.0, -1), ["transfer", "not -1"]),
        (((1, 2), (1, 2), (1, 2), {"0": 1.0}), ["hop", "(0, 1)", "not '0'"]),
    ],
)
def test_times_that_are_none(arguments: tuple, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        Times(*arguments)


def test_times_in_json() -> None:
    text = '{"forward": [1, 2], "input_grad": [1.5, 2], "weight_grad": [1, 1], "hop": [0.25]}'
    assert Times.from_json(text) == Times((1, 2), (1.5, 2), (1, 1), hop=(0.25,))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ["no JSON", "line 1 column 2"]),
        ("[" * 5000 + "]" * 5000, ["nested too deeply"]),
        ("[1, 2]", ["an object", '"forward"']),
        ('{"forward": [1], "input_grad": [1]}', ['lack "weight_grad"']),
        ('{"forwards": [1]}', ['"forwards"', '"forward"']),
        ('{"forward": ["1"], "input_grad": [1], "weight_grad": [1]}', ["forward", "not '1'"]),
        ('{"forward": [1], "input_grad": [1], "weight_grad": [1], "hop": {"0": 1}}', ["hop", "not '0'"]),
    ],
)
def test_json_that_holds_no_times(text: str, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        Times.from_json(text)


@pytest.mark.parametrize("stages", [0, -1, 1.5, True])
def test_equal_times_are_for_stages(stages: object) -> None:
    with refused(ScheduleError, "1 stage or more", f"not {stages}"):
        Times.equal(stages)  # type: ignore[arg-type]


figures = st.integers(0, 20).map(float)


@st.composite
def settings_of_schedules(draw: st.DrawFn) -> tuple[Schedule, Times]:
    ranks = draw(st.integers(1, 5))
    name = draw(st.sampled_from([name for name in names() if trains(name)]))
    schedule = build(name, ranks, ranks * draw(st.integers(2, 4)))
    durations = st.lists(figures, min_size=schedule.stages, max_size=schedule.stages)
    hops = st.lists(figures, min_size=schedule.stages - 1, max_size=schedule.stages - 1)
    return schedule, Times(draw(durations), draw(durations), draw(durations), draw(hops), draw(st.just(0.0) | figures))


@given(settings_of_schedules())
def test_every_named_schedule_keeps_what_a_timeline_promises(setting: tuple[Schedule, Times]) -> None:
    schedule, times = setting
    timeline = simulate(schedule, times)
    for row, actions in zip(timeline.events, schedule.actions, strict=True):
        assert tuple(event.action for event in row) == actions
        assert all(event.end - event.start == times.of(event.action) for event in row)
        assert all(first.end <= second.start for first, second in itertools.pairwise(row))
    assert simulate(lower(schedule), times).makespan == timeline.makespan
    path = timeline.critical_path
    assert path[0].start == 0 and path[-1].end == timeline.makespan
    assert all(first.end <= second.start for first, second in itertools.pairwise(path))
    if times.hop == (0.0,) * (schedule.stages - 1) and times.transfer == 0:
        assert all(first.end == second.start for first, second in itertools.pairwise(path))
    most = max(timeline.peak_activations)
    assert lower_bound(times, schedule.placement, schedule.microbatches, most) <= timeline.makespan * (1 + 1e-12)
