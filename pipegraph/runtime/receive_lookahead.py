"""When receives are posted: before the schedule reaches them, so that a message travels while its receiver computes.

A message without a posted receive stays with its sender and sets off only when one is posted. Two computing actions
ahead is early enough for every message that travels for less time than they compute, also if actions are not equally
long. Each posted receive takes a buffer, so that to post all of them at once would take one for every microbatch.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

from pipegraph.schedule import Action

COMPUTING_ACTIONS: Final = 2


def receives_due(actions: Sequence[Action]) -> list[int]:
    """For each action of a rank, how many of the rank's receives are posted before it is done."""
    computed = list(itertools.accumulate((not action.kind.is_transfer for action in actions), initial=0))
    is_receive = (action.kind.is_transfer and not action.sends for action in actions)
    reached = [count for count, receives in zip(computed, is_receive, strict=False) if receives]
    return [bisect_right(reached, count + COMPUTING_ACTIONS) for count in computed[:-1]]
