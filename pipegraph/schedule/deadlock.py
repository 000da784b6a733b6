"""Why a schedule cannot run to its end."""

from __future__ import annotations

from collections.abc import Mapping

from pipegraph.schedule.action import Action
from pipegraph.schedule.dependencies import Token
from pipegraph.schedule.replay import replay
from pipegraph.schedule.schedule import Schedule


def stuck(schedule: Schedule) -> dict[int, int]:
    """Of each rank that cannot go on, the position of the action at which it stops. Empty where all come to an end."""
    reached = [0] * schedule.ranks
    for event in replay(schedule.actions, schedule.dependencies):
        reached[event.rank] += event.ended
    return {rank: at for rank, at in enumerate(reached) if at < len(schedule.actions[rank])}


def explain(
    schedule: Schedule, reached: Mapping[int, int], places: Mapping[Action, tuple[int, int]]
) -> tuple[str, dict[int, int], str]:
    """Say why the ranks are stuck: what is wrong, the places to mark (rank → position), and what to try.

    Every action that any other needs must have a place. Then each stuck action waits for one that comes later on its
    own rank, which is a plain error of order, or for one of another stuck rank; and where all wait for others, going
    from rank to rank leads into a circle.
    """
    dependencies = schedule.dependencies
    found: dict[Token, Action] = {dependencies.gives(action): action for action in places}
    waits: dict[int, Action] = {}  # of each stuck rank, one action that it waits for
    for rank, position in reached.items():
        action = schedule.actions[rank][position]
        for token in dependencies.needs(action):
            needed = found[token]
            holder, at = places[needed]
            if holder not in reached or at + (needed.peer is None) <= reached[holder]:
                continue  # given: a transfer when its rank arrived there, another action when it ended
            if holder == rank:
                what = f"On rank {rank}, {action} stands before {needed}, which it needs."
                return what, {rank: position}, f"Move {action} behind {needed}."
            waits[rank] = needed
    circle: list[int] = []
    rank = min(waits)
    while rank not in circle:
        circle.append(rank)
        rank = places[waits[rank]][0]
    circle = circle[circle.index(rank) :]
    marks = {rank: reached[rank] for rank in circle}
    steps = "; ".join(
        f"rank {rank} is at {schedule.actions[rank][reached[rank]]} and waits for {waits[rank]} of rank "
        f"{places[waits[rank]][0]}"
        for rank in circle
    )
    advice = "Order the transfers of every two ranks alike on both, or let lower() place them."
    if not schedule.lowered:
        advice = "Order the actions of these ranks so that one of them can go on."
    return f"This deadlocks: {steps}.", marks, advice
