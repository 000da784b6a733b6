"""When what a forward saved is not needed on its rank, so that it can wait somewhere else for the backward.

    a    a + 1      …   b − 1      b        a rank's computing actions
    F ─▶ copied out …   copied in ─▶ I or B  of one stage and microbatch

It is on its rank until action a + 1 ends and again from when action b − 1 begins, so that each copy has the time of one
action to hide behind. If there is nothing between the two copies it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipegraph.schedule.action import Action, Kind

_SHORTEST = 3  # actions from F to the backward


class OffloadWindow(NamedTuple):
    """Positions among a rank's computing actions.

    Attributes:
        stage, microbatch: whose saved values are away.
        departure: the action behind which they are copied out: they are away when it has ended.
        back: the action behind which they are copied in: they are there again when it begins.
    """

    stage: int
    microbatch: int
    departure: int
    back: int


def offload_windows(actions: Sequence[Action]) -> list[OffloadWindow]:
    """Return when the saved values of each stage and microbatch of a rank can be away, in the order of F."""
    forward: dict[tuple[int, int], int] = {}
    windows = []
    for position, action in enumerate(action for action in actions if not action.kind.is_transfer):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            forward[key] = position
        elif key in forward:
            begin = forward.pop(key)
            if position - begin >= _SHORTEST:
                windows.append(OffloadWindow(*key, begin + 1, position - 1))
    return sorted(windows, key=lambda window: window.departure)
