"""Runs: predicted next to measured, and of a recorded run the idle time by cause and advice; as text and data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from pipegraph.errors import one_line
from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.planner.step_prediction import describe_step, pricing_devices
from pipegraph.report.text import Table, fits, table
from pipegraph.schedule import CollectiveKind, Kind, Timeline
from pipegraph.tracing.analysis.measured_steps import RankIdleTime
from pipegraph.tracing.analysis.run_analysis import RunAnalysis
from pipegraph.tracing.merged_trace import MergedTrace, describe_rank, problems_of
from pipegraph.tracing.recorded_run import RecordedRun
from pipegraph.tracing.run_figures import TOGETHER, RunFigures
from pipegraph.units import (
    UNKNOWN,
    TimeFormat,
    format_bytes,
    format_count,
    format_number_of,
    format_percent,
    format_seconds,
)

# ---- predicted and measured ------------------------------------------------------------------------------------------

ERROR = "predicted ÷ measured − 1"
"""What a column called error has."""


_UNKNOWN = PredictedAndMeasured(None, None)


def render_run_comparison(compared: RunComparison, width: int | None = None) -> str:
    """Return tables of stages, step and memory, and the hints."""
    unit = stage_time_format(compared.stages)
    parts = [f"predicted ({compared.basis})" if compared.basis else "nothing was predicted"]
    if compared.measured.steps:
        steps = format_number_of("step", compared.measured.steps)
        parts[0] += f"; measured: medians of {steps}, without the first; times of stages in {unit.unit}"
    else:
        parts[0] += "; memory as measured"
    if compared.measured.step is not None:
        placement = compared.schedule.placement
        parts += [render_stage_times(compared.stages, placement, width), _collectives(compared, width)]
        parts += [_steps(compared)]
    return "\n\n".join(filter(None, [*parts, _memory(compared, width), "\n".join(compared.hints)]))


def run_comparison_dict(compared: RunComparison) -> dict[str, Any]:
    """Return the same as data, for ``--json``: seconds and bytes."""
    return {
        "priced_by": compared.basis or None,
        "measured_steps": compared.measured.steps,
        "processes": compared.measured.processes,
        "stages": [
            {
                "stage": number,
                "rank": compared.schedule.placement[number],
                **{str(kind): asdict(pair) for kind, pair in stage.items()},
            }
            for number, stage in enumerate(compared.stages)
        ],
        "collectives": [
            {"stage": number, **{str(kind): asdict(pair) for kind, pair in stage.items()}}
            for number, stage in enumerate(compared.collectives)
        ],
        "step": asdict(compared.step),
        "bubble": None if compared.bubble is None else asdict(compared.bubble),
        "memory": [
            {
                "rank": number,
                **{kind.replace(" ", "_"): asdict(pair) for kind, pair in rank.items()},
                "together": asdict(allocated),
            }
            for number, (rank, allocated) in enumerate(zip(compared.memory, compared.allocated, strict=True))
        ],
        "allocated": list(compared.measured.allocated) or None,
        "hints": list(compared.hints),
    }


def stage_time_format(stages: Sequence[Mapping[Any, PredictedAndMeasured]]) -> TimeFormat:
    """Return the format of all times of stages."""
    return TimeFormat.of_column(
        figure for stage in stages for pair in stage.values() for figure in (pair.predicted, pair.measured)
    )


def render_stage_times(
    stages: Sequence[Mapping[Any, PredictedAndMeasured]],
    placement: Sequence[int],
    width: int | None = None,
    kind_type: type[Kind] | type[CollectiveKind] = Kind,
) -> str:
    """Return `stage_time_table` if the terminal is wide enough for it; else with a line for each kind of a stage.

    A line below says what an error is, if there is any.
    """
    has_errors = any(pair.error is not None for stage in stages for pair in stage.values())
    legend = f"\nerror: {ERROR}" if has_errors else ""
    side_by_side = table(*stage_time_table(stages, placement, kind_type))
    if fits(side_by_side, width):
        return side_by_side + legend
    unit, rows = stage_time_format(stages), []
    for number, (stage, rank) in enumerate(zip(stages, placement, strict=True)):
        names = [str(number), str(rank)]
        for kind, pair in stage.items():
            figures = [unit.number(pair.predicted), unit.number(pair.measured), prediction_error(pair)]
            rows.append([*names, str(kind), *figures])
            names = ["", ""]
    return table(["stage", "rank", "", "predicted", "measured", "error"], rows, width) + legend


def stage_time_table(
    stages: Sequence[Mapping[Any, PredictedAndMeasured]],
    placement: Sequence[int],
    kind_type: type[Kind] | type[CollectiveKind] = Kind,
) -> Table:
    """Return headers and rows: the times of each stage, and the error of each prediction."""
    unit = stage_time_format(stages)
    kinds = [kind for kind in kind_type if any(kind in stage for stage in stages)]
    headers, rows = ["stage", "rank"], []
    for kind in kinds:
        headers += [f"{kind} predicted", "measured", "error"]
    for number, (stage, rank) in enumerate(zip(stages, placement, strict=True)):
        row = [str(number), str(rank)]
        for pair in (stage.get(kind, PredictedAndMeasured(None, None)) for kind in kinds):
            row += [unit.number(pair.predicted), unit.number(pair.measured), prediction_error(pair)]
        rows.append(row)
    return headers, rows


def _collectives(compared: RunComparison, width: int | None) -> str:
    """Return the table of collectives, which run in parallel with the stages; empty without collectives."""
    stages = compared.collectives
    if not stages:
        return ""
    unit = stage_time_format(stages).unit
    return f"collectives, in {unit}\n{render_stage_times(stages, compared.schedule.placement, width, CollectiveKind)}"


def _steps(compared: RunComparison) -> str:
    step, bubble = compared.step, compared.bubble
    unit = TimeFormat.of_column([step.predicted, step.measured])
    name = "step" if bubble else f"step, {compared.schedule.ranks} ranks in turn"
    rows = [[name, unit.text(step.predicted), unit.text(step.measured), prediction_error(step)]]
    if bubble is not None:
        rows.append(["bubble", format_percent(bubble.predicted), format_percent(bubble.measured), ""])
    return table(["", "predicted", "measured", "error"], rows)


def _memory(compared: RunComparison, width: int | None) -> str:
    """Return the bytes of each rank by kind, predicted and measured."""
    ranks = [{**rank, TOGETHER: total} for rank, total in zip(compared.memory, compared.allocated, strict=True)]
    headers, rows = memory_of_ranks(ranks)
    peaks, notes = compared.measured.allocated, []
    if peaks and len(peaks) != len(compared.memory):
        notes = [f"allocated on the GPU by all ranks together, at the most: {format_bytes(sum(peaks))}"]
    elif peaks:
        notes = ["together, as measured: what torch had allocated on the GPU, at the most"]
    return "\n".join([table(headers, rows, width, headers[:2:-1]), *notes])


def memory_of_ranks(ranks: Sequence[Mapping[str, PredictedAndMeasured]]) -> Table:
    """Return headers and rows: the bytes of each kind on each rank, predicted and measured; kinds that are 0 left out.

    Args:
        ranks: the bytes of each, by kind.
    """
    kinds = list(dict.fromkeys(kind for rank in ranks for kind in rank if kind != TOGETHER))
    is_predicted = any(pair.predicted is not None for rank in ranks for kind, pair in rank.items() if kind != TOGETHER)
    headers, columns = ["memory"], [[*kinds, TOGETHER]]
    for number, rank in enumerate(ranks):
        pairs = [rank.get(kind, _UNKNOWN) for kind in (*kinds, TOGETHER)]
        if is_predicted:
            headers.append(f"rank {number} predicted")
            columns.append([format_bytes(pair.predicted) for pair in pairs])
        headers.append(f"rank {number} measured")
        columns.append([format_bytes(pair.measured) for pair in pairs])
    rows = [list(row) for row in zip(*columns, strict=True) if {*row[1:]} - {UNKNOWN, format_bytes(0)}]
    return headers, rows


def prediction_error(pair: PredictedAndMeasured) -> str:
    """Return the error of a prediction as a part of what was measured: ``−12.3 %``; empty if one is not known."""
    return "" if pair.error is None else format_percent(pair.error, signed=True)


# ---- recorded run ----------------------------------------------------------------------------------------------------

CAUSES = {
    "warm-up and drain": (
        "idle however fast the stages and links are: the schedule has to fill the pipeline and to drain it"
    ),
    "imbalance": "idle because stages take longer than others",
    "transfers": "idle until a message has come",
    "overhead": "idle beyond that: the host between two actions, and actions that took longer than their medians",
}
"""Name → meaning, in the order of `IdleCauses`."""


def render_trace_report(analysis: RunAnalysis, width: int | None = None) -> str:
    """Return the text of ``pipegraph trace report``."""
    parts = [heading(analysis), _step_line(analysis)]
    stages = render_stage_times(analysis.stages, analysis.run.schedule.placement, width)
    parts += [f"a microbatch of each stage, in {stage_time_format(analysis.stages).unit} (medians)\n{stages}"]
    if analysis.collectives:
        collectives = render_stage_times(analysis.collectives, analysis.run.schedule.placement, width, CollectiveKind)
        unit = stage_time_format(analysis.collectives).unit
        parts.append(f"collectives of each stage, in parallel with its actions, in {unit} (medians)\n{collectives}")
    if analysis.idle:
        step_name = "the simulated step" if analysis.run.shares_process else "a step (mean)"
        unit = idle_times(analysis).unit
        idle = table(*idle_table(analysis), width, ("overhead", "transfers", "imbalance", "warm-up and drain"))
        parts.append(f"what each rank does in {step_name}, in {unit}, and why it is idle\n{idle}")
    else:
        parts.append("no rank was recorded whole, so that its idle time is not known")
    if (figures := analysis.run.figures) is not None:
        headers, rows = memory_of_ranks(figures.memory_pairs)
        parts += [*loss_lines(figures), table(headers, rows, width, headers[:2:-1])]
    parts += [f"critical path of {critical_step(analysis)}\n  {analysis.critical_path}"]
    advice = analysis.advice
    lines = [f"  {one_line(advice.sentence)}", *(f"    {one_line(command)}" for command in advice.commands)]
    parts += ["\n".join(["advice", *lines]), "\n".join(map(one_line, remarks(analysis)))]
    return "\n\n".join(filter(None, parts))


def heading(analysis: RunAnalysis) -> str:
    """Return what ran, and where: ``1f1b with 8 microbatches on 2 ranks; 2 processes on cpu, kernels: inductor``."""
    run, info = analysis.run, analysis.run.info
    description = describe_step(run.schedule.name, run.schedule.microbatches, run.schedule.ranks)
    description += f" at {run.place}" if run.place else ""
    where = "" if info.processes is None else format_number_of("process", info.processes)
    where += f" on {info.device}" if where and info.device else ""
    details = ", ".join(filter(None, [where, f"kernels: {info.kernels}" if info.kernels else ""]))
    return one_line(f"{run.folder.name}: {description}{f'; {details}' if details else ''}")


def _step_line(analysis: RunAnalysis) -> str:
    """Return what a step took, and what was predicted."""
    count = len(analysis.steps)
    if analysis.run.shares_process:
        unit = TimeFormat.for_seconds(analysis.simulated.makespan)
        took = unit.text(analysis.simulated.makespan)
        line = f"the ranks took turns in one process; a step with a process each, simulated with measured times: {took}"
    else:
        unit = TimeFormat.for_seconds(analysis.makespan)
        statistic = f"median of {count} steps" if count > 1 else "one step"
        line = f"a step took {unit.text(analysis.makespan)} from its first action to its last ({statistic})"
    if analysis.expected is not None:
        line += f"; predicted {unit.text(analysis.expected.makespan)}"
    if analysis.iteration is not None:
        line += f"; with data and optimizer {unit.text(analysis.iteration)}"
    if analysis.bubble is not None:
        line += f"\nbubble {format_percent(analysis.bubble)}"
        line += "" if analysis.expected is None else f"; predicted {format_percent(analysis.expected.bubble)}"
    return line


def loss_lines(figures: RunFigures) -> Iterator[str]:
    """Yield a line on the losses of a run, its tokens and its floating-point operations; none without losses."""
    losses = [loss for loss in figures.losses if loss.loss is not None]
    if not losses:
        return
    first, last = losses[0], losses[-1]
    line = f"loss {first.loss:.6g} at step {first.step}"
    line += f", {last.loss:.6g} at step {last.step}" if last is not first else ""
    if figures.tokens_per_second:
        line += f"; {figures.tokens_per_second:,.0f} tokens/s with data, optimizer and checkpoints"
    if figures.flops_per_second:
        line += f"; {format_count(figures.flops_per_second, 'FLOP/s')} of the model in a step"
    if figures.flops_per_second and figures.peak_flops:
        share = format_percent(figures.flops_per_second / figures.peak_flops)
        line += f", {share} of the peak of the devices (MFU)"
    yield line


def critical_step(analysis: RunAnalysis) -> str:
    """Return the step whose critical path is shown."""
    return "the simulated step" if analysis.critical is None else f"step {analysis.step.number}"


def remarks(analysis: RunAnalysis) -> Iterator[str]:
    """Yield notes and problems: what was chosen, assumed, and is wrong; and how well the ranks' clocks agree."""
    run = analysis.run
    yield from (f"note: {note}" for note in run.notes)
    if run.shares_process:
        yield "note: ranks in one process wait for each other, so the bubble is that of the simulated step"
    elif run.clock_error is not None and len(run.ranks) > 1:
        yield f"note: the ranks' clocks agree to ± {format_seconds(run.clock_error)}"
        if any(hop < run.clock_error for hop in analysis.times.hops.values()):
            yield "note: messages took less than that, so transfers and overhead can hardly be separated"
    yield from (f"note: {assumption}" for assumption in analysis.times.assumed)
    if analysis.expected is not None and run.manifest is not None and pricing_devices(run.manifest) is None:
        yield "note: the links of the profile that priced the package are not known: predicted messages take no time"
    if (incomplete := [str(step.number) for step in analysis.steps if not step.complete]) and not run.problems:
        steps = f"step{'s' if len(incomplete) > 1 else ''} {', '.join(incomplete)}"
        yield f"problem: of {steps} actions are missing or out of the schedule's order"
    yield from (f"problem: {problem}" for problem in run.problems)


