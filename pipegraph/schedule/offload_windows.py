"""When the saved values of a forward are not needed on its rank, so that they can be offloaded until the backward.

    a    a + 1      …   b − 1      b        a rank's computing actions
    F ─▶ copied out …   copied in ─▶ I or B  of one stage and microbatch

They are on the rank until action a + 1 ends, and again from when action b − 1 begins, so that each copy overlaps with
one action. If there is no action between the two copies, they stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipegraph.schedule.action import Action, Kind

_SHORTEST = 3  # actions from F to the backward


class OffloadWindow(NamedTuple):
    """Positions among a rank's computing actions.

    Attributes:
        stage, microbatch: of the saved values that are away.
        departure: the action during which they are copied out: they are away when it has ended.
        back: the action during which they are copied in: they take memory again when it begins.
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
