"""How long actions and transfers took, for simulating what might have been."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipegraph.schedule import Action, Kind, Schedule, Times
from pipegraph.schedule.action import BACKWARD
from pipegraph.schedule.dependencies import Edge
from pipegraph.tracing.analysis.measured_steps import MeasuredStep
from pipegraph.tracing.reading.recorded_run import Span


@dataclass(frozen=True)
class MeasuredTimes:
    """Medians over steps and microbatches.

    Attributes:
        medians: seconds of each stage and kind of action.
        times: the same for `simulate`, with hops; filled up as ``assumed`` says.
        hops: seconds from the hand-over of a message to its end, of each edge whose messages were waited for.
        shares: how I and W were told apart where only B was measured; empty where they were measured.
    """

    medians: Mapping[tuple[int, Kind], float]
    times: Times
    hops: Mapping[Edge, float]
    assumed: tuple[str, ...]
    shares: str = ""

    @property
    def without_links(self) -> Times:
        return replace(self.times, hop=0.0, transfer=0.0)


def measured_times(
    steps: Sequence[MeasuredStep], schedule: Schedule, predicted: Times | None, in_turn: bool = False
) -> MeasuredTimes:
    """Medians of everything that was recorded.

    A B is shared out to I and W as predicted, or else halved. A stage that no trace shows takes what was predicted,
    corrected as the others have to be, or else the mean of the others. Of ranks that take turns no hop is measured.
    """
    taken: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for step in steps:
        for events in step.events:
            for event in events:
                taken[event.action.stage, event.action.kind].append(event.end - event.start)
    medians = {key: statistics.median(found) for key, found in sorted(taken.items())}
    assumed: list[str] = []
    shares = ""
    rows = [_of_stage(stage, taken, predicted) for stage in range(schedule.stages)]
    known = [row for row in rows if row is not None]
    if schedule.trains and (Kind.I not in {kind for _, kind in medians}):
        shares = f"I and W taken as {'predicted shares' if predicted else 'halves'} of B"
    for stage, row in enumerate(rows):
        if row is None:
            rows[stage] = _filled(stage, rows, known, predicted)
            assumed.append(
                f"stage {stage}, which no trace shows, takes what others let expect: causes of idle time are a guess"
            )
    hops = {} if in_turn else _hops(steps, schedule)
    forward, input_grad, weight_grad = zip(*(row for row in rows if row is not None), strict=True)
    every = {edge: hops.get(edge, 0.0) for edge in schedule.dependencies.edges}
    return MeasuredTimes(medians, Times(forward, input_grad, weight_grad, hop=every), hops, tuple(assumed), shares)


_Row = tuple[float, float, float]  # F, I, W


def _of_stage(stage: int, taken: Mapping[tuple[int, Kind], Sequence[float]], predicted: Times | None) -> _Row | None:
    """Where some backwards are one B and others I and W, all take their mean: the time of the stage stays the same."""
    median = {kind: statistics.median(found) for (n, kind), found in taken.items() if n == stage and found}
    if Kind.F not in median:
        return None
    count = {kind: len(taken[stage, kind]) for kind in median}
    backwards = count.get(Kind.B, 0) + count.get(Kind.W, 0)
    total = sum(count[kind] * median[kind] for kind in median if kind in BACKWARD)
    whole, share = total / backwards if backwards else 0.0, 0.5
    if Kind.W in median:
        both = median.get(Kind.I, 0.0) + median[Kind.W]
        share = median.get(Kind.I, 0.0) / both if both else share
    elif predicted is not None and (both := predicted.input_grad[stage] + predicted.weight_grad[stage]) > 0:
        share = predicted.input_grad[stage] / both
    return median[Kind.F], whole * share, whole * (1 - share)


def _filled(stage: int, rows: Sequence[_Row | None], known: Sequence[_Row], predicted: Times | None) -> _Row:
    """The expected times of a stage that was not measured."""
    if predicted is None:
        mean = [sum(column) / len(known) for column in zip(*known, strict=True)]
        return mean[0], mean[1], mean[2]
    told = list(zip(predicted.forward, predicted.input_grad, predicted.weight_grad, strict=True))
    expected = sum(sum(told[n]) for n, row in enumerate(rows) if row is not None)
    factor = sum(map(sum, known)) / expected if expected else 1.0
    return told[stage][0] * factor, told[stage][1] * factor, told[stage][2] * factor


def _hops(steps: Sequence[MeasuredStep], schedule: Schedule) -> dict[Edge, float]:
    """Of each edge, the median time of the messages that were waited for when they were handed over.

    Of the others nothing is known but that they came in time.
    """
    found: dict[Edge, list[float]] = defaultdict(list)
    for step in steps:
        for send, receive in messages(step):
            if receive.start <= send.end:
                edge = (min(send.action.stage, receive.action.stage), max(send.action.stage, receive.action.stage))
                found[edge].append(max(receive.end - send.start, 0.0))
    return {
        edge: statistics.median(taken) for edge, taken in sorted(found.items()) if edge in schedule.dependencies.edges
    }


def messages(step: MeasuredStep) -> list[tuple[Span, Span]]:
    """The (SEND, RECV) pairs of a step that have both ends recorded, by when they were handed over."""
    ends: dict[Action, Span] = {span.action: span for row in step.transfers for span in row}
    pairs = [
        (span, ends[span.action.partner]) for span in ends.values() if span.action.sends and span.action.partner in ends
    ]
    return sorted(pairs, key=lambda pair: pair[0].start)
