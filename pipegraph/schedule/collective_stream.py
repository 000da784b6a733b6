"""When the collectives of a rank run: on a separate stream, in parallel with its actions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from pipegraph.schedule.action import Action, Collective, CollectiveKind
from pipegraph.schedule.collectives import CONTRIBUTES
from pipegraph.schedule.times import Times


class CollectiveEvent(NamedTuple):
    """An UNSHARD or REDUCE_GRAD, from ``start`` to ``end`` in seconds. A RESHARD takes no time."""

    collective: Collective
    start: float
    end: float


class MemorySpan(NamedTuple):
    """A stage's parameters whole, or its gradients not yet reduced, in memory from ``start`` to ``end``."""

    stage: int
    start: float
    end: float


@dataclass(frozen=True)
class RankCollectives:
    """The collectives of a rank over time."""

    events: tuple[CollectiveEvent, ...]
    """in order"""
    parameters: tuple[MemorySpan, ...]
    """from UNSHARD to RESHARD"""
    gradients: tuple[MemorySpan, ...]
    """from the first W or B to the end of REDUCE_GRAD"""
    reductions: tuple[MemorySpan, ...]
    """from when the rank comes to REDUCE_GRAD to its end"""
    peak_whole: int
    """the largest number of stages whose parameters are whole at one time"""
    waited: float
    """seconds for which actions waited for gathers, and for nothing else"""
    waits: dict[int, int]
    """{position of an event that waited for a gather: the event after which that, or the first of the collectives that
    it followed without a pause, began; −1: none}"""
    last_begun: int
    """the same for the last collective"""

    @property
    def end(self) -> float:
        return self.events[-1].end if self.events else 0.0


class _Gathered(NamedTuple):
    """Parameters that are held since one time and whole from another; ``begun`` as in the stream."""

    since: float
    end: float
    begun: int


@dataclass
class CollectiveStream:
    """The state of a rank's collectives while they are simulated. They run one after the other, in their order."""

    times: Times
    reduced: Collection[int]
    clock: float = 0.0
    begun: int = -1  # the event after which the stream became busy
    peak_whole: int = 0
    waited: float = 0.0
    events: list[CollectiveEvent] = field(default_factory=list)
    parameters: list[MemorySpan] = field(default_factory=list)
    gradients: list[MemorySpan] = field(default_factory=list)
    reductions: list[MemorySpan] = field(default_factory=list)
    waits: dict[int, int] = field(default_factory=dict)
    _gathered: dict[int, _Gathered] = field(default_factory=dict)  # by stage
    _contributed: dict[int, float] = field(default_factory=dict)  # stage → when its gradients were made

    def run(self, collective: Collective, now: float, last_event: int) -> None:
        """Begin a collective when the rank comes to it, after its event at this position."""
        stage = collective.stage
        if collective.kind is CollectiveKind.RESHARD:
            self.parameters.append(MemorySpan(stage, self._gathered.pop(stage).since, now))
            return
        if now >= self.clock:
            self.begun = last_event
        start = max(now, self.clock)
        self.clock = start + self.times.of_collective(collective)
        self.events.append(CollectiveEvent(collective, start, self.clock))
        if collective.kind is CollectiveKind.REDUCE_GRAD:
            self.gradients.append(MemorySpan(stage, self._contributed[stage], self.clock))
            self.reductions.append(MemorySpan(stage, now, self.clock))
        else:
            self._gathered[stage] = _Gathered(now, self.clock, self.begun)
            self.peak_whole = max(self.peak_whole, len(self._gathered))

    def wait(self, unit: tuple[Action, ...], start: float, position: int) -> float:
        """Return when a unit can start that can at ``start`` as far as its other inputs are concerned."""
        for action in unit:
            gathered = self._gathered.get(action.stage)
            if gathered is not None and gathered.end > start:
                self.waited += gathered.end - start
                self.waits[position] = gathered.begun
                start = gathered.end
        return start

    def compute(self, action: Action, start: float) -> None:
        """Note what an action adds to gradients."""
        if action.kind in CONTRIBUTES and action.stage in self.reduced:
            self._contributed.setdefault(action.stage, start)

    def finished(self) -> RankCollectives:
        return RankCollectives(
            events=tuple(self.events),
            parameters=tuple(self.parameters),
            gradients=tuple(self.gradients),
            reductions=tuple(self.reductions),
            peak_whole=self.peak_whole,
            waited=self.waited,
            waits=self.waits,
            last_begun=self.begun,
        )
