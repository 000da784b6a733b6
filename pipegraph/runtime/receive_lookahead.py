"""When receives are posted: before the schedule reaches them, so that a message travels while its receiver computes.

A message that no receive is posted for stays with its sender, and sets off only when one is. Two computing actions
before is early enough for all that takes less time than computing does, also where actions are not equally long; and
each receive on its way has a buffer, so that posting all of them at once would hold a buffer for every microbatch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from pipegraph.schedule import Action, Schedule

COMPUTING_ACTIONS: Final = 2


def receives_due(actions: Sequence[Action]) -> list[int]:
    """Of each action of a rank, how many of the rank's receives are posted before it is done."""
    computed = list(itertools.accumulate((not action.kind.is_transfer for action in actions), initial=0))
    reached = [computed[at] for at, action in enumerate(actions) if _receives(action)]
    return [bisect_right(reached, count + COMPUTING_ACTIONS) for count in computed[:-1]]


def receives_ahead(schedule: Schedule) -> int:
    """How many receives of a rank are posted before the schedule reaches them, at most: what `receive_buffers` asks."""
    most = 0
    for actions in schedule.actions:
        reached = itertools.accumulate(map(_receives, actions))
        most = max(most, *(due - at for due, at in zip(receives_due(actions), reached, strict=True)))
    return most


def _receives(action: Action) -> bool:
    return action.kind.is_transfer and not action.sends
