"""A plan and its alternatives for people: stages, memory and cuts, each with its reason; and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.style import Style
from rich.text import Text

from pipegraph.errors import one_line
from pipegraph.package.prediction import Prediction, ShiftedCut
from pipegraph.planner.comparison import SAME, WORTH, Comparison
from pipegraph.planner.cut_choice import Choice
from pipegraph.planner.plan import Plan
from pipegraph.planner.plan_file import PlanFile
from pipegraph.report.colours import colour
from pipegraph.report.text.tables import clip, table
from pipegraph.schedule import Kind
from pipegraph.schedule.recipes import trains
from pipegraph.units import TimeFormat, format_bytes, format_percent, format_seconds

_BAR = 40  # columns of the longest bar
_PARTS = ((Kind.F, "forward", "█"), (Kind.I, "input_grad", "▓"), (Kind.W, "weight_grad", "░"))
_PROVED = 5e-5  # a smaller gap is none


def summary(prediction: Prediction) -> str:
    """What a step takes, and how sure it is that no cuts are better: two lines at most."""
    sureness = _sureness(prediction)
    if not prediction.in_seconds:
        return f"largest stage  {prediction.amount(prediction.value)}{sureness}"
    count = prediction.microbatches
    again = f" with recompute {prediction.recompute}" if trains(prediction.schedule) else ""
    return (
        f"predicted  {format_seconds(prediction.value)} a step of {one_line(prediction.schedule)} with {count} "
        f"microbatch{'es' if count > 1 else ''} on {one_line(prediction.hardware)}{sureness}\n"
        f"memory     {format_bytes(prediction.peak)} on the fullest rank{again}"
    )


def explained(plan: Plan, coloured: bool = False) -> Text:
    """A plan that was priced, with its reasons: what a step takes, what the stages hold, and `explained_prediction`."""
    prediction = plan.prediction
    assert prediction is not None
    opening = "\n".join([summary(prediction), "", *map(one_line, plan.describe()), "", ""])
    return Text(opening).append(explained_prediction(prediction, coloured))


def explained_prediction(prediction: Prediction, coloured: bool = False) -> Text:
    """The stages with a bar each (F, I and W), the memory of each rank, and each cut with what one segment would do."""
    parts = [_stages(prediction, coloured), Text(_memory(prediction))]
    if prediction.cuts:
        parts.append(Text(_cuts(prediction)))
    return Text("\n\n").join(parts)


def compared(comparison: Comparison) -> str:
    """The plans worth a choice, fastest first; what each loses and saves beside the first, the best."""
    best = comparison.best
    unit = TimeFormat.of_column(choice.per_microbatch for choice in comparison.choices)
    rows = [_alternative(choice, best, unit.text) for choice in comparison.choices]
    headers = [
        "",
        "schedule",
        "stages",
        "microbatches",
        "recompute",
        "step",
        "a microbatch",
        "slower",
        "memory",
        "saves",
    ]
    lines = [
        table(headers, rows),
        "",
        f"* the best of {comparison.considered} plans, by the time of a microbatch. The others here need less memory; "
        "none found",
        f"that is not here is faster with as little. {format_percent(SAME)} of time and {format_percent(WORTH)} of "
        "memory count as equal.",
    ]
    return "\n".join(lines)


def comparison_dict(comparison: Comparison, plan: Plan) -> dict[str, Any]:
    """The same as data, for ``--json``: the best plan, and the figures of each alternative."""
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
                "recompute": choice.aim.recompute,
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


def _alternative(choice: Choice, best: Choice, text: Any) -> list[str]:
    saved = 1 - choice.peak / best.peak
    return [
        "*" if choice is best else "",
        choice.schedule.name,
        str(choice.schedule.stages),
        str(choice.schedule.microbatches),
        choice.aim.recompute,
        format_seconds(choice.value),
        text(choice.per_microbatch),
        "" if choice is best else format_percent(choice.per_microbatch / best.per_microbatch - 1),
        format_bytes(choice.peak),
        "" if choice is best else format_percent(saved),
    ]


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
    if prediction.in_seconds:
        unit = TimeFormat.of_column([longest])
        headers += ["F", "I", "W", unit.unit] if trains(prediction.schedule) else [f"F {unit.unit}"]
        for row, stage in zip(rows, prediction.stages, strict=True):
            figures = [stage.forward, stage.input_grad, stage.weight_grad, stage.total]
            row += [unit.number(figure) for figure in (figures if trains(prediction.schedule) else figures[:1])]
    else:
        headers.append(prediction.unit)
        for row, stage in zip(rows, prediction.stages, strict=True):
            row.append(prediction.amount(stage.total))
    lines = [Text(line) for line in table(headers, rows).split("\n")]
    width = max(len(line) for line in lines) + 2
    for line, stage in zip(lines[1:], prediction.stages, strict=True):
        line.pad_right(width - len(line))
        done, end = 0.0, 0
        for kind, name, sign in _PARTS:
            done += getattr(stage, name)
            start, end = end, round(_BAR * done / longest)
            style = Style(color=colour(kind, 0, 1)) if coloured else ""
            line.append(("█" if coloured else sign) * (end - start), style)
    return Text("\n").join(lines)


def _memory(prediction: Prediction) -> str:
    """What each rank holds: equal neighbours in one line."""
    most = prediction.peak or 1
    rows = []
    for rank, needed in enumerate(prediction.memory):
        held = [n for n, where in enumerate(prediction.placement) if where == rank]
        saved = sum(prediction.stages[n].saved_bytes for n in held)
        parameters = sum(prediction.stages[n].parameter_bytes for n in held)
        kept = [format_bytes(saved)] if trains(prediction.schedule) else []
        rows.append(
            [str(rank), format_bytes(needed), format_bytes(parameters), *kept, "█" * round(_BAR / 2 * needed / most)]
        )
    keeps = ["a microbatch keeps"] if trains(prediction.schedule) else []
    return table(["rank", "memory", "parameters", *keeps, ""], rows)


def _cuts(prediction: Prediction) -> str:
    rows = [
        [
            str(number),
            clip(cut.point, 44),
            format_bytes(cut.boundary_bytes),
            *_moves(prediction, (cut.earlier, cut.later)),
        ]
        for number, cut in enumerate(prediction.cuts, 1)
    ]
    return table(["stage", "begins at", "crosses", "one segment earlier", "one later"], rows)


def _moves(prediction: Prediction, shifted: Sequence[ShiftedCut | None]) -> list[str]:
    return ["—" if each is None else f"{prediction.change(each)} ({clip(each.point, 44)})" for each in shifted]
