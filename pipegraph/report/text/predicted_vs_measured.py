"""What was predicted and what was measured, at the end of ``pipegraph run``: stages, a step, and memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.report.text.tables import table
from pipegraph.units import TimeFormat, format_bytes, format_number_of, format_percent


def render_run_comparison(compared: RunComparison) -> str:
    """Return tables of stages, step and memory, and the hints."""
    unit = TimeFormat.of_column(
        figure for stage in compared.stages for each in stage.values() for figure in (each.predicted, each.measured)
    )
    parts = [f"predicted ({compared.basis})" if compared.basis else "nothing was predicted"]
    if compared.measured.steps:
        steps = format_number_of("step", compared.measured.steps)
        parts[0] += f"; measured: medians of {steps}, without the first; times of stages in {unit.unit}"
    else:
        parts[0] += "; memory as measured"
    if compared.measured.step is not None:
        parts += [_stages(compared, unit), _steps(compared)]
    return "\n\n".join(filter(None, [*parts, _memory(compared), "\n".join(compared.hints)]))


def run_comparison_dict(compared: RunComparison) -> dict[str, Any]:
    """Return the same as data, for ``--json``: seconds and bytes."""
    ranks = zip(compared.state, compared.saved, compared.buffers, strict=True)
    return {
        "priced_by": compared.basis or None,
        "measured_steps": compared.measured.steps,
        "processes": compared.measured.processes,
        "stages": [
            {
                "stage": number,
                "rank": compared.schedule.placement[number],
                **{str(kind): asdict(each) for kind, each in stage.items()},
            }
            for number, stage in enumerate(compared.stages)
        ],
        "step": asdict(compared.step),
        "bubble": None if compared.bubble is None else asdict(compared.bubble),
        "memory": [
            {"rank": rank, "state": asdict(state), "saved": asdict(saved), "buffers": {"predicted": buffers}}
            for rank, (state, saved, buffers) in enumerate(ranks)
        ],
        "allocated": list(compared.measured.allocated) or None,
        "hints": list(compared.hints),
    }


def _stages(compared: RunComparison, unit: TimeFormat) -> str:
    headers, rows = ["stage", "rank"], []
    for kind in compared.stages[0]:
        headers += [f"{kind} predicted", "measured", "error"]
    for number, stage in enumerate(compared.stages):
        row = [str(number), str(compared.schedule.placement[number])]
        for each in stage.values():
            row += [unit.number(each.predicted), unit.number(each.measured), _error(each)]
        rows.append(row)
    return table(headers, rows)


def _steps(compared: RunComparison) -> str:
    step, bubble = compared.step, compared.bubble
    unit = TimeFormat.of_column([step.predicted, step.measured])
    name = "step" if bubble else f"step, {compared.schedule.ranks} ranks in turn"
    rows = [[name, unit.text(step.predicted), unit.text(step.measured), _error(step)]]
    if bubble is not None:
        rows.append(["bubble", format_percent(bubble.predicted), format_percent(bubble.measured), ""])
    return table(["", "predicted", "measured", "error"], rows)


def _memory(compared: RunComparison) -> str:
    headers = ["rank", "state predicted", "measured", "saved predicted", "measured", "buffers predicted"]
    ranks = zip(compared.state, compared.saved, compared.buffers, strict=True)
    rows = [
        [str(rank), *map(format_bytes, (state.predicted, state.measured, saved.predicted, saved.measured, buffers))]
        for rank, (state, saved, buffers) in enumerate(ranks)
    ]
    allocated, notes = compared.measured.allocated, []
    if len(allocated) == len(rows):
        headers.append("allocated")
        rows = [[*row, format_bytes(each)] for row, each in zip(rows, allocated, strict=True)]
    elif allocated:
        notes = [f"allocated on the GPU by all ranks together, at the most: {format_bytes(sum(allocated))}"]
    legend = "state: parameters, buffers, gradients and AdamW's moments; saved: kept for backwards, at the most"
    return "\n".join([table(headers, rows), legend, *notes])


def _error(each: PredictedAndMeasured) -> str:
    return "" if each.error is None else format_percent(each.error, signed=True)
