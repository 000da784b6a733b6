"""What was predicted and what was measured, at the end of ``pipegraph run``: stages, a step, and memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.report.text.tables import table
from pipegraph.units import TimeFormat, format_bytes, format_percent


def render_run_comparison(compared: RunComparison) -> str:
    """Return tables of stages, step and memory, and the hints."""
    parts = [_heading(compared)]
    if compared.measured.step is not None:
        parts += [_stages(compared), _steps(compared)]
    parts += [_memory(compared), "\n".join(compared.hints)]
    return "\n\n".join(filter(None, parts))


def _heading(compared: RunComparison) -> str:
    priced = f"predicted ({compared.basis})" if compared.basis else "nothing was predicted"
    count = compared.measured.steps
    if not count:
        return f"{priced}; memory as measured"
    steps = f"{count} step{'s' if count > 1 else ''}"
    return f"{priced}; measured: medians of {steps}, without the first; times of stages in {_unit(compared).unit}"


def _stages(compared: RunComparison) -> str:
    unit, headers, rows = _unit(compared), ["stage", "rank"], []
    for kind in compared.stages[0]:
        headers += [f"{kind} predicted", "measured", "error"]
    for number, stage in enumerate(compared.stages):
        row = [str(number), str(compared.schedule.placement[number])]
        for pair in stage.values():
            row += [unit.number(pair.predicted), unit.number(pair.measured), _error(pair)]
        rows.append(row)
    return table(headers, rows)


def _unit(compared: RunComparison) -> TimeFormat:
    """Of the times of stages."""
    pairs = [pair for stage in compared.stages for pair in stage.values()]
    return TimeFormat.of_column(figure for pair in pairs for figure in (pair.predicted, pair.measured))


def _steps(compared: RunComparison) -> str:
    step, bubble = compared.step, compared.bubble
    unit = TimeFormat.of_column([step.predicted, step.measured])
    turns = f"step, {compared.schedule.ranks} ranks in turn"
    rows = [["step" if bubble else turns, unit.text(step.predicted), unit.text(step.measured), _error(step)]]
    if bubble is not None:
        parts = [format_percent(each) for each in (bubble.predicted, bubble.measured)]
        rows.append(["bubble", *parts, ""])
    return table(["", "predicted", "measured", "error"], rows)


def _memory(compared: RunComparison) -> str:
    headers = ["rank", "state predicted", "measured", "saved predicted", "measured", "buffers predicted"]
    rows = [
        [str(rank), *map(format_bytes, (state.predicted, state.measured, saved.predicted, saved.measured, buffers))]
        for rank, (state, saved, buffers) in enumerate(
            zip(compared.state, compared.saved, compared.buffers, strict=True)
        )
    ]
    allocated = compared.measured.allocated
    if len(allocated) == len(rows):
        headers.append("allocated")
        rows = [[*row, format_bytes(each)] for row, each in zip(rows, allocated, strict=True)]
    lines = [
        table(headers, rows),
        "state: parameters, buffers, gradients and AdamW's moments; saved: kept for backwards, at the most",
    ]
    if allocated and len(allocated) < len(rows):
        lines.append(f"allocated on the GPU by all ranks together, at the most: {format_bytes(sum(allocated))}")
    return "\n".join(lines)


def run_comparison_dict(compared: RunComparison) -> dict[str, Any]:
    """The same as data, for ``--json``: seconds and bytes."""
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
        "step": asdict(compared.step),
        "bubble": None if compared.bubble is None else asdict(compared.bubble),
        "memory": [
            {"rank": rank, "state": asdict(state), "saved": asdict(saved), "buffers": {"predicted": buffers}}
            for rank, (state, saved, buffers) in enumerate(
                zip(compared.state, compared.saved, compared.buffers, strict=True)
            )
        ],
        "allocated": list(compared.measured.allocated) or None,
        "hints": list(compared.hints),
    }


def _error(pair: PredictedAndMeasured) -> str:
    return "" if pair.error is None else format_percent(pair.error, signed=True)
