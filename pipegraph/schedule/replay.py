"""Runs the actions of a schedule in simulated time, each rank doing its own one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from pipegraph.schedule.action import Kind
from pipegraph.schedule.action_arrays import KINDS, SEND_F, ActionArrays, Integers

UNIT = dict.fromkeys(Kind, 1)
"""Every action takes one time slot, as in the grid of a schedule."""

NEVER = -1


def replay(arrays: ActionArrays, durations: Mapping[Kind, int] = UNIT) -> Integers:
    """Return when each action starts; NEVER for those that cannot run, whatever the durations are.

    An action starts as soon as its rank has ended the one before and everything it needs is available. The result of an
    action that computes is available when the action ends. A transfer needs its partner, and is available to it as soon
    as its rank arrives: both ends start together, a blocking rendezvous. Two adjacent actions of an overlapped pair
    count as one: it begins when both have what they need, and both results are available at its end.
    """
    duration = np.array([durations[kind] for kind in KINDS])[arrays.kind].tolist()
    transfers = (arrays.kind >= SEND_F).tolist()
    paired = set(arrays.pairs.tolist())
    first, needed = _needs_to_wait_for(arrays)
    bounds = arrays.bounds
    starts = [NEVER] * arrays.count
    available = [NEVER] * (arrays.count + 1)  # from when on each result is; the last: never
    waiting: dict[int, list[int]] = {}  # action → the ranks that wait for it
    position, clock = list(bounds[:-1]), [0] * len(arrays.actions)
    free = list(range(len(arrays.actions)))
    while free:
        rank = free.pop()
        time, number, end = clock[rank], position[rank], bounds[rank + 1]
        while number < end:
            if transfers[number]:
                available[number] = time
                if number in waiting:
                    free += waiting.pop(number)
            start = time
            for one in needed[first[number] : first[number + 1]]:
                if available[one] == NEVER:
                    waiting.setdefault(one, []).append(rank)
                    break
                start = max(start, available[one])
            else:
                starts[number] = start
                time = start + duration[number]
                if not transfers[number] and number not in paired:
                    for done in (number - 1, number) if number - 1 in paired else (number,):
                        available[done] = time
                        if done in waiting:
                            free += waiting.pop(done)
                number += 1
                continue
            break
        clock[rank], position[rank] = time, number
    return np.array(starts, np.int64)


def slots(arrays: ActionArrays) -> list[list[int]]:
    """Return each rank's time slots, one per action. Actions that can never run follow in order after all that can."""
    starts = replay(arrays)
    end = int(starts.max(initial=-1)) + 1
    rows = []
    for first, last in pairwise(arrays.bounds):
        row = starts[first:last]
        ran = int((row != NEVER).sum())
        rows.append([*row[:ran].tolist(), *range(end, end + last - first - ran)])
    return rows


def _needs_to_wait_for(arrays: ActionArrays) -> tuple[list[int], list[int]]:
    """Return the needs of each action without the results of earlier actions of its rank.

    They are (for each action, where its needs begin; all needs). The first action of an overlapped pair has the needs
    of both.
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
