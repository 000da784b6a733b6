"""Runs the actions of a schedule in simulated time, each rank doing its own one after the other."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.dependencies import Dependencies, Token

UNIT = dict.fromkeys(Kind, 1)
"""Every action takes one time slot, as in the grid of a schedule."""


class Event(NamedTuple):
    """An action starts, or ends. ``position`` counts the actions of the rank from 0."""

    time: int
    ended: bool
    rank: int
    position: int


def replay(
    actions: Sequence[Sequence[Action]], dependencies: Dependencies, durations: Mapping[Kind, int] = UNIT
) -> Iterator[Event]:
    """Yield the starts and ends of all actions that can run, in order of time.

    At one time, ends come before the starts they allow; both go by rank. An action starts as soon as its rank has ended
    the one before and everything it needs is given. Where a rank cannot go on, its remaining actions have no events:
    which ones those are does not depend on the durations.
    """
    given: set[Token] = set()
    waiting: dict[Token, list[int]] = {}
    position = [0] * len(actions)
    running: list[tuple[int, int]] = []  # a heap of (end, rank)
    time = 0
    free = deque(range(len(actions)))
    while True:
        while free:
            rank = free.popleft()
            if position[rank] == len(actions[rank]):
                continue
            action = actions[rank][position[rank]]
            if action.peer is not None and (token := dependencies.gives(action)) not in given:
                given.add(token)
                free.extend(waiting.pop(token, ()))
            missing = next((token for token in dependencies.needs(action) if token not in given), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                continue
            yield Event(time, False, rank, position[rank])
            heapq.heappush(running, (time + durations[action.kind], rank))
        if not running:
            return
        time = running[0][0]
        ready = []
        while running and running[0][0] == time:
            _, rank = heapq.heappop(running)
            yield Event(time, True, rank, position[rank])
            token = dependencies.gives(actions[rank][position[rank]])
            position[rank] += 1
            given.add(token)
            ready += [rank, *waiting.pop(token, ())]
        free.extend(sorted(ready))


def slots(actions: Sequence[Sequence[Action]], dependencies: Dependencies) -> list[list[int]]:
    """Of each rank, the time slot of each action. Actions that can never run follow in order after all that can."""
    found: list[list[int]] = [[] for _ in actions]
    end = 0
    for time, ended, rank, _ in replay(actions, dependencies):
        if ended:
            end = max(end, time)
        else:
            found[rank].append(time)
    for rank, row in enumerate(actions):
        found[rank].extend(range(end, end + len(row) - len(found[rank])))
    return found
