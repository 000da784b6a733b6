"""The steps of a recorded run, each with the actions of every rank in one time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pipegraph.schedule import Event, Schedule
from pipegraph.tracing.reading.recorded_run import RecordedRun, Span


@dataclass(frozen=True)
class MeasuredStep:
    """A step, from the first start to the last end of an action that computes on any rank.

    Attributes:
        start: of the step, in seconds of the run.
        events: of each rank, the actions that compute, in seconds from ``start``.
        transfers: of each rank, its SENDs and RECVs, likewise.
        whole: of each rank, whether it did just the schedule's actions, in their order.
        took: of each rank that says so, seconds of the step with everything around the actions: data and optimizer.
    """

    number: int
    start: float
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[tuple[Span, ...], ...]
    whole: tuple[bool, ...]
    took: tuple[float | None, ...]

    @property
    def makespan(self) -> float:
        return max((row[-1].end for row in self.events if row), default=0.0)

    @property
    def complete(self) -> bool:
        """Whether all ranks are whole."""
        return all(self.whole)

    @property
    def busy(self) -> tuple[float, ...]:
        """Of each rank, the seconds that it computed."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)


def measured_steps(run: RecordedRun) -> tuple[MeasuredStep, ...]:
    """The steps in which some rank computed, by their numbers."""
    by_step: dict[int, list[Span]] = defaultdict(list)
    for trace in run.ranks.values():
        for span in trace.spans:
            by_step[span.step].append(span)
    return tuple(
        _step(number, by_step[number], run)
        for number in sorted(by_step)
        if any(not span.action.kind.is_transfer for span in by_step[number])
    )


def _step(number: int, spans: Sequence[Span], run: RecordedRun) -> MeasuredStep:
    start = min(span.start for span in spans if not span.action.kind.is_transfer)
    events: list[list[Event]] = [[] for _ in range(run.schedule.ranks)]
    transfers: list[list[Span]] = [[] for _ in range(run.schedule.ranks)]
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.action.kind.is_transfer:
            transfers[span.rank].append(span._replace(start=span.start - start, end=span.end - start))
        else:
            events[span.rank].append(Event(span.action, span.start - start, span.end - start))
    return MeasuredStep(
        number,
        start,
        tuple(map(tuple, events)),
        tuple(map(tuple, transfers)),
        tuple(_is_whole(row, rank, run.schedule) for rank, row in enumerate(events)),
        tuple(_took(run, rank, number) for rank in range(run.schedule.ranks)),
    )


def _is_whole(row: Sequence[Event], rank: int, schedule: Schedule) -> bool:
    return tuple(event.action for event in row) == schedule.actions[rank]


def _took(run: RecordedRun, rank: int, number: int) -> float | None:
    trace = run.ranks.get(rank)
    if trace is None or number not in trace.steps:
        return None
    start, end = trace.steps[number]
    return end - start
