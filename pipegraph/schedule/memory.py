"""How many saved activations a schedule holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.schedule import Schedule


def held_activations(actions: Iterable[Action]) -> Iterator[int]:
    """Yield, for each action of one rank, how many activations it holds while that action runs.

    One activation is what one stage saves for one microbatch, held from the start of its F to the end of its W or B.
    """
    held = 0
    for action in actions:
        held += action.kind is Kind.F
        yield held
        held -= action.kind in (Kind.W, Kind.B)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most activations it holds at one time; 0 without a backward, for which nothing is saved."""
    if not schedule.has_backward:
        return (0,) * schedule.ranks
    return tuple(max(held_activations(actions), default=0) for actions in schedule.actions)
