"""What a schedule checks about itself, and how it is drawn."""

from dataclasses import FrozenInstanceError

import pytest

from pipegraph.errors import ScheduleError
from pipegraph.schedule import Action, Kind, Schedule, build, from_csv

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
    ("fields", "message"),
    [
        ({"microbatches": 0}, "1 microbatch or more, not 0"),
        ({"microbatches": True}, "1 microbatch or more, not True"),
        ({"placement": (0, 2)}, "The placement (0, 2) does not fit the actions of 2 ranks"),
        ({"placement": (0, 0)}, "every rank from 0 to 1 holds one or more"),
        ({"placement": (0, [])}, "does not fit"),
        ({"placement": 3}, "The placement of a schedule are a sequence, not 3"),
        ({"actions": ()}, "1 rank or more"),
        ({"actions": ((F0,), ("1F0",))}, "of the class Action, not '1F0'"),
        ({"actions": ((F0,), (0,))}, "of the class Action, not 0"),
        ({"actions": (F0, F1)}, "are a sequence, not 0F0"),
        ({"overlapped": {(F0, F1)}}, "An overlapped pair is an F and a B, not (0F0, 1F0)"),
        ({"edges": [(1, 0)]}, "(1, 0) is not an edge"),
        ({"edges": [(0, 2)]}, "(0, 2) is not an edge: an edge leads from one of the stages 0 to 1 to a later one"),
        ({"edges": [0]}, "0 is not an edge"),
        ({"edges": [], "gradient_edges": [(0, 1)]}, "A gradient cannot return over (0, 1)"),
        ({"gradient_edges": [(0, 1)]}, "give edges too"),
    ],
)
def test_parts_that_do_not_fit(fields: dict, message: str) -> None:
    arguments = {"name": "n", "placement": (0, 1), "microbatches": 1, "actions": ((F0,), (F1,))}
    with pytest.raises(ScheduleError) as caught:
        Schedule(**{**arguments, **fields})
    assert message in str(caught.value)


def test_a_send_and_its_receive_share_a_column() -> None:
    schedule = from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1\n", name="sent")
    assert repr(schedule) == (
        "sent: 2 ranks, 2 stages, 2 microbatches\n"
        "rank 0  0F0 0SEND_F0 0F1 0SEND_F1\n"
        "rank 1      1RECV_F0 1F0 1RECV_F1 1F1"
    )


def test_actions_that_cannot_run_are_drawn_at_the_end() -> None:
    assert str(from_csv("0B0,0F0\n1F0\n")).splitlines()[1:] == ["rank 0  0B0 0F0", "rank 1  1F0"]