def idle_times(analysis: RunAnalysis) -> TimeFormat:
    """Return the format of `idle_table`."""
    return TimeFormat.of_column(rank.makespan for rank in analysis.idle)


def idle_table(analysis: RunAnalysis) -> Table:
    """Return what each rank does in a step, and why it is idle.

    Transfers and overhead are not known of a step that was simulated without them.
    """
    unit, rows = idle_times(analysis), []
    for rank in analysis.idle:
        causes = [unit.number(cause) for cause in astuple(rank.causes)]
        if analysis.run.shares_process:
            causes[2:] = [UNKNOWN, UNKNOWN]
        part = format_percent(rank.idle / rank.makespan if rank.makespan else 0.0)
        rows.append([str(rank.rank), unit.number(rank.busy), unit.number(rank.idle), part, *causes])
    return ["rank", "computes", "idle", "idle share", *CAUSES], rows


def trace_report_dict(analysis: RunAnalysis) -> dict[str, Any]:
    """Return the same as data, for ``--json``: seconds."""
    run, info = analysis.run, analysis.run.info
    critical = analysis.critical or analysis.simulated
    return {
        "run": {
            "folder": str(run.folder),
            "id": info.run or None,
            "package": info.package or None,
            "schedule": run.schedule.name,
            "ranks": run.schedule.ranks,
            "microbatches": run.schedule.microbatches,
            "placement": list(run.schedule.placement),
            "mesh": dict(zip(run.grid.names, run.grid.shape, strict=True)),
            "pipeline": list(run.line),
            "processes": info.processes,
            "device": info.device or None,
            "kernels": info.kernels or None,
        },
        "problems": list(run.problems),
        "notes": [*run.notes, *analysis.times.assumed],
        "clocks": _clocks([run]),
        "takes_turns": run.shares_process,
        "step": {
            "measured": None if run.shares_process else analysis.makespan,
            "simulated": analysis.simulated.makespan,
            "predicted": None if analysis.expected is None else analysis.expected.makespan,
            "with_data_and_optimizer": analysis.iteration,
        },
        "stages": [
            {"stage": stage, "rank": run.schedule.placement[stage], "kind": str(kind), **asdict(times)}
            for stage, kinds in enumerate(analysis.stages)
            for kind, times in kinds.items()
        ],
        "collectives": [
            {"stage": stage, "kind": str(kind), **asdict(times)}
            for stage, kinds in enumerate(analysis.collectives)
            for kind, times in kinds.items()
        ],
        "hops": [{"from": a, "to": b, "seconds": hop} for (a, b), hop in analysis.times.hops.items()],
        "bubble": [_idle_dict(rank) for rank in analysis.idle],
        "figures": None if run.figures is None else to_builtins(run.figures),
        "steps": [
            {
                "step": step.number,
                "complete": step.complete,
                "makespan": step.makespan,
                "ranks": [
                    [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
                    for row in step.events
                ],
                "bubble": [_idle_dict(rank) for rank in idle],
            }
            for step, idle in zip(analysis.steps, analysis.idle_by_step, strict=True)
        ],
        "critical_path": {
            "step": None if analysis.critical is None else analysis.step.number,
            "actions": [str(event.action) for event in critical.critical_path],
            "text": analysis.critical_path,
        },
        "advice": {
            "sentence": analysis.advice.sentence,
            "commands": analysis.advice.commands,
            "candidates": [
                {
                    "change": candidate.change,
                    "gain": candidate.gain,
                    "of": "step" if candidate.same_batch else "microbatch",
                    "assuming": candidate.assuming or None,
                }
                for candidate in analysis.advice.changes
            ],
        },
    }


def render_merge(
    runs: Sequence[RecordedRun], file: Path, merged: MergedTrace, expected: Timeline | None, width: int | None = None
) -> str:
    """Return the text of ``pipegraph trace merge``: what was written, and how well the clocks agree."""
    parts = [f"wrote {file}: {merged.slices} slices, {merged.flows} messages"]
    if expected is None:
        parts[0] += "; the package has no predicted times"
    rows = {}
    for run in runs:
        for rank, trace in run.ranks.items():
            error = "not known" if trace.clock.error is None else f"± {format_seconds(trace.clock.error)}"
            offset, number = format_seconds(trace.clock.offset), run.line[rank]
            rows[number] = [describe_rank(run, rank), str(len(trace.spans)), offset, error if number else ""]
    parts.append(table(["", "actions", "clock offset", "known to"], [rows[number] for number in sorted(rows)], width))
    notes = [f"note: {note}" for note in runs[0].chosen]
    if merged.early:
        notes.append(f"problem: {merged.early} messages arrive before they were sent: the clocks are further off")
    if merged.left_out:
        notes.append(f"note: {merged.left_out} operations that begin in one slice and end in another were left out")
    notes += [f"problem: {problem}" for problem in problems_of(runs)]
    return "\n\n".join(filter(None, [*parts, "\n".join(map(one_line, notes))]))


def merge_dict(
    runs: Sequence[RecordedRun], file: Path, merged: MergedTrace, expected: Timeline | None
) -> dict[str, Any]:
    """Return the same as data, for ``--json``: seconds."""
    return {
        "file": str(file),
        "run": str(runs[0].folder),
        **asdict(merged),
        "predicted": expected is not None,
        "clocks": _clocks(runs),
        "problems": problems_of(runs),
        "notes": list(runs[0].chosen),
    }


def _clocks(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    traces = sorted((run.line[rank], trace.clock) for run in runs for rank, trace in run.ranks.items())
    return [{"rank": rank, "offset": clock.offset, "error": clock.error} for rank, clock in traces]


def _idle_dict(rank: RankIdleTime) -> dict[str, float]:
    return {"rank": rank.rank, "makespan": rank.makespan, "busy": rank.busy, "idle": rank.idle, **asdict(rank.causes)}
