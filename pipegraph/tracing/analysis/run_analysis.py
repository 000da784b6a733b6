"""All that a recorded run tells, together."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipegraph.errors import PipegraphError
from pipegraph.schedule import Kind, Timeline, Times, simulate
from pipegraph.tracing.analysis.advice import Advice, advise
from pipegraph.tracing.analysis.critical_path import measured_timeline
from pipegraph.tracing.analysis.idle_causes import RankBubble, Worlds, mean_bubbles, simulated_bubbles, step_bubbles
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_steps
from pipegraph.tracing.analysis.measured_times import MeasuredTimes, measured_times
from pipegraph.tracing.reading.recorded_run import RecordedRun


@dataclass(frozen=True)
class StageKind:
    """Seconds of one kind of action on one stage, predicted and measured (the median); None where not known."""

    stage: int
    rank: int
    kind: Kind
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class Analysis:
    """What a run tells.

    Attributes:
        steps: all that were recorded.
        shown: the index of the complete step with the median makespan, or else of the first.
        bubbles: of each step and each of its whole ranks; empty where ranks took turns, and none was idle for a cause.
        bubble: the mean over steps; where ranks took turns, that of the ``simulated`` step.
        simulated: the schedule with the measured times, hops included.
        expected: the same with the predicted times; None where nothing was predicted.
        critical: the shown step, with what waited for what; where that is not complete, or ranks took turns, None.
    """

    run: RecordedRun
    steps: tuple[MeasuredStep, ...]
    shown: int
    stages: tuple[StageKind, ...]
    times: MeasuredTimes
    predicted: Times | None
    bubbles: tuple[tuple[RankBubble, ...], ...]
    bubble: tuple[RankBubble, ...]
    simulated: Timeline
    expected: Timeline | None
    critical: Timeline | None
    advice: Advice

    @property
    def step(self) -> MeasuredStep:
        """The shown one."""
        return self.steps[self.shown]

    @cached_property
    def makespan(self) -> float:
        """The median over complete steps, or else over all."""
        return _median(self.steps)

    @cached_property
    def took(self) -> float | None:
        """The median of a whole step of the slowest rank, with data and optimizer; None where no trace says so."""
        found = [max(took for took in step.took if took is not None) for step in self.steps if any(step.took)]
        return statistics.median(found) if found else None

    @property
    def critical_path(self) -> str:
        """In words: of the measured step or, where that has none, of the simulated one."""
        if self.critical is not None:
            return self.critical.describe_critical_path("transfers and overhead")
        return self.simulated.describe_critical_path()


def analyse(run: RecordedRun) -> Analysis:
    """Look at everything. Raises PipegraphError where no action that computes was recorded."""
    steps, schedule = measured_steps(run), run.schedule
    if not steps:
        raise PipegraphError(f"{run.folder} holds no action that computes.\nTry: a longer run, with more active steps.")
    predicted = run.prediction.times if run.prediction else None
    in_turn = run.takes_turns
    times = measured_times(steps, schedule, predicted, in_turn)
    simulated = simulate(schedule, times.times)
    worlds = Worlds.of(schedule, times)
    bubbles = tuple(() if in_turn else step_bubbles(step, worlds) for step in steps)
    shown = _shown(steps)
    tells = steps[shown].complete and not in_turn
    return Analysis(
        run=run,
        steps=steps,
        shown=shown,
        stages=_stages(run, times, predicted),
        times=times,
        predicted=predicted,
        bubbles=bubbles,
        bubble=simulated_bubbles(simulated, worlds) if in_turn else mean_bubbles(bubbles),
        simulated=simulated,
        expected=run.prediction.timeline if run.prediction else None,
        critical=measured_timeline(steps[shown], schedule, times.hops) if tells else None,
        advice=_advice(run, times, steps),
    )


def _advice(run: RecordedRun, times: MeasuredTimes, steps: Sequence[MeasuredStep]) -> Advice:
    """None that rests on what a stage is only expected to take: how stages compare is what it is about."""
    if times.assumed:
        return Advice((), run.takes_turns, "it takes the times of all stages, and not all were recorded")
    step = 0.0 if run.takes_turns else _median(steps)
    return advise(run.schedule, times.times, run.manifest, times.shares, run.takes_turns, step)


def _stages(run: RecordedRun, times: MeasuredTimes, predicted: Times | None) -> tuple[StageKind, ...]:
    actions = {(action.stage, action.kind): action for row in run.schedule.actions for action in row}
    return tuple(
        StageKind(
            stage,
            run.schedule.placement[stage],
            kind,
            None if predicted is None else predicted.of(actions[stage, kind]),
            times.medians.get((stage, kind)),
        )
        for stage, kind in sorted(actions, key=lambda key: (key[0], "FBIW".index(key[1])))
    )


def _complete(steps: Sequence[MeasuredStep]) -> Sequence[MeasuredStep]:
    return [step for step in steps if step.complete] or steps


def _median(steps: Sequence[MeasuredStep]) -> float:
    return statistics.median(step.makespan for step in _complete(steps))


def _shown(steps: Sequence[MeasuredStep]) -> int:
    by_length: Mapping[int, float] = {n: step.makespan for n, step in enumerate(steps) if step.complete}
    ordered = sorted(by_length, key=lambda n: by_length[n])
    return ordered[(len(ordered) - 1) // 2] if ordered else 0
