"""The steps of a recorded run: all ranks on one axis of time, what actions took, and what they waited for."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from pipegraph.schedule import Event, Kind, Schedule, Timeline, Times, peak_activations, simulate
from pipegraph.schedule.action import BACKWARD
from pipegraph.schedule.stages import Edge
from pipegraph.schedule.timeline import Place
from pipegraph.tracing.recorded_run import RecordedCollective, RecordedRun, RecordedSpan

_StageTimes = tuple[float, float, float]  # F, I, W


@dataclass(frozen=True)
class MeasuredStep:
    """A step, from the first start to the last end of an action that computes, or a collective, on any rank.

    Attributes:
        start: of the step, in seconds of the run.
        events: of each rank, the actions that compute, in seconds from ``start``.
        transfers: of each rank, its SENDs and RECVs, likewise.
        rank_complete: of each rank, whether it ran exactly the schedule's actions, in order.
        iterations: of each rank, seconds of the step with data and optimizer; None if no trace has them.
        collectives: of each rank, the collectives that ran in parallel with its actions, likewise.
    """

    number: int
    start: float
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[tuple[RecordedSpan, ...], ...]
    rank_complete: tuple[bool, ...]
    iterations: tuple[float | None, ...]
    collectives: tuple[tuple[RecordedCollective, ...], ...]

    @property
    def makespan(self) -> float:
        ends = [row[-1].end for row in self.events if row]
        return max([*ends, *(row[-1].end for row in self.collectives if row)], default=0.0)

    @property
    def complete(self) -> bool:
        """Return whether all ranks are whole."""
        return all(self.rank_complete)

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
    ranks = range(run.schedule.ranks)
    collectives = [
        [
            collective
            for collective in (run.ranks[rank].collectives if rank in run.ranks else ())
            if collective.step == number
        ]
        for rank in ranks
    ]
    starts = [span.start for span in spans if not span.action.kind.is_transfer]
    start = min([*starts, *(collective.start for row in collectives for collective in row)])
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
        tuple(None if iteration is None else iteration[1] - iteration[0] for iteration in iterations),
        tuple(
            tuple(collective._replace(start=collective.start - start, end=collective.end - start) for collective in row)
            for row in collectives
        ),
    )


@dataclass(frozen=True)
class MeasuredTimes:
    """Medians over steps and microbatches.

    Attributes:
        medians: seconds of each stage and kind of action.
        times: the same for `simulate`, with hops; without gaps, as ``assumed`` says.
        hops: seconds from the hand-over of a message to its end, of each edge whose messages were waited for.
        shares: how B was divided into I and W if only B was measured; else empty.
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
    steps: Sequence[MeasuredStep], schedule: Schedule, predicted: Times | None, shared_process: bool = False
) -> MeasuredTimes:
    """Return medians of everything that was recorded.

    B is divided into I and W as predicted, or else halved. A stage without a trace takes what was predicted, scaled by
    the error of the other stages, or else their mean. If ranks share a process, no hop is measured.
    """
    durations: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for step in steps:
        for events in step.events:
            for event in events:
                durations[event.action.stage, event.action.kind].append(event.end - event.start)
    medians = {key: statistics.median(seconds) for key, seconds in sorted(durations.items())}
    shares = ""
    if schedule.trains and not any(kind is Kind.I for _, kind in medians):
        shares = f"I and W taken as {'predicted shares' if predicted else 'halves'} of B"
    measured = [_of_stage(stage, durations, predicted) for stage in range(schedule.stages)]
    filled = [_expected(stage, measured, predicted) if row is None else row for stage, row in enumerate(measured)]
    assumed = tuple(
        f"stage {stage} has no trace and takes what the other stages suggest: causes of idle time are a guess"
        for stage, row in enumerate(measured)
        if row is None
    )
    hops = {} if shared_process else _hops(steps, schedule)
    forward, input_grad, weight_grad = zip(*filled, strict=True)
    every = {edge: hops.get(edge, 0.0) for edge in schedule.dependencies.edges}
    return MeasuredTimes(medians, Times(forward, input_grad, weight_grad, hop=every), hops, assumed, shares)


def _of_stage(
    stage: int, durations: Mapping[tuple[int, Kind], Sequence[float]], predicted: Times | None
) -> _StageTimes | None:
    """Return the medians of a stage. If it has both B and I with W, all backwards take their mean time."""
    median = {kind: statistics.median(seconds) for (n, kind), seconds in durations.items() if n == stage and seconds}
    if Kind.F not in median:
        return None
    count = {kind: len(durations[stage, kind]) for kind in median}
    backwards = count.get(Kind.B, 0) + count.get(Kind.W, 0)
    total = sum(count[kind] * median[kind] for kind in median if kind in BACKWARD)
    full_backward, share = total / backwards if backwards else 0.0, 0.5
    if Kind.W in median:
        divided_backward = median.get(Kind.I, 0.0) + median[Kind.W]
        share = median.get(Kind.I, 0.0) / divided_backward if divided_backward else share
    elif predicted is not None and (divided_backward := predicted.input_grad[stage] + predicted.weight_grad[stage]) > 0:
        share = predicted.input_grad[stage] / divided_backward
    return median[Kind.F], full_backward * share, full_backward * (1 - share)


