"""A plan and its alternatives: stages, memory and cuts, each with its reason; and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.style import Style
from rich.text import Text

from pipegraph.errors import one_line
from pipegraph.package.prediction import Prediction, ShiftedCut
from pipegraph.planner.comparison import SAME_MEMORY, SAME_TIME, PlanComparison
from pipegraph.planner.joint_plan.choices import JointChoice, JointComparison
from pipegraph.planner.plan import Plan
from pipegraph.planner.plan_file import PlanFile
from pipegraph.report.colours import colour
from pipegraph.report.text import bar_width, clip, short_modules, table, wrap
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

# ---- joint tables ----------------------------------------------------------------------------------------------------
# The joint plans worth a choice, and what the neighbours of the best one cost.


_MESH = ("pp", "dp_replicate", "dp_shard", "tp")


def render_joint_comparison(
    comparison: JointComparison, global_batch: int, devices: int, tokens: int | None, width: int | None = None
) -> str:
    """Return the plans worth choosing from, and what each axis of the best would cost otherwise.

    ``tokens`` are those of a row; None if the model takes none. ``width`` is that of the terminal, in columns.
    """
    best = comparison.best
    unit = TimeFormat.of_column(choice.step for choice in comparison.choices)
    rate = "rows/s a device" if tokens is None else "tokens/s a device"
    has_resident = any(choice.candidate.resident for choice in comparison.choices)
    headers = ["", *_MESH, "schedule", "stages", *["resident"] * has_resident, "rows"]
    headers += ["microbatches", "step", rate, "slower", "memory"]
    rows = [
        [
            "*" if choice is best else "",
            *(str(getattr(choice.candidate.layout, name)) for name in _MESH),
            choice.candidate.schedule if choice.candidate.layout.pp > 1 else "no pipeline",
            str(choice.solution.schedule.stages),
            *[str(choice.candidate.resident or "all")] * has_resident,
            str(choice.candidate.rows),
            str(choice.candidate.microbatches),
            unit.text(choice.step),
            f"{(tokens or 1) * global_batch / choice.step / devices:,.0f}",
            "" if choice is best else format_percent(choice.step / best.step - 1),
            format_bytes(choice.peak),
        ]
        for choice in comparison.choices
    ]
    optional_columns = ["slower", "resident", "stages", "microbatches", "rows", rate, "memory"]
    return (
        f"{table(headers, rows, width, optional_columns)}\n\n"
        f"* the best of {comparison.considered:,} plans. Bounds rule out all but {comparison.searched}, whose cuts "
        f"were searched for.\nNo plan of all is better by more than {format_percent(comparison.gap)}.\n\n"
        f"{_neighbours(comparison, width)}"
    )


def _neighbours(comparison: JointComparison, width: int | None) -> str:
    best = comparison.best
    rows = [[neighbour.axis, neighbour.value, _change(neighbour.choice, best)] for neighbour in comparison.neighbours]
    return table(["of the best one", "with", "the step is"], rows, width)


def _change(choice: JointChoice | None, best: JointChoice) -> str:
    if choice is None:
        return "impossible, or does not fit"
    return f"{format_seconds(choice.step)}  {format_percent(choice.step / best.step - 1, signed=True)}"


def joint_comparison_dict(comparison: JointComparison) -> dict[str, Any]:
    """Return the same as data for ``--json``."""
    return {
        "considered": comparison.considered,
        "searched": comparison.searched,
        "lower_bound": comparison.lower_bound,
        "gap": comparison.gap,
        "alternatives": [_dict(choice) for choice in comparison.choices],
        "neighbours": [
            {"axis": change.axis, "value": change.value, "step": None if change.choice is None else change.choice.step}
            for change in comparison.neighbours
        ],
    }


def _dict(choice: JointChoice) -> dict[str, Any]:
    candidate = choice.candidate
    return {
        "mesh": {name: getattr(candidate.layout, name) for name in _MESH},
        "schedule": candidate.schedule,
        "stages": choice.solution.schedule.stages,
        "rows": candidate.rows,
        "microbatches": candidate.microbatches,
        "resident": candidate.resident,
        "recompute": [str(recompute) for recompute in choice.recompute],
        "step": choice.step,
        "lower_bound": choice.lower_bound,
        "memory": choice.peak,
    }


# ---- plan tables -----------------------------------------------------------------------------------------------------


_LETTERS = "E what runs before the layers, t a layer, L what runs after them"
_BAR = 40  # columns of the longest bar
_PARTS = ((Kind.F, "forward", "█"), (Kind.I, "input_grad", "▓"), (Kind.W, "weight_grad", "░"))
_PROSE = 120  # columns of a paragraph in a file
_PROVED = 5e-5  # a smaller gap counts as zero
_SMALLEST = 1e-3  # a smaller one would be 0.0 % or 0.1 %


def render_prediction_summary(prediction: Prediction) -> str:
    """Return what a step takes, and how sure it is that no cuts are better: two lines at most."""
    sureness = _sureness(prediction)
    if not prediction.in_seconds:
        return f"largest stage  {prediction.amount(prediction.value)}{sureness}"
    microbatches = format_number_of("microbatch", prediction.microbatches)
    again = f" with recompute {one_line(prediction.recompute_text)}" if trains(prediction.schedule) else ""
    return (
        f"predicted  {format_seconds(prediction.value)} a step of {one_line(prediction.schedule)} with {microbatches} "
        f"{f'on {prediction.mesh_text} ' if prediction.mesh_text else ''}on {one_line(prediction.hardware)}{sureness}\n"
        f"memory     {format_bytes(prediction.peak)} on the fullest rank{again}"
    )


def stage_lines(described: Sequence[str]) -> list[str]:
    """Return the lines of `Plan.describe` for a terminal: ``stage 1: layers.2[norm1…norm3], layers.3``."""
    halves = (line.partition(": ") for line in map(one_line, described))
    return [f"{stage}{colon}{short_modules(modules)}" for stage, colon, modules in halves]


def ranks_lines(prediction: Prediction) -> list[str]:
    """Return the line that says how many ranks a schedule makes of the stages; none if each stage has its own."""
    stages, ranks = len(prediction.placement), len(set(prediction.placement))
    if stages == ranks or stages % ranks:
        return []
    on = f"{format_number_of('stage', stages)} on {format_number_of('rank', ranks)}"
    return [f"{on} under {one_line(prediction.schedule)} (for {stages} ranks: --stages {stages * stages // ranks})"]


def layout_lines(layout: str) -> list[str]:
    """Return the line that says a layout and its letters; none for an empty one."""
    return [f"layout     {one_line(layout)} (for --points: {_LETTERS})"] if layout else []


def render_plan(plan: Plan, width: int | None = None, coloured: bool = False) -> Text:
    """Return a plan that was priced: what a step takes, what the stages hold, and its tables."""
    assert plan.prediction is not None
    opening = [render_prediction_summary(plan.prediction), *layout_lines(plan.layout)]
    opening += ["", *stage_lines(plan.describe()), "", ""]
    return Text("\n".join(opening)).append(render_prediction(plan.prediction, width, coloured))


def render_prediction(prediction: Prediction, width: int | None = None, coloured: bool = False) -> Text:
    """Return the stages with a bar each, the memory of each rank, and each cut with its next places."""
    parts = [_stages(prediction, width, coloured), Text(_memory(prediction, width))]
    if prediction.cuts:
        parts.append(Text(_cuts(prediction, width)))
    return Text("\n\n").join(parts)


def render_plan_comparison(comparison: PlanComparison, width: int | None = None) -> str:
    """Return the plans worth choosing from, fastest first, each compared with the first, the best."""
    best = comparison.best
    unit = TimeFormat.of_column(choice.per_microbatch for choice in comparison.choices)
    headers = ["", "schedule", "stages", "microbatches", "recompute", "step", "a microbatch", "slower", "memory"]
    optional_columns = "saves", "step", "stages", "recompute", "slower"
    rows = [
        [
            "*" if choice is best else "",
            choice.schedule.name,
            str(choice.schedule.stages),
            str(choice.schedule.microbatches),
            choice.options.recompute_text,
            format_seconds(choice.value),
            unit.text(choice.per_microbatch),
            "" if choice is best else format_percent(choice.per_microbatch / best.per_microbatch - 1),
            format_bytes(choice.peak),
            "" if choice is best else format_percent(1 - choice.peak / best.peak),
        ]
        for choice in comparison.choices
    ]
    memory_remark = "The others here need less memory; " if len(rows) > 1 else ""
    note = (
        f"* the best of {comparison.considered} plans, by the time of a microbatch. {memory_remark}"
        f"{'none' if memory_remark else 'None'} found that is not here is faster with as little. "
        f"{format_percent(SAME_TIME)} of time and "
        f"{format_percent(SAME_MEMORY)} of memory count as equal."
    )
    return f"{table([*headers, 'saves'], rows, width, optional_columns)}\n\n{wrap(note, width or _PROSE)}"


def plan_comparison_dict(comparison: PlanComparison, plan: Plan) -> dict[str, Any]:
    """Return the best plan, and the figures of each alternative, as data for ``--json``."""
    return {
        "plan": PlanFile.from_plan(plan).to_dict(),
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
                "recompute": choice.options.recompute_text,
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
    if gap < _PROVED:
        return f"; no {where}"
    return f"; {where} by less than 0.1 %" if gap < _SMALLEST else f"; {where} by {format_percent(gap)} at most"


def _stages(prediction: Prediction, width: int | None, coloured: bool) -> Text:
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
    lines = [Text(line) for line in table(headers, rows, width).split("\n")]
    used = max(len(line) for line in lines) + 2
    longest_bar = bar_width(used, width, _BAR)
    for line, stage in zip(lines[1:], prediction.stages, strict=True):
        line.pad_right(used - len(line))
        done, end = 0.0, 0
        for kind, name, sign in _PARTS:
            done += getattr(stage, name)
            start, end = end, round(longest_bar * done / longest)
            style = Style(color=colour(kind)) if coloured else ""
            line.append(("█" if coloured else sign) * (end - start), style)
        line.rstrip()
    return Text("\n").join(lines)


def _memory(prediction: Prediction, width: int | None) -> str:
    rows, trained = [], trains(prediction.schedule)
    for rank, required_bytes in enumerate(prediction.memory):
        rank_stages = [prediction.stages[n] for n, where in enumerate(prediction.placement) if where == rank]
        cells = [format_bytes(sum(stage.saved_bytes for stage in rank_stages))] if trained else []
        cells += [format_bytes(prediction.transient[rank])] if prediction.transient else []
        parameters = format_bytes(sum(stage.parameter_bytes for stage in rank_stages))
        rows.append([str(rank), format_bytes(required_bytes), parameters, *cells])
    headers = ["rank", "memory", "parameters", *(["a microbatch keeps"] if trained else [])]
    headers += ["transient"] if prediction.transient else []
    head, *lines = table(headers, rows, width).split("\n")
    used = max(map(len, (head, *lines))) + 2
    longest = bar_width(used, width, _BAR // 2) / (prediction.peak or 1)
    bars = ("█" * round(longest * size) for size in prediction.memory)
    return "\n".join([head, *(f"{line:<{used}}{bar}".rstrip() for line, bar in zip(lines, bars, strict=True))])


def _cuts(prediction: Prediction, width: int | None) -> str:
    def shifted(cut: ShiftedCut | None) -> str:
        return UNKNOWN if cut is None else f"{prediction.change(cut)} ({clip(cut.point, 44)})"

    rows = [
        [str(number), clip(cut.point, 44), format_bytes(cut.boundary_bytes), shifted(cut.earlier), shifted(cut.later)]
        for number, cut in enumerate(prediction.cuts, 1)
    ]
    optional_columns = "one later", "one segment earlier"
    return table(["stage", "begins at", "crosses", "one segment earlier", "one later"], rows, width, optional_columns)
