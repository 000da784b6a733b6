"""The steps of a recorded run, each with the actions of every rank on one axis of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pipegraph.schedule import Event
from pipegraph.tracing.reading.recorded_run import RecordedRun, RecordedSpan


@dataclass(frozen=True)
class MeasuredStep:
    """A step, from the first start to the last end of an action that computes on any rank.

    Attributes:
        start: of the step, in seconds of the run.
        events: of each rank, the actions that compute, in seconds from ``start``.
        transfers: of each rank, its SENDs and RECVs, likewise.
        whole: of each rank, whether it ran exactly the schedule's actions, in order.
        iterations: of each rank, seconds of the step with data and optimizer; None if no trace has them.
    """

    number: int
    start: float
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[tuple[RecordedSpan, ...], ...]
    whole: tuple[bool, ...]
    iterations: tuple[float | None, ...]

    @property
    def makespan(self) -> float:
        return max((row[-1].end for row in self.events if row), default=0.0)

    @property
    def complete(self) -> bool:
        """Return whether all ranks are whole."""
        return all(self.whole)

    @property
    def busy(self) -> tuple[float, ...]:
        """Return the seconds that each rank computed."""
        return tuple(sum(event.end - event.start for event in row) for row in self.events)


def measured_steps(run: RecordedRun) -> tuple[MeasuredStep, ...]:
    """Return the steps in which some rank computed, by their numbers."""
    by_step: dict[int, list[RecordedSpan]] = defaultdict(list)
    for trace in run.ranks.values():
        for span in trace.spans:
            by_step[span.step].append(span)
    return tuple(
        _step(number, by_step[number], run)
        for number in sorted(by_step)
        if any(not span.action.kind.is_transfer for span in by_step[number])
    )


def _step(number: int, spans: Sequence[RecordedSpan], run: RecordedRun) -> MeasuredStep:
    start = min(span.start for span in spans if not span.action.kind.is_transfer)
    ranks = range(run.schedule.ranks)
    events: list[list[Event]] = [[] for _ in ranks]
    transfers: list[list[RecordedSpan]] = [[] for _ in ranks]
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        if span.action.kind.is_transfer:
            transfers[span.rank].append(span._replace(start=span.start - start, end=span.end - start))
        else:
            events[span.rank].append(Event(span.action, span.start - start, span.end - start))
    iterations = [run.ranks[rank].steps.get(number) if rank in run.ranks else None for rank in ranks]
    return MeasuredStep(
        number,
        start,
        tuple(map(tuple, events)),
        tuple(map(tuple, transfers)),
        tuple(tuple(event.action for event in events[rank]) == run.schedule.actions[rank] for rank in ranks),
        tuple(None if each is None else each[1] - each[0] for each in iterations),
    )
