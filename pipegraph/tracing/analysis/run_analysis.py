"""The whole analysis of a recorded run."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pipegraph.errors import PipegraphError
from pipegraph.planner.run_comparison import PredictedAndMeasured
from pipegraph.runtime.processes.rank_grid import PIPELINE
from pipegraph.schedule import CollectiveKind, Kind, Timeline, Times, simulate
from pipegraph.tracing.analysis.advice import Advice, CommandNames, advise
from pipegraph.tracing.analysis.measured_steps import (
    MeasuredStep,
    MeasuredTimes,
    RankIdleTime,
    SimulatedIdleTimes,
    idle_of_step,
    idle_of_timeline,
    mean_idle,
    measured_steps,
    measured_timeline,
    measured_times,
)
from pipegraph.tracing.recorded_run import RecordedRun


@dataclass(frozen=True)
class RunAnalysis:
    """Everything that is known of a run.

    Attributes:
        steps: all that were recorded.
        step_index: the index of the complete step with the median makespan, or else of the first.
        idle_by_step: of each step, the idle time of each whole rank; empty if ranks shared a process, because they then
            wait for each other.
        idle: the mean over steps; if ranks shared a process, that of the ``simulated`` step.
        stages: of each stage, seconds of each kind of action that the schedule has; measured: the median.
        simulated: the schedule with the measured times, hops and collectives included.
        expected: the same with the predicted times; None if nothing was predicted.
        collectives: of each stage, seconds of each kind that was recorded but RESHARD, likewise; () without any.
        critical: the shown step, with what waited for what; None if that is not complete, or ranks shared a process.
    """

    run: RecordedRun
    steps: tuple[MeasuredStep, ...]
    step_index: int
    stages: tuple[Mapping[Kind, PredictedAndMeasured], ...]
    times: MeasuredTimes
    idle_by_step: tuple[tuple[RankIdleTime, ...], ...]
    idle: tuple[RankIdleTime, ...]
    simulated: Timeline
    expected: Timeline | None
    critical: Timeline | None
    advice: Advice
    collectives: tuple[Mapping[CollectiveKind, PredictedAndMeasured], ...]

    @property
    def step(self) -> MeasuredStep:
        """The shown step."""
        return self.steps[self.step_index]

    @cached_property
    def makespan(self) -> float:
        """Return the median makespan of complete steps, or else of all."""
        return _median(self.steps)

    @cached_property
    def iteration(self) -> float | None:
        """Return the median seconds of a step with data and optimizer, on the slowest rank; None if not recorded."""
        iterations = [[seconds for seconds in step.iterations if seconds is not None] for step in self.steps]
        longest = [max(rank_seconds) for rank_seconds in iterations if any(rank_seconds)]
        return statistics.median(longest) if longest else None

    @cached_property
    def bubble(self) -> float | None:
        """Return the mean idle share of ranks, the median over steps; of the simulated step if ranks shared a process.

        None if no rank was recorded whole.
        """
        steps = [self.idle] if self.run.shares_process else self.idle_by_step
        shares = [statistics.fmean(rank.idle / (rank.makespan or 1.0) for rank in ranks) for ranks in steps if ranks]
        return statistics.median(shares) if shares else None

    @property
    def critical_path(self) -> str:
        """Return the critical path as text: of the measured step or, if that has none, of the simulated one."""
        if self.critical is not None:
            return self.critical.describe_critical_path("transfers and overhead")
        return self.simulated.describe_critical_path()


def analyse_run(run: RecordedRun) -> RunAnalysis:
    """Analyse a run. Raises PipegraphError if no action that computes was recorded."""
    steps, schedule, shared_process = measured_steps(run), run.schedule, run.shares_process
    if not steps:
        raise PipegraphError(f"{run.folder} holds no action that computes.", "a longer run, with more active steps.")
    predicted = run.prediction.times if run.prediction else None
    times = measured_times(steps, schedule, predicted, shared_process)
    collective_times = _collective_times(run)
    simulated = simulate(schedule, _with_collectives(times.times, collective_times))
    simulated_idle = SimulatedIdleTimes.from_measured_times(schedule, times)
    idle_by_step = tuple(() if shared_process else idle_of_step(step, simulated_idle) for step in steps)
    complete = sorted((step.makespan, index) for index, step in enumerate(steps) if step.complete)
    step_index = complete[(len(complete) - 1) // 2][1] if complete else 0
    has_critical_path = steps[step_index].complete and not shared_process
    return RunAnalysis(
        run=run,
        steps=steps,
        step_index=step_index,
        stages=_stages(run, times, predicted),
        times=times,
        idle_by_step=idle_by_step,
        idle=idle_of_timeline(simulated, simulated_idle) if shared_process else mean_idle(idle_by_step),
        simulated=simulated,
        expected=run.prediction.timeline if run.prediction else None,
        critical=measured_timeline(steps[step_index], schedule, times.hops) if has_critical_path else None,
        advice=_advice(run, times, steps),
        collectives=_collectives(run, collective_times) if collective_times else (),
    )


def _collectives(
    run: RecordedRun, collective_times: Mapping[tuple[int, CollectiveKind], float]
) -> tuple[dict[CollectiveKind, PredictedAndMeasured], ...]:
    predicted = run.predicted_collectives
    return tuple(
        {
            kind: PredictedAndMeasured(predicted.get((stage, kind)), seconds)
            for (collective_stage, kind), seconds in collective_times.items()
            if collective_stage == stage
        }
        for stage in range(run.schedule.stages)
    )


def _collective_times(run: RecordedRun) -> dict[tuple[int, CollectiveKind], float]:
    """Return the median seconds of each kind of a stage's collectives."""
    durations: dict[tuple[int, CollectiveKind], list[float]] = defaultdict(list)
    for trace in run.ranks.values():
        for recorded in trace.collectives:
            if recorded.collective.kind is not CollectiveKind.RESHARD:
                durations[recorded.collective.stage, recorded.collective.kind].append(recorded.end - recorded.start)
    return {key: statistics.median(seconds) for key, seconds in sorted(durations.items())}


