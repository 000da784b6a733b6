"""What a schedule checks about itself, and how it is drawn."""

from dataclasses import FrozenInstanceError

import pytest

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, build, from_csv
from tests.messages import refused

F0, F1 = Action(0, Kind.F, 0), Action(1, Kind.F, 0)


def test_properties() -> None:
    schedule = Schedule("v", (0, 1, 1, 0), 1, ((F0,), (F1,)))
    assert (schedule.ranks, schedule.stages, schedule.trains, schedule.lowered) == (2, 4, False, False)
    with pytest.raises(FrozenInstanceError):
        schedule.microbatches = 2  # type: ignore[misc]


def test_lists_become_tuples_so_that_a_schedule_can_be_hashed() -> None:
    schedule = Schedule("forward", [0, 1], 1, [[F0], [F1]])  # type: ignore[arg-type]
    assert schedule == build("forward", 2, 1)
    assert hash(schedule) == hash(build("forward", 2, 1))


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"microbatches": 0}, ["1 microbatch or more", "not 0"]),
        ({"microbatches": True}, ["1 microbatch or more", "not True"]),
        ({"placement": (0, 2)}, ["placement (0, 2)", "2 ranks"]),
        ({"placement": (0, 0)}, ["placement (0, 0)", "0 to 1"]),
        ({"placement": (0, [])}, ["placement (0, [])"]),
        ({"placement": 3}, ["placement", "sequence", "3"]),
        ({"actions": ()}, ["1 rank or more"]),
        ({"actions": ((F0,), ("1F0",))}, ["class Action", "'1F0'"]),
        ({"actions": ((F0,), (0,))}, ["class Action", "not 0"]),
        ({"actions": (F0, F1)}, ["sequence", "0F0"]),
        ({"overlapped": {(F0, F1)}}, ["overlapped pair", "(0F0, 1F0)"]),
        ({"edges": [(1, 0)]}, ["(1, 0) is not an edge"]),
        ({"edges": [(0, 2)]}, ["(0, 2) is not an edge", "stages 0 to 1"]),
        ({"edges": [0]}, ["0 is not an edge"]),
        ({"edges": [], "gradient_edges": [(0, 1)]}, ["gradient", "over (0, 1)"]),
        ({"gradient_edges": [(0, 1)]}, ["edges too"]),
    ],
)
def test_parts_that_do_not_fit(fields: dict, parts: list[str]) -> None:
    arguments = {"name": "n", "placement": (0, 1), "microbatches": 1, "actions": ((F0,), (F1,))}
    with refused(ScheduleError, *parts):
        Schedule(**{**arguments, **fields})


def test_a_send_and_its_receive_share_a_column() -> None:
    schedule = from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n", name="sent")
    assert repr(schedule) == (
        "sent: 2 ranks, 2 stages, 2 microbatches\n"
        "rank 0  0F0 0SEND_F0 0F1 0SEND_F1\n"
        "rank 1      1RECV_F0 1F0 1RECV_F1 1F1"
    )


def test_actions_that_cannot_run_are_drawn_at_the_end() -> None:
    assert str(from_csv("0B0,0F0\n1F0\n")).splitlines()[1:] == ["rank 0  0B0 0F0", "rank 1  1F0"]
