"""Actions and their text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind
from tests.messages import refused


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("2F0", Action(2, Kind.F, 0)),
        ("0B12", Action(0, Kind.B, 12)),
        ("1I3", Action(1, Kind.I, 3)),
        ("10W3", Action(10, Kind.W, 3)),
        ("0SEND_F0", Action(0, Kind.SEND_F, 0, 1)),
        ("1RECV_F0", Action(1, Kind.RECV_F, 0, 0)),
        ("1SEND_B0", Action(1, Kind.SEND_B, 0, 0)),
        ("0RECV_B0", Action(0, Kind.RECV_B, 0, 1)),
        ("0SEND_F0>3", Action(0, Kind.SEND_F, 0, 3)),
        ("3RECV_F0<0", Action(3, Kind.RECV_F, 0, 0)),
        ("3SEND_B0>0", Action(3, Kind.SEND_B, 0, 0)),
        ("0RECV_B0<3", Action(0, Kind.RECV_B, 0, 3)),
    ],
)
def test_text_and_its_inverse(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


def test_the_peer_is_the_neighbour_unless_given() -> None:
    assert Action(1, Kind.SEND_F, 0).peer == 2
    assert Action(1, Kind.SEND_B, 0).peer == 0
    assert Action.parse("0SEND_F0>1") == Action(0, Kind.SEND_F, 0)
    assert Action(1, Kind.F, 0).peer is None


def test_partners_name_each_other() -> None:
    for text, partner in [("0SEND_F2", "1RECV_F2"), ("3SEND_B0>0", "0RECV_B0<3")]:
        assert str(Action.parse(text).partner) == partner
        assert str(Action.parse(partner).partner) == text
    with refused(ScheduleError, "0F0", "no partner"):
        _ = Action(0, Kind.F, 0).partner


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["'' is not an action", "a stage, a kind and a microbatch"]),
        ("F0", ["'F0' is not an action"]),
        ("2F", ["'2F' is not an action"]),
        ("2F0 1F0", ["not an action"]),
        ("-1F0", ["not an action"]),
        ("٢F0", ["not an action"]),
        ("2F" + "9" * 5000, ["not an action"]),
        ("2X0", ["'X'", "F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B"]),
        ("2SENDF0", ["'SENDF'", '"SEND_F"']),
        ("0F0>1", ["0F0", "no peer"]),
        ("3RECV_F0>0", ["SEND", ">", "RECV", "<"]),
        ("0RECV_F0", ["0RECV_F0", "stage -1"]),
        ("2SEND_F0>1", ["a later stage"]),
        ("2SEND_B0>3", ["an earlier stage"]),
    ],
)
def test_what_is_no_action(text: str, parts: list[str]) -> None:
    with refused(ScheduleError, *parts):
        Action.parse(text)


@pytest.mark.parametrize("numbers", [(-1, 0), (0, -1), (0.5, 0), ("0", 0), (True, 0), (0, None)])
def test_stage_and_microbatch_are_numbers(numbers: tuple) -> None:
    with refused(ScheduleError, "0 to 999999999", f"{numbers[0]!r} and {numbers[1]!r}"):
        Action(numbers[0], Kind.F, numbers[1])


@given(st.text() | st.from_regex(r"[0-9]+[A-Z_]+[0-9]*([<>][0-9]+)?", fullmatch=True))
def test_any_text_is_an_action_or_a_schedule_error(text: str) -> None:
    try:
        action = Action.parse(text)
    except ScheduleError:
        return
    assert Action.parse(str(action)) == action
