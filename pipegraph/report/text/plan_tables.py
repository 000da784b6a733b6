"""A plan and its alternatives: stages, memory and cuts, each with its reason; and as data."""

from __future__ import annotations

from typing import Any

from rich.style import Style
from rich.text import Text

from pipegraph.errors import one_line
from pipegraph.package.prediction import Prediction, ShiftedCut
from pipegraph.planner.comparison import SAME_MEMORY, SAME_TIME, PlanComparison
from pipegraph.planner.plan import Plan
from pipegraph.planner.plan_file import PlanFile
from pipegraph.report.colours import colour
from pipegraph.report.text import clip, table
from pipegraph.schedule import Kind
from pipegraph.schedule.recipes import trains
from pipegraph.units import (
    UNKNOWN,
    TimeFormat,
    format_bytes,
    format_number_of,
    format_percent,
    format_seconds,
)

_BAR = 40  # columns of the longest bar
_PARTS = ((Kind.F, "forward", "█"), (Kind.I, "input_grad", "▓"), (Kind.W, "weight_grad", "░"))
_PROVED = 5e-5  # a smaller gap is none


def render_prediction_summary(prediction: Prediction) -> str:
    """Return what a step takes, and how sure it is that no cuts are better: two lines at most."""
    sureness = _sureness(prediction)
    if not prediction.in_seconds:
        return f"largest stage  {prediction.amount(prediction.value)}{sureness}"
    microbatches = format_number_of("microbatch", prediction.microbatches)
    again = f" with recompute {prediction.recompute}" if trains(prediction.schedule) else ""
    return (
        f"predicted  {format_seconds(prediction.value)} a step of {one_line(prediction.schedule)} with {microbatches} "
        f"on {one_line(prediction.hardware)}{sureness}\n"
        f"memory     {format_bytes(prediction.peak)} on the fullest rank{again}"
    )


def render_plan(plan: Plan, coloured: bool = False) -> Text:
    """Return a plan that was priced: what a step takes, what the stages hold, and its tables."""
    assert plan.prediction is not None
    opening = [render_prediction_summary(plan.prediction), "", *map(one_line, plan.describe()), "", ""]
    return Text("\n".join(opening)).append(render_prediction(plan.prediction, coloured))


def render_prediction(prediction: Prediction, coloured: bool = False) -> Text:
    """Return the stages with a bar each, the memory of each rank, and each cut with its next places."""
    parts = [_stages(prediction, coloured), Text(_memory(prediction))]
    if prediction.cuts:
        parts.append(Text(_cuts(prediction)))
    return Text("\n\n").join(parts)


def render_plan_comparison(comparison: PlanComparison) -> str:
    """Return the plans worth choosing from, fastest first, each compared with the first, the best."""
    best = comparison.best
    unit = TimeFormat.of_column(choice.per_microbatch for choice in comparison.choices)
    headers = ["", "schedule", "stages", "microbatches", "recompute", "step", "a microbatch", "slower", "memory"]
    rows = [
        [
            "*" if choice is best else "",
            choice.schedule.name,
            str(choice.schedule.stages),
            str(choice.schedule.microbatches),
            choice.options.recompute,
            format_seconds(choice.value),
            unit.text(choice.per_microbatch),
            "" if choice is best else format_percent(choice.per_microbatch / best.per_microbatch - 1),
            format_bytes(choice.peak),
            "" if choice is best else format_percent(1 - choice.peak / best.peak),
        ]
        for choice in comparison.choices
    ]
    return (
        f"{table([*headers, 'saves'], rows)}\n\n"
        f"* the best of {comparison.considered} plans, by the time of a microbatch. The others here need less memory; "
        "none found\n"
        f"that is not here is faster with as little. {format_percent(SAME_TIME)} of time and "
        f"{format_percent(SAME_MEMORY)} of memory count as equal."
    )


