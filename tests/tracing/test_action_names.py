"""The names of actions in traces."""

from __future__ import annotations

import pytest

from pipegraph.schedule import Action, Kind
from pipegraph.tracing import action_name, parse_action_name

LABELS = {
    Action(1, Kind.F, 3): "F stage 1 microbatch 3",
    Action(0, Kind.I, 0): "I stage 0 microbatch 0",
    Action(2, Kind.W, 11): "W stage 2 microbatch 11",
    Action(2, Kind.B, 1): "B stage 2 microbatch 1",
    Action(0, Kind.SEND_F, 3): "SEND_F stage 0 microbatch 3 to stage 1",
    Action(0, Kind.SEND_F, 3, 4): "SEND_F stage 0 microbatch 3 to stage 4",
    Action(1, Kind.RECV_F, 3): "RECV_F stage 1 microbatch 3 from stage 0",
    Action(1, Kind.SEND_B, 3): "SEND_B stage 1 microbatch 3 to stage 0",
    Action(0, Kind.RECV_B, 3): "RECV_B stage 0 microbatch 3 from stage 1",
}


@pytest.mark.parametrize(("action", "name"), LABELS.items(), ids=str)
def test_an_action_and_its_name(action: Action, name: str) -> None:
    assert action_name(action) == name
    assert parse_action_name(name) == action


@pytest.mark.parametrize(
    "name",
    [
        "aten::mm",
        "F stage 1",
        "f stage 1 microbatch 3",
        "F stage 1 microbatch 3 to stage 2",
        "SEND_F stage 0 microbatch 3",
    ],
)
def test_other_names_are_no_actions(name: str) -> None:
    assert parse_action_name(name) is None
