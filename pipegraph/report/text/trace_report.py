"""A recorded run for people and as data: measured against predicted, the bubble by cause, and what to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from pipegraph.errors import one_line
from pipegraph.planner.package_prediction import describe_step, pricing_profile
from pipegraph.report.text.tables import table
from pipegraph.schedule import Event, Kind
from pipegraph.tracing.analysis.idle_causes import RankBubble
from pipegraph.tracing.analysis.measured_steps import MeasuredStep
from pipegraph.tracing.analysis.run_analysis import Analysis, StageKind
from pipegraph.units import UNKNOWN, TimeFormat, format_percent, format_seconds

CAUSES = ("warm-up and drain", "imbalance", "transfers", "overhead")
"""as `Causes` has them"""
MEANING_OF_CAUSES = (
    "idle however fast the stages and links are: the schedule has to fill the pipeline and to drain it",
    "idle because stages take longer than others",
    "idle until a message has come",
    "idle beyond that: the host between two actions, and actions that took longer than their medians",
)


def told_run(analysis: Analysis) -> str:
    """The text of ``pipegraph trace report``."""
    parts = [heading(analysis), step_line(analysis), _stages(analysis), _bubbles(analysis)]
    parts += [f"critical path of {critical_of(analysis)}\n  {analysis.critical_path}"]
    parts += [f"advice\n  {one_line(analysis.advice.sentence)}", "\n".join(map(one_line, remarks(analysis)))]
    return "\n\n".join(filter(None, parts))


def heading(analysis: Analysis) -> str:
    """What ran, and where: ``1f1b with 8 microbatches on 2 ranks; 2 processes on cpu, kernels: inductor``."""
    run, info = analysis.run, analysis.run.info
    what = describe_step(run.schedule.name, run.schedule.microbatches, run.schedule.ranks)
    processes = "" if info.processes is None else f"{info.processes} process{'' if info.processes == 1 else 'es'}"
    where = f"{processes} on {info.device}" if processes and info.device else processes
    kernels = f"kernels: {info.kernels}" if info.kernels else ""
    said = ", ".join(filter(None, [where, kernels]))
    return one_line(f"{run.folder.name}: {what}{f'; {said}' if said else ''}")


def step_line(analysis: Analysis) -> str:
    """What a step took beside what was expected of it."""
    count = len(analysis.steps)
    of = f"median of {count} steps" if count > 1 else "one step"
    if analysis.run.takes_turns:
        unit = TimeFormat.of(analysis.simulated.makespan)
        said = (
            "the ranks took turns in one process; one step with a process each, simulated with what the actions took: "
        )
        said += unit.text(analysis.simulated.makespan)
    else:
        unit = TimeFormat.of(analysis.makespan)
        said = f"a step took {unit.text(analysis.makespan)} from its first action to its last ({of})"
    if analysis.expected is not None:
        said += f"; predicted {unit.text(analysis.expected.makespan)}"
    if analysis.took is not None:
        said += f"; with data and optimizer {unit.text(analysis.took)}"
    return said


def critical_of(analysis: Analysis) -> str:
    return "the simulated step" if analysis.critical is None else f"step {analysis.step.number}"


def remarks(analysis: Analysis) -> Iterator[str]:
    """What was chosen, assumed, and is wrong; how well the ranks' times agree."""
    run = analysis.run
    yield from (f"note: {note}" for note in run.notes)
    if run.takes_turns:
        yield "note: ranks that take turns wait for each other, which is no bubble: theirs is of the simulated step"
    elif run.clock_error is not None and len(run.ranks) > 1:
        yield f"note: the ranks' clocks agree to ± {format_seconds(run.clock_error)}"
        if any(hop < run.clock_error for hop in analysis.times.hops.values()):
            yield "note: messages took less than that, so that transfers and overhead are hardly told apart"
    yield from (f"note: {each}" for each in analysis.times.assumed)
    if analysis.expected is not None and run.manifest is not None and pricing_profile(run.manifest) is None:
        yield "note: the links are not known by which the package was priced: predicted messages take no time"
    if (incomplete := [step.number for step in analysis.steps if not step.complete]) and not run.problems:
        yield f"problem: of {_counted(incomplete)} actions are missing or out of the schedule's order"
    yield from (f"problem: {problem}" for problem in run.problems)


