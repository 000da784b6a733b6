"""When each action of a schedule ran, and the figures that schedules are compared by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from pipegraph.notebook import draw
from pipegraph.schedule.action import Action
from pipegraph.schedule.collective_stream import RankCollectives
from pipegraph.units import format_number_of, format_percent

Place = tuple[int, int]
"""(rank, position among the events of that rank)"""

_SHOWN_TURNS = 5  # turning points of the critical path that are described at each of its ends
_SHOWN_SHARES = 6  # of the time of a critical path


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
    waited: tuple[dict[int, Place], ...] = ()
    """rank → {position of an event that waited: the event of another rank whose value it waited for}"""
    collectives: tuple[RankCollectives, ...] = ()
    """rank → its collectives; empty if the schedule has none"""

    @cached_property
    def makespan(self) -> float:
        """The end of the last action or collective, measured from 0: what a synchronous optimizer waits for."""
        return max(self._ends, default=0.0)

    @cached_property
    def _ends(self) -> list[float]:
        """rank → the end of its last event or collective"""
        ends = [row[-1].end if row else 0.0 for row in self.events]
        for rank, collectives in enumerate(self.collectives):
            ends[rank] = max(ends[rank], collectives.end)
        return ends

    @property
    def peak_whole(self) -> tuple[int, ...]:
        """rank → the largest number of its sharded stages that are whole at one time"""
        return tuple(rank_collectives.peak_whole for rank_collectives in self.collectives) or (0,) * len(self.events)

    @property
    def gather_waits(self) -> tuple[float, ...]:
        """rank → how long it waits for gathers, and for nothing else"""
        return tuple(rank_collectives.waited for rank_collectives in self.collectives) or (0.0,) * len(self.events)

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
        """The share of the makespan in which ranks compute nothing, the mean over ranks: 0 to 1."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self) -> float:
        """The same share of the span."""
        return self._idle_share(self.span)

    def _idle_share(self, duration: float) -> float:
        return 1 - fmean(self.busy) / duration if duration > 0 else 0.0

    @cached_property
    def critical_path(self) -> tuple[Event, ...]:
        """The events that make up the makespan. Each starts when the one before it has ended on its rank, or as soon as
        its value has arrived from another rank, or its parameters have been gathered."""
        return tuple(self.events[rank][position] for rank, position in self._critical_places)

    @cached_property
    def _critical_places(self) -> list[Place]:
        ranks = [rank for rank, row in enumerate(self.events) if row]
        if not ranks:
            return []
        rank = max(ranks, key=self._ends.__getitem__)
        place, path = (rank, self._last_event(rank)), []
        while place[1] >= 0:
            path.append(place)
            rank, position = place
            if self.collectives and position in self.collectives[rank].waits:
                place = (rank, self.collectives[rank].waits[position])
            else:
                place = self.waited[rank].get(position, (rank, position - 1))
        return path[::-1]

    def _last_event(self, rank: int) -> int:
        """Return the position of the event after which only collectives are left on the critical path of a rank."""
        last = len(self.events[rank]) - 1
        if self._ends[rank] > self.events[rank][last].end:
            return self.collectives[rank].last_begun
        return last

    @property
    def _critical_collectives(self) -> float:
        """The time for which the critical path is in collectives."""
        if not self.collectives:
            return 0.0
        time, end = 0.0, 0.0
        for (rank, position), event in zip(self._critical_places, self.critical_path, strict=True):
            if position in self.collectives[rank].waits:
                time += event.start - end
            end = event.end
        return time + self.makespan - end

    def describe_critical_path(self, between: str = "transfers") -> str:
        """Describe where the critical path turns, and each rank's share. ``between`` names the time between actions.

        0F0 → 3F0 → 3B7 → 0B7: rank 3 80 %, rank 0 9 %, rank 1 6 %, rank 2 5 %
        """
        places, path = self._critical_places, self.critical_path
        turns = []
        for at, event in enumerate(path):
            previous, following = max(at - 1, 0), min(at + 1, len(path) - 1)
            stays = places[previous][0] == places[at][0] == places[following][0]
            passes = (
                len({(path[near].action.kind, path[near].action.microbatch) for near in (previous, at, following)}) == 1
            )
            if previous == at or following == at or not (stays or passes):
                turns.append(str(event.action))
        if len(turns) > 2 * _SHOWN_TURNS:
            turns = [*turns[:_SHOWN_TURNS], "…", *turns[-_SHOWN_TURNS:]]
        shares = {f"rank {rank}": 0.0 for rank in range(len(self.events))}
        for (rank, _), event in zip(places, path, strict=True):
            shares[f"rank {rank}"] += event.end - event.start
        shares["collectives"] = self._critical_collectives
        shares[between] = self.makespan - sum(shares.values())
        largest = sorted(shares.items(), key=lambda item: -item[1])
        notable = [(name, share) for name, share in largest if share > 0.005 * self.makespan]
        if len(notable) > _SHOWN_SHARES + 1:
            minor_shares = notable[_SHOWN_SHARES:]
            notable = [
                *notable[:_SHOWN_SHARES],
                (f"{len(minor_shares)} others", sum(share for _, share in minor_shares)),
            ]
        parts = [f"{name} {format_percent(share / self.makespan, decimals=0)}" for name, share in notable]
        return ": ".join(filter(None, (" → ".join(turns), ", ".join(parts))))

    def __repr__(self) -> str:
        actions = format_number_of("action", sum(map(len, self.events)))
        return (
            f"Timeline(makespan {self.makespan:g}, bubble {format_percent(self.bubble)}, {actions} on "
            f"{format_number_of('rank', len(self.events))}, at most {max(self.peak_activations, default=0)} saved "
            "activations)"
        )

    def _repr_svg_(self) -> str | None:
        return draw("timeline_svg", self)