def _with_collectives(times: Times, collective_times: Mapping[tuple[int, CollectiveKind], float]) -> Times:
    unshard, reduce_grad = (
        tuple(collective_times.get((stage, kind), 0.0) for stage in range(times.stages))
        for kind in (CollectiveKind.UNSHARD, CollectiveKind.REDUCE_GRAD)
    )
    return replace(times, unshard=unshard, reduce_grad=reduce_grad)


def _advice(run: RecordedRun, times: MeasuredTimes, steps: Sequence[MeasuredStep]) -> Advice:
    """Advise on changes only if all stages were measured: that is about how they compare."""
    dimensions = (name for name in run.grid.names if name != PIPELINE and run.grid.length(name) > 1)
    mesh = " ".join(f"--{name.replace('_', '-')} {run.grid.length(name)}" for name in dimensions)
    model = _model_named(run.manifest.model.source) if run.manifest else ""
    names = CommandNames(run.info.package_folder, model, mesh)
    step = 0.0 if run.shares_process else _median(steps)
    took = step or simulate(run.schedule, times.times).makespan
    expected = run.prediction.timeline.makespan if run.prediction and run.prediction.timeline else 0.0
    is_comparable = run.info.kernels in ("", "inductor")  # predictions are of compiled kernels
    mispredicted = took / expected if is_comparable and expected > 0 and took > 0 else 1.0
    if times.assumed:
        hindrance = "it takes the times of all stages, and not all were recorded"
        return Advice((), run.shares_process, hindrance, mispredicted, names, run.schedule.stages)
    advice = advise(run.schedule, times.times, run.manifest, times.shares, run.shares_process, step, names)
    return replace(advice, mispredicted=mispredicted)


def _model_named(source: str) -> str:
    """Return a model as a command takes it; empty if it is a configuration in a folder that a package does not name."""
    return "" if source.startswith("hf:") and not Path(source.removeprefix("hf:")).exists() else source


def _stages(
    run: RecordedRun, times: MeasuredTimes, predicted: Times | None
) -> tuple[dict[Kind, PredictedAndMeasured], ...]:
    actions = {(action.stage, action.kind): action for row in run.schedule.actions for action in row}
    return tuple(
        {
            kind: PredictedAndMeasured(
                predicted.of(actions[stage, kind]) if predicted else None, times.medians.get((stage, kind))
            )
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
            if (stage, kind) in actions
        }
        for stage in range(run.schedule.stages)
    )


def _median(steps: Sequence[MeasuredStep]) -> float:
    complete = [step.makespan for step in steps if step.complete]
    return statistics.median(complete or [step.makespan for step in steps])