def _counted(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def time_unit(analysis: Analysis) -> TimeFormat:
    """Of the times of stages."""
    return TimeFormat.of_column(figure for each in analysis.stages for figure in (each.predicted, each.measured))


def error_of(predicted: float | None, measured: float | None) -> str:
    """Of the prediction, as a part of what was measured: ``−12.3 %``."""
    if not predicted or not measured:
        return ""
    return format_percent(predicted / measured - 1, signed=True)


def _stages(analysis: Analysis) -> str:
    unit = time_unit(analysis)
    kinds = [kind for kind in Kind if any(each.kind is kind for each in analysis.stages)]
    headers = ["stage", "rank"]
    for kind in kinds:
        headers += [f"{kind} predicted", "measured", "error"]
    found = {(each.stage, each.kind): each for each in analysis.stages}
    rows = []
    for stage, rank in enumerate(analysis.run.schedule.placement):
        row = [str(stage), str(rank)]
        for kind in kinds:
            row += _cells(found.get((stage, kind)), unit)
        rows.append(row)
    return f"a microbatch of each stage, in {unit.unit} (medians)\n{table(headers, rows)}"


def _cells(each: StageKind | None, unit: TimeFormat) -> list[str]:
    if each is None:
        return [UNKNOWN, UNKNOWN, ""]
    figures = [unit.number(figure) for figure in (each.predicted, each.measured)]
    return [*figures, error_of(each.predicted, each.measured)]


def _bubbles(analysis: Analysis) -> str:
    if not analysis.bubble:
        return "no rank was recorded whole, so that no bubble can be told"
    unit = TimeFormat.of_column(bubble.makespan for bubble in analysis.bubble)
    rows = [
        [
            str(bubble.rank),
            unit.number(bubble.busy),
            unit.number(bubble.idle),
            format_percent(bubble.idle / bubble.makespan if bubble.makespan else 0.0),
            *cause_cells(analysis, bubble, unit),
        ]
        for bubble in analysis.bubble
    ]
    of = "the simulated step" if analysis.run.takes_turns else "a step (mean)"
    headers = ["rank", "computes", "idle", "of the step", *CAUSES]
    return f"what each rank does in {of}, in {unit.unit}, and why it is idle\n{table(headers, rows)}"


def cause_cells(analysis: Analysis, bubble: RankBubble, unit: TimeFormat) -> list[str]:
    """The causes as numbers; of a step that was simulated without them, transfers and overhead are not known."""
    known = 2 if analysis.run.takes_turns else len(CAUSES)
    figures = [unit.number(cause) for cause in astuple(bubble.causes)]
    return [*figures[:known], *[UNKNOWN] * (len(CAUSES) - known)]


def run_dict(analysis: Analysis) -> dict[str, Any]:
    """The same as data, for ``--json``: seconds."""
    run, info = analysis.run, analysis.run.info
    return {
        "run": {
            "folder": str(run.folder),
            "id": info.run or None,
            "package": info.package or None,
            "schedule": run.schedule.name,
            "ranks": run.schedule.ranks,
            "microbatches": run.schedule.microbatches,
            "placement": list(run.schedule.placement),
            "processes": info.processes,
            "device": info.device or None,
            "kernels": info.kernels or None,
        },
        "problems": list(run.problems),
        "notes": [*run.notes, *analysis.times.assumed],
        "clocks": [
            {"rank": rank, "offset": trace.clock.offset, "error": trace.clock.error}
            for rank, trace in sorted(run.ranks.items())
        ],
        "takes_turns": run.takes_turns,
        "step": {
            "measured": None if run.takes_turns else analysis.makespan,
            "simulated": analysis.simulated.makespan,
            "predicted": None if analysis.expected is None else analysis.expected.makespan,
            "with_data_and_optimizer": analysis.took,
        },
        "stages": [
            {
                "stage": each.stage,
                "rank": each.rank,
                "kind": str(each.kind),
                "predicted": each.predicted,
                "measured": each.measured,
            }
            for each in analysis.stages
        ],
        "hops": [{"from": a, "to": b, "seconds": hop} for (a, b), hop in analysis.times.hops.items()],
        "bubble": [bubble_dict(bubble) for bubble in analysis.bubble],
        "steps": [
            {**_step_dict(step), "bubble": [bubble_dict(bubble) for bubble in bubbles]}
            for step, bubbles in zip(analysis.steps, analysis.bubbles, strict=True)
        ],
        "critical_path": _critical_dict(analysis),
        "advice": {"sentence": analysis.advice.sentence, "candidates": _candidates(analysis)},
    }


def _critical_dict(analysis: Analysis) -> dict[str, Any]:
    measured = analysis.critical
    return {
        "step": None if measured is None else analysis.step.number,
        "actions": [str(event.action) for event in (measured or analysis.simulated).critical_path],
        "text": analysis.critical_path,
    }


def _candidates(analysis: Analysis) -> list[dict[str, Any]]:
    return [
        {
            "change": each.change,
            "gain": each.gain,
            "of": "step" if each.same_batch else "microbatch",
            "assuming": each.assuming or None,
        }
        for each in analysis.advice.candidates
    ]


def bubble_dict(bubble: RankBubble) -> dict[str, float]:
    causes = bubble.causes
    return {
        "rank": bubble.rank,
        "makespan": bubble.makespan,
        "busy": bubble.busy,
        "idle": bubble.idle,
        "warmup_and_drain": causes.warmup_and_drain,
        "imbalance": causes.imbalance,
        "transfers": causes.transfers,
        "overhead": causes.overhead,
    }


def _step_dict(step: MeasuredStep) -> dict[str, Any]:
    return {
        "step": step.number,
        "complete": step.complete,
        "makespan": step.makespan,
        "ranks": [[_event_dict(event) for event in row] for row in step.events],
    }


def _event_dict(event: Event) -> dict[str, Any]:
    return {"action": str(event.action), "start": event.start, "end": event.end}
