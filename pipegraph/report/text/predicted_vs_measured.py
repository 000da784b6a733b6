"""Predicted and measured times, at the end of ``pipegraph run`` also of a step and of memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipegraph.planner.run_comparison import PredictedAndMeasured, RunComparison
from pipegraph.report.text import Table, fits, table
from pipegraph.schedule import CollectiveKind, Kind
from pipegraph.units import TimeFormat, format_bytes, format_number_of, format_percent

ERROR = "predicted ÷ measured − 1"
"""What a column called error has."""


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
    ranks = zip(compared.state, compared.saved, compared.buffers, compared.transient, compared.allocated, strict=True)
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
                "rank": rank,
                "state": asdict(state),
                "saved": asdict(saved),
                "buffers": {"predicted": buffers},
                "transient": {"predicted": transient},
                "all": asdict(allocated),
            }
            for rank, (state, saved, buffers, transient, allocated) in enumerate(ranks)
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
    is_predicted = any(pair.predicted is not None for pair in compared.allocated)
    headers = ["rank", "state predicted", "measured", "saved predicted", "measured"]
    headers += ["buffers predicted", "transient predicted", "all predicted"] if is_predicted else []
    ranks = zip(compared.state, compared.saved, compared.buffers, compared.transient, compared.allocated, strict=True)
    rows = [
        [
            str(rank),
            *map(format_bytes, (state.predicted, state.measured, saved.predicted, saved.measured)),
            *(map(format_bytes, (buffers, transient, allocated.predicted)) if is_predicted else ()),
        ]
        for rank, (state, saved, buffers, transient, allocated) in enumerate(ranks)
    ]
    allocated, notes = compared.measured.allocated, []
    if len(allocated) == len(rows):
        headers.append("allocated")
        rows = [[*row, format_bytes(size)] for row, size in zip(rows, allocated, strict=True)]
    elif allocated:
        notes = [f"allocated on the GPU by all ranks together, at the most: {format_bytes(sum(allocated))}"]
    text = table(headers, rows, width, ("transient predicted", "all predicted", "buffers predicted", "allocated"))
    legend = ["state: parameters, buffers, gradients and AdamW's moments; saved: kept for backwards, at the most"]
    if "transient predicted" in text:
        legend.append("transient: on top while F, I or W runs; all: together")
    return "\n".join([text, *legend, *notes])


def prediction_error(pair: PredictedAndMeasured) -> str:
    """Return the error of a prediction as a part of what was measured: ``−12.3 %``; empty if one is not known."""
    return "" if pair.error is None else format_percent(pair.error, signed=True)