def _expected(stage: int, measured: Sequence[_StageTimes | None], predicted: Times | None) -> _StageTimes:
    """Estimate the times of a stage that was not measured."""
    measured_rows = {n: row for n, row in enumerate(measured) if row is not None}
    if predicted is None:
        forward, input_grad, weight_grad = (
            sum(column) / len(measured_rows) for column in zip(*measured_rows.values(), strict=True)
        )
        return forward, input_grad, weight_grad
    rows = list(zip(predicted.forward, predicted.input_grad, predicted.weight_grad, strict=True))
    expected = sum(sum(rows[n]) for n in measured_rows)
    factor = sum(map(sum, measured_rows.values())) / expected if expected else 1.0
    return rows[stage][0] * factor, rows[stage][1] * factor, rows[stage][2] * factor


def _hops(steps: Sequence[MeasuredStep], schedule: Schedule) -> dict[Edge, float]:
    """Return edge → the median time of the messages that the receiver waited for. Others only came in time."""
    hops: dict[Edge, list[float]] = defaultdict(list)
    for step in steps:
        for send, receive in messages(step):
            if receive.start <= send.end:
                edge = (min(send.action.stage, receive.action.stage), max(send.action.stage, receive.action.stage))
                hops[edge].append(max(receive.end - send.start, 0.0))
    edges = schedule.dependencies.edges
    return {edge: statistics.median(seconds) for edge, seconds in sorted(hops.items()) if edge in edges}


def messages(step: MeasuredStep) -> list[tuple[RecordedSpan, RecordedSpan]]:
    """Return the (SEND, RECV) pairs of a step that have both ends recorded, by when they were handed over."""
    ends = {span.action: span for row in step.transfers for span in row}
    pairs = [
        (span, ends[span.action.partner]) for span in ends.values() if span.action.sends and span.action.partner in ends
    ]
    return sorted(pairs, key=lambda pair: pair[0].start)


def measured_timeline(step: MeasuredStep, schedule: Schedule, hops: Mapping[Edge, float]) -> Timeline:
    """Return a complete step as `simulate` would return it.

    An action waited for the value that came last, if that came after the end of the rank's previous action. A value
    comes its edge's ``hops`` after the end of the action that makes it.
    """
    places: dict[tuple[Kind, int, int], Place] = {}
    for rank, row in enumerate(step.events):
        for position, event in enumerate(row):
            places[_value(event.action.kind), event.action.stage, event.action.microbatch] = (rank, position)
    waited: list[dict[int, Place]] = [{} for _ in step.events]
    needs = schedule.dependencies
    for rank, row in enumerate(step.events):
        for position, event in enumerate(row):
            kind = _value(event.action.kind)
            if kind is Kind.W:
                continue
            stage, microbatch = event.action.stage, event.action.microbatch
            sources = (needs.producers if kind is Kind.F else needs.gradient_consumers).get(stage, ())
            last = row[position - 1].end if position else 0.0
            for source in sources:
                place = places[kind, source, microbatch]
                edge = (min(stage, source), max(stage, source))
                arrival = step.events[place[0]][place[1]].end + hops.get(edge, 0.0)
                if place[0] != rank and arrival > last:
                    last = arrival
                    waited[rank][position] = place
    return Timeline(step.events, peak_activations(schedule), tuple(waited))


def _value(kind: Kind) -> Kind:
    """Return the kind that makes the same: B makes a gradient, as I does."""
    return Kind.I if kind is Kind.B else kind


# ---- idle causes -----------------------------------------------------------------------------------------------------
# Why a rank computes nothing for part of a step: its idle time, split by cause.
#
# The schedule is simulated three times, each time with one more measured quantity:
#
# 1. All stages take equally long and messages take no time. Idle time is then due to the schedule, which has to fill
#    and drain the pipeline (``warmup_and_drain``).
# 2. Every stage takes its medians. The added idle time is ``imbalance``.
# 3. Messages take theirs. The added idle time is ``transfers``.
#
# Idle time of the measured step beyond the third is ``overhead``: the host between two actions, and actions that took
# longer than their medians.
#
# A rank may be idle for less time in a later simulation: the one with the longest stage waits for nobody. A cause gets
# only the time that stays idle in every later simulation (their minimum). So no cause is negative, and the causes add
# up to the measured idle time.


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
