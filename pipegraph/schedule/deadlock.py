"""Why a schedule cannot run to its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from pipegraph.schedule.action import unit_text
from pipegraph.schedule.action_arrays import ActionArrays
from pipegraph.schedule.replay import NEVER, replay
from pipegraph.schedule.schedule import Schedule


def stuck(schedule: Schedule) -> dict[int, int]:
    """Return where each rank that cannot go on stops: rank → position. Empty if all come to an end."""
    arrays = schedule.arrays
    ranks, stopped = np.unique(arrays.rank[replay(arrays) == NEVER], return_counts=True)
    return {
        rank: len(schedule.actions[rank]) - count for rank, count in zip(ranks.tolist(), stopped.tolist(), strict=True)
    }


def explain(schedule: Schedule, reached: Mapping[int, int]) -> tuple[str, dict[int, int], str]:
    """Return why the ranks are stuck: (what is wrong, the places to mark as rank → position, what to try).

    No action that another needs may be missing. So each stuck action waits for a later action of its own rank, which is
    a plain error of order, or for an action of another stuck rank. If all wait for other ranks, following them from
    rank to rank leads into a circle.
    """
    arrays = schedule.arrays
    waits: dict[int, int] = {}  # stuck rank → an action that it waits for
    for rank, position in reached.items():
        for number, other in _needs(arrays, arrays.bounds[rank] + position):
            holder, at = arrays.place(other)
            computes = arrays.action(other).peer is None
            if holder not in reached or at + computes <= reached[holder]:
                continue  # it is available: a transfer when its rank arrives, another action when it ends
            if holder == rank:
                first, second = arrays.action(number), arrays.action(other)
                what = f"On rank {rank}, {first} comes before {second}, which it needs."
                return what, {rank: arrays.place(number)[1]}, f"Move {first} after {second}."
            waits[rank] = other
    circle: list[int] = []
    rank = min(waits)
    while rank not in circle:
        circle.append(rank)
        rank, _ = arrays.place(waits[rank])
    circle = circle[circle.index(rank) :]
    at_pair = [rank for rank in circle if arrays.bounds[rank] + reached[rank] in arrays.pairs]
    steps = "; ".join(
        f"rank {rank} is at {unit_text(schedule.actions[rank][reached[rank] : reached[rank] + 1 + (rank in at_pair)])} "
        f"and waits for {arrays.action(waits[rank])} of rank {arrays.place(waits[rank])[0]}"
        for rank in circle
    )
    advice = "Order the transfers of every two ranks alike on both, or let lower() place them."
    if not schedule.lowered:
        advice = "Order the actions of these ranks so that one of them can go on."
    if at_pair:
        advice += " Or unmark the pair: two actions overlap only if both can begin."
    return f"This deadlocks: {steps}.", {rank: reached[rank] for rank in circle}, advice


def _needs(arrays: ActionArrays, number: int) -> Iterator[tuple[int, int]]:
    """Yield what an action, or the overlapped pair that it begins, waits for, as (action, what it needs)."""
    action, needed = arrays.needs
    for part in (number, number + 1) if number in arrays.pairs else (number,):
        first, last = np.searchsorted(action, part), np.searchsorted(action, part, "right")
        yield from ((part, int(other)) for other in needed[first:last] if other != number)
