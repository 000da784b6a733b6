"""Why a rank computes nothing for part of a step: its idle time, split by cause.

The schedule is simulated in three worlds, each one thing more real than the one before:

1. all stages take equally long and messages no time: what is idle then lies in the schedule, which has to fill and
   drain (``warmup_and_drain``);
2. every stage takes what it took, by its medians: what comes on top is ``imbalance``;
3. so do messages: what comes on top is ``transfers``.

What is idle in the measured step beyond the third is ``overhead``: the host between two actions, and actions that took
longer than their medians.

A rank may be idle for less in a more real world: the one with the longest stage waits for nobody. So a cause is charged
only with what stays idle in every later world as well (the least of these), which leaves no cause below 0, and the
causes add up to the measured idle time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pipegraph.schedule import Schedule, Timeline, Times, simulate
from pipegraph.tracing.analysis.measured_steps import MeasuredStep
from pipegraph.tracing.analysis.measured_times import MeasuredTimes

_ROUNDING = 1e-12  # seconds


@dataclass(frozen=True)
class Causes:
    """Seconds in which a rank is idle."""

    warmup_and_drain: float
    imbalance: float
    transfers: float
    overhead: float

    @property
    def idle(self) -> float:
        return sum(astuple(self))


@dataclass(frozen=True)
class RankBubble:
    """One rank in one step, or in the mean of several: ``busy`` and ``causes`` add up to ``makespan``, in seconds."""

    rank: int
    makespan: float
    busy: float
    causes: Causes

    @property
    def idle(self) -> float:
        return self.makespan - self.busy


@dataclass(frozen=True)
class Worlds:
    """The idle time of each rank in the three simulated steps."""

    idle: tuple[tuple[float, float, float], ...]

    @classmethod
    def of(cls, schedule: Schedule, measured: MeasuredTimes) -> Worlds:
        timelines = [
            simulate(schedule, _equal(measured.times)),
            simulate(schedule, measured.without_links),
            simulate(schedule, measured.times),
        ]
        rows = zip(*map(_idle, timelines), strict=True)
        return cls(tuple((row[0], row[1], row[2]) for row in rows))

    def split(self, rank: int, idle: float) -> Causes:
        """The causes of a rank's idle time."""
        schedule, uneven, linked = self.idle[rank]
        third = _at_most(linked, idle)
        second = _at_most(uneven, third)
        first = _at_most(schedule, second)
        return Causes(first, second - first, third - second, idle - third)


def step_bubbles(step: MeasuredStep, worlds: Worlds) -> tuple[RankBubble, ...]:
    """The bubble of each rank that was recorded whole."""
    makespan = step.makespan
    return tuple(
        RankBubble(rank, makespan, busy, worlds.split(rank, makespan - busy))
        for rank, busy in enumerate(step.busy)
        if step.whole[rank]
    )


def simulated_bubbles(timeline: Timeline, worlds: Worlds) -> tuple[RankBubble, ...]:
    """The bubble of each rank of a simulated step."""
    return tuple(
        RankBubble(rank, timeline.makespan, busy, worlds.split(rank, timeline.makespan - busy))
        for rank, busy in enumerate(timeline.busy)
    )


def mean_bubbles(steps: Sequence[Sequence[RankBubble]]) -> tuple[RankBubble, ...]:
    """Of each rank, the mean over the steps that have it."""
    by_rank: dict[int, list[RankBubble]] = {}
    for step in steps:
        for bubble in step:
            by_rank.setdefault(bubble.rank, []).append(bubble)
    return tuple(_mean(by_rank[rank]) for rank in sorted(by_rank))


def _mean(found: Sequence[RankBubble]) -> RankBubble:
    count = len(found)
    causes = zip(*(astuple(bubble.causes) for bubble in found), strict=True)
    return RankBubble(
        found[0].rank,
        sum(bubble.makespan for bubble in found) / count,
        sum(bubble.busy for bubble in found) / count,
        Causes(*(sum(cause) / count for cause in causes)),
    )


def _at_most(time: float, limit: float) -> float:
    """The lesser of two times; the limit where they differ by no more than additions round."""
    return limit if time > limit - _ROUNDING else time


def _equal(times: Times) -> Times:
    """All stages as long as their mean, and no links."""
    rows = (times.forward, times.input_grad, times.weight_grad)
    return Times.equal(times.stages, *(sum(row) / times.stages for row in rows))


def _idle(timeline: Timeline) -> list[float]:
    return [timeline.makespan - busy for busy in timeline.busy]
