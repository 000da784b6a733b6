"""Runs the actions of a schedule in simulated time, each rank doing its own one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from pipegraph.schedule.action import Kind
from pipegraph.schedule.action_arrays import KINDS, SEND_F, Arrays, Integers

UNIT = dict.fromkeys(Kind, 1)
"""Every action takes one time slot, as in the grid of a schedule."""

NEVER = -1


def replay(arrays: Arrays, durations: Mapping[Kind, int] = UNIT) -> Integers:
    """When each action starts; NEVER for those that cannot run, whatever the durations are.

    An action starts as soon as its rank has ended the one before and everything it needs is given. An action that
    computes gives what it makes when it ends. A transfer gives when its rank arrives at it, and needs its partner: both
    ends start together, a blocking rendezvous. An overlapped pair that stands together is as one: it begins once both
    its actions have what they need, and both give at its end.
    """
    lasts = np.array([durations[kind] for kind in KINDS])[arrays.kind].tolist()
    transfers = (arrays.kind >= SEND_F).tolist()
    paired = set(arrays.pairs.tolist())
    first, needed = _needs_that_can_hold_up(arrays)
    bounds = arrays.bounds
    starts = [NEVER] * arrays.count
    given = [NEVER] * (arrays.count + 1)  # when each action gives what it makes; what no action makes is never given
    waiting: dict[int, list[int]] = {}  # the ranks that wait for an action
    position, clock = list(bounds[:-1]), [0] * len(arrays.actions)
    free = list(range(len(arrays.actions)))
    while free:
        rank = free.pop()
        time, number, end = clock[rank], position[rank], bounds[rank + 1]
        while number < end:
            if transfers[number]:
                given[number] = time
                if number in waiting:
                    free += waiting.pop(number)
            start = time
            for one in needed[first[number] : first[number + 1]]:
                if given[one] == NEVER:
                    waiting.setdefault(one, []).append(rank)
                    break
                start = max(start, given[one])
            else:
                starts[number] = start
                time = start + lasts[number]
                if not transfers[number] and number not in paired:
                    for done in (number - 1, number) if number - 1 in paired else (number,):
                        given[done] = time
                        if done in waiting:
                            free += waiting.pop(done)
                number += 1
                continue
            break
        clock[rank], position[rank] = time, number
    return np.array(starts, np.int64)


def slots(arrays: Arrays) -> list[list[int]]:
    """Of each rank, the time slot of each action. Actions that can never run follow in order after all that can."""
    starts = replay(arrays)
    end = int(starts.max(initial=-1)) + 1
    rows = []
    for first, last in pairwise(arrays.bounds):
        row = starts[first:last]
        ran = int((row != NEVER).sum())
        rows.append([*row[:ran].tolist(), *range(end, end + last - first - ran)])
    return rows


def _needs_that_can_hold_up(arrays: Arrays) -> tuple[list[int], list[int]]:
    """The needs of each action, but for those that its own rank has given before: (where each action's begin, all).

    The first action of an overlapped pair has the needs of both.
    """
    action, needed = arrays.needs
    if len(arrays.pairs):
        second = np.isin(action - 1, arrays.pairs)
        action, needed = np.append(action, action[second] - 1), np.append(needed, needed[second])
        order = np.argsort(action, kind="stable")
        action, needed = action[order], needed[order]
    rank = np.append(arrays.rank, -1)
    kept = (needed > action) | (rank[needed] != rank[action])
    kept &= needed != action
    counts = np.bincount(action[kept], minlength=arrays.count)
    return [0, *np.cumsum(counts).tolist()], needed[kept].tolist()
