"""How the order of one rank is put together: forwards and backwards in turn, or steps that are repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipegraph.schedule.action import Action, Kind

Step = tuple[int, Kind]
"""(stage, kind): the next microbatch of it"""


def by_groups(kind: Kind, rank: int, ranks: int, microbatches: int, chunks: int) -> list[Action]:
    """Return a rank's actions of one kind: each group of ``ranks`` microbatches through all chunks, then the next."""
    stages = range(rank, ranks * chunks, ranks)
    return [
        Action(stage, kind, j)
        for first in range(0, microbatches, ranks)
        for stage in (stages if kind is Kind.F else reversed(stages))
        for j in range(first, min(first + ranks, microbatches))
    ]


def alternate(
    forwards: Sequence[Action],
    backwards: Sequence[Action],
    warm_up: int,
    weights: Sequence[Action] = (),
    delay: int = 0,
) -> list[Action]:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards.

    From the backward numbered ``delay`` on (from 0), one of ``weights`` follows each; the rest of them come last.
    """
    order = list(forwards[:warm_up])
    for number, backward in enumerate(backwards):
        order += forwards[warm_up + number : warm_up + number + 1]
        order.append(backward)
        if number >= delay:
            order += weights[number - delay : number - delay + 1]
    return [*order, *weights[max(0, len(backwards) - delay) :]]


class Order:
    """The order of one rank, written in steps. Every step is of the next microbatch of its stage and kind.

    A B is the next I and the next W of its stage in one.
    """

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: defaultdict[Step, int] = defaultdict(int)

    def add(self, stage: int, kind: Kind) -> None:
        microbatch = self._next[stage, Kind.I if kind is Kind.B else kind]
        self.actions.append(Action(stage, kind, microbatch))
        for part in (Kind.I, Kind.W) if kind is Kind.B else (kind,):
            self._next[stage, part] += 1

    def repeat(self, times: int, *steps: Step) -> None:
        for _ in range(times):
            for stage, kind in steps:
                self.add(stage, kind)
