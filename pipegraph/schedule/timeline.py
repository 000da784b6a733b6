"""What a simulated or recorded schedule did, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipegraph.schedule.action import Action

Place = tuple[int, int]
"""(rank, position among the events of that rank)"""

_SHOWN = 5  # turning points of the critical path that are described at each of its ends


class Event(NamedTuple):
    """An action that computes, from ``start`` to ``end`` in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, repr=False)
class Timeline:
    """When every action ran, and the figures that schedules are compared by. Times are in the unit of the `Times`."""

    events: tuple[tuple[Event, ...], ...]
    """rank → its events, in order; transfers have none"""
    peak_activations: tuple[int, ...]
    """rank → the largest number of saved activations (of one stage and microbatch) held at one time"""
    waited: tuple[dict[int, Place], ...] = field(default=())
    """rank → {position of an event that waited: the event of another rank whose value it waited for}"""

    @cached_property
    def makespan(self) -> float:
        """The end of the last action, measured from 0: what a synchronous optimizer waits for."""
        return max((row[-1].end for row in self.events if row), default=0.0)

    @cached_property
    def span(self) -> float:
        """The largest of the ranks' times from first start to last end, which the Zero Bubble papers report."""
        return max((row[-1].end - row[0].start for row in self.events if row), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time for which each rank computes."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)

    @property
    def bubble(self) -> float:
        """The part of the makespan in which even the busiest rank computes nothing: 0 to 1."""
        return _idle(max(self.busy), self.makespan)

    @property
    def span_bubble(self) -> float:
        """The same part of the span."""
        return _idle(max(self.busy), self.span)

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that make up the makespan. Each starts when the one before it has ended on its rank, or as soon as
        its value has arrived from another rank."""
        return tuple(self.events[rank][position] for rank, position in self._critical_places)

    @cached_property
    def _critical_places(self) -> list[Place]:
        ranks = [rank for rank, row in enumerate(self.events) if row]
        if not ranks:
            return []
        rank = max(ranks, key=lambda rank: self.events[rank][-1].end)
        place, path = (rank, len(self.events[rank]) - 1), []
        while place[1] >= 0:
            path.append(place)
            place = self.waited[place[0]].get(place[1], (place[0], place[1] - 1))
        return path[::-1]

    def describe_critical_path(self, between: str = "transfers") -> str:
        """Describe where the critical path turns, and each rank's share. ``between`` names the time between actions.

        0F0 → 3F0 → 3B7 → 0B7: rank 3 80%, rank 0 9%, rank 1 6%, rank 2 5%
        """
        places, path = self._critical_places, self.critical_path
        shown = []
        for at, event in enumerate(path):
            before, after = max(at - 1, 0), min(at + 1, len(path) - 1)
            stays = places[before][0] == places[at][0] == places[after][0]
            passes = len({(path[near].action.kind, path[near].action.microbatch) for near in (before, at, after)}) == 1
            if before == at or after == at or not (stays or passes):
                shown.append(str(event.action))
        if len(shown) > 2 * _SHOWN:
            shown = [*shown[:_SHOWN], "…", *shown[-_SHOWN:]]
        shares = {f"rank {rank}": 0.0 for rank in range(len(self.events))}
        for (rank, _), event in zip(places, path, strict=True):
            shares[f"rank {rank}"] += event.end - event.start
        shares[between] = self.makespan - sum(shares.values())
        parts = [
            f"{what} {share / self.makespan:.0%}"
            for what, share in sorted(shares.items(), key=lambda item: -item[1])
            if share > 0.005 * self.makespan
        ]
        return ": ".join(filter(None, (" → ".join(shown), ", ".join(parts))))

    def __repr__(self) -> str:
        return (
            f"Timeline(makespan={self.makespan:g}, span={self.span:g}, bubble={self.bubble:.4f}, "
            f"span_bubble={self.span_bubble:.4f}, peak_activations={self.peak_activations})"
        )


def _idle(busy: float, whole: float) -> float:
    return 1 - busy / whole if whole > 0 else 0.0