def plan_comparison_dict(comparison: PlanComparison, plan: Plan) -> dict[str, Any]:
    """Return the best plan, and the figures of each alternative, as data for ``--json``."""
    return {
        "plan": PlanFile.of(plan).to_dict(),
        "stages": [line.partition(": ")[2] for line in plan.describe()],
        "considered": comparison.considered,
        "refused": list(comparison.refused),
        "alternatives": [
            {
                "best": choice is comparison.best,
                "schedule": choice.schedule.name,
                "ranks": choice.schedule.ranks,
                "stages": choice.schedule.stages,
                "microbatches": choice.schedule.microbatches,
                "recompute": choice.options.recompute,
                "points": [str(point) for point in choice.points],
                "step": choice.value,
                "per_microbatch": choice.per_microbatch,
                "memory": choice.peak,
                "slower": choice.per_microbatch / comparison.best.per_microbatch - 1,
                "saves": 1 - choice.peak / comparison.best.peak,
            }
            for choice in comparison.choices
        ],
    }


def _sureness(prediction: Prediction) -> str:
    gap = prediction.gap
    if gap is None:
        return ""
    where = f"other cuts at the {prediction.places} places looked at are better"
    return f"; no {where}" if gap < _PROVED else f"; {where} by {format_percent(gap)} at most"


def _stages(prediction: Prediction, coloured: bool) -> Text:
    """Times or weights of each stage, with a bar."""
    longest = max(stage.total for stage in prediction.stages) or 1.0
    headers, rows = ["stage", "rank"], [[str(n), str(rank)] for n, rank in enumerate(prediction.placement)]
    unit, trained = TimeFormat.of_column([longest]), trains(prediction.schedule)
    if prediction.in_seconds:
        headers += ["F", "I", "W", unit.unit] if trained else [f"F {unit.unit}"]
    else:
        headers.append(prediction.unit)
    for row, stage in zip(rows, prediction.stages, strict=True):
        figures = [stage.forward, stage.input_grad, stage.weight_grad, stage.total] if trained else [stage.forward]
        row += map(unit.number, figures) if prediction.in_seconds else [prediction.amount(stage.total)]
    lines = [Text(line) for line in table(headers, rows).split("\n")]
    width = max(len(line) for line in lines) + 2
    for line, stage in zip(lines[1:], prediction.stages, strict=True):
        line.pad_right(width - len(line))
        done, end = 0.0, 0
        for kind, name, sign in _PARTS:
            done += getattr(stage, name)
            start, end = end, round(_BAR * done / longest)
            style = Style(color=colour(kind)) if coloured else ""
            line.append(("█" if coloured else sign) * (end - start), style)
    return Text("\n").join(lines)


def _memory(prediction: Prediction) -> str:
    rows, trained = [], trains(prediction.schedule)
    for rank, needed in enumerate(prediction.memory):
        held = [prediction.stages[n] for n, where in enumerate(prediction.placement) if where == rank]
        kept = [format_bytes(sum(stage.saved_bytes for stage in held))] if trained else []
        parameters = format_bytes(sum(stage.parameter_bytes for stage in held))
        bar = "█" * round(_BAR / 2 * needed / (prediction.peak or 1))
        rows.append([str(rank), format_bytes(needed), parameters, *kept, bar])
    return table(["rank", "memory", "parameters", *(["a microbatch keeps"] if trained else []), ""], rows)


def _cuts(prediction: Prediction) -> str:
    def shifted(cut: ShiftedCut | None) -> str:
        return UNKNOWN if cut is None else f"{prediction.change(cut)} ({clip(cut.point, 44)})"

    rows = [
        [str(number), clip(cut.point, 44), format_bytes(cut.boundary_bytes), shifted(cut.earlier), shifted(cut.later)]
        for number, cut in enumerate(prediction.cuts, 1)
    ]
    return table(["stage", "begins at", "crosses", "one segment earlier", "one later"], rows)
