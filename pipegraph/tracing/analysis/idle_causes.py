"""Why a rank computes nothing for part of a step: its idle time, split by cause.

The schedule is simulated three times, each time with one more measured quantity:

1. All stages take equally long and messages take no time. Idle time is then due to the schedule, which has to fill and
   drain the pipeline (``warmup_and_drain``).
2. Every stage takes its medians. The added idle time is ``imbalance``.
3. Messages take theirs. The added idle time is ``transfers``.

Idle time of the measured step beyond the third is ``overhead``: the host between two actions, and actions that took
longer than their medians.

A rank may be idle for less time in a later simulation: the one with the longest stage waits for nobody. A cause gets
only the time that stays idle in every later simulation (their minimum). So no cause is negative, and the causes add up
to the measured idle time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from pipegraph.schedule import Schedule, Timeline, Times, simulate
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, MeasuredTimes

_ROUNDING = 1e-12  # seconds


@dataclass(frozen=True)
class IdleCauses:
    """Seconds in which a rank is idle."""

    warmup_and_drain: float
    imbalance: float
    transfers: float
    overhead: float


@dataclass(frozen=True)
class RankIdleTime:
    """One rank in one step, or in the mean of several: ``busy`` and ``causes`` add up to ``makespan``, in seconds."""

    rank: int
    makespan: float
    busy: float
    causes: IdleCauses

    @property
    def idle(self) -> float:
        return self.makespan - self.busy


@dataclass(frozen=True)
class SimulatedIdleTimes:
    """The idle seconds of each rank in the three simulated steps."""

    idle: tuple[tuple[float, ...], ...]

    @classmethod
    def from_measured_times(cls, schedule: Schedule, measured: MeasuredTimes) -> SimulatedIdleTimes:
        times = measured.times
        means = (sum(row) / times.stages for row in (times.forward, times.input_grad, times.weight_grad))
        steps = [Times.equal(times.stages, *means), measured.without_links, times]
        timelines = [simulate(schedule, step_times) for step_times in steps]
        return cls(tuple(zip(*([line.makespan - busy for busy in line.busy] for line in timelines), strict=True)))

    def split(self, rank: int, makespan: float, busy: float) -> RankIdleTime:
        """Return a rank of a step with the causes of its idle time."""
        idle_times = [idle := makespan - busy]
        for simulated in reversed(self.idle[rank]):
            idle = _at_most(simulated, idle)
            idle_times.insert(0, idle)
        first, second, third, total = idle_times
        return RankIdleTime(rank, makespan, busy, IdleCauses(first, second - first, third - second, total - third))


def idle_of_step(step: MeasuredStep, simulated: SimulatedIdleTimes) -> tuple[RankIdleTime, ...]:
    """Return the idle time of each rank that was recorded whole."""
    ranks = zip(step.busy, step.rank_complete, strict=True)
    return tuple(simulated.split(rank, step.makespan, busy) for rank, (busy, complete) in enumerate(ranks) if complete)


def idle_of_timeline(timeline: Timeline, simulated: SimulatedIdleTimes) -> tuple[RankIdleTime, ...]:
    """Return the idle time of each rank of a simulated step."""
    return tuple(simulated.split(rank, timeline.makespan, busy) for rank, busy in enumerate(timeline.busy))


def mean_idle(steps: Sequence[Sequence[RankIdleTime]]) -> tuple[RankIdleTime, ...]:
    """Return, for each rank, the mean over the steps that have it."""
    by_rank: dict[int, list[RankIdleTime]] = defaultdict(list)
    for step in steps:
        for idle_time in step:
            by_rank[idle_time.rank].append(idle_time)
    return tuple(_mean(by_rank[rank]) for rank in sorted(by_rank))


def _mean(idle_times: Sequence[RankIdleTime]) -> RankIdleTime:
    rows = [(idle_time.makespan, idle_time.busy, *astuple(idle_time.causes)) for idle_time in idle_times]
    makespan, busy, *causes = (sum(column) / len(idle_times) for column in zip(*rows, strict=True))
    return RankIdleTime(idle_times[0].rank, makespan, busy, IdleCauses(*causes))


def _at_most(time: float, limit: float) -> float:
    """Return the smaller of two times; the limit if they differ by rounding only."""
    return limit if time > limit - _ROUNDING else time
