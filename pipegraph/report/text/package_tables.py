"""Tables of plans and packages: stages and costs, memory, cuts, boundaries, the schedule's grid; as text and data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.style import Style
from rich.text import Text

from pipegraph.cost.hardware import Hardware, SizeTable
from pipegraph.errors import one_line
from pipegraph.package import CALLER, Manifest, Package, RowOperator, StageCost, StageEntry, Value
from pipegraph.package.prediction import UNCORRECTED, Prediction, RankMemory, ShiftedCut
from pipegraph.planner.comparison import SAME_MEMORY, SAME_TIME, PlanComparison
from pipegraph.planner.joint_plan.choices import JointChoice, JointComparison
from pipegraph.planner.plan import Plan
from pipegraph.planner.plan_file import PlanFile
from pipegraph.report.colours import colour
from pipegraph.report.text import Table, bar_width, clip, short_modules, table, wrap
from pipegraph.report.text.schedule_report import render_grid, render_legend, schedule_title
from pipegraph.schedule import Kind, Schedule, Times, simulate
from pipegraph.schedule.recipes import trains
from pipegraph.units import (
    UNKNOWN,
    TimeFormat,
    format_bytes,
    format_count,
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
            choice.solution.schedule.name if choice.candidate.layout.pp > 1 else "no pipeline",
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
        "schedule": choice.solution.schedule.name,
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
    if prediction.precision is not None or prediction.optimizer != "adamw" or prediction.zero1:
        again += f", {prediction.precision or 'the dtypes of the model'}, {one_line(prediction.optimizer)}"
    again += " with ZeRO-1" if prediction.zero1 else ""
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


def render_plan(plan: Plan, width: int | None = None, coloured: bool = False, verbose: bool = False) -> Text:
    """Return a plan that was priced: what a step takes, what the stages hold, and its tables; with ``verbose`` its
    layout as well."""
    assert plan.prediction is not None
    opening = [render_prediction_summary(plan.prediction), *(layout_lines(plan.layout) if verbose else ())]
    opening += ["", *stage_lines(plan.describe()), "", ""]
    return Text("\n".join(opening)).append(render_prediction(plan.prediction, width, coloured))


def render_prediction(prediction: Prediction, width: int | None = None, coloured: bool = False) -> Text:
    """Return the stages with a bar each, the memory of each rank, and each cut with its next places."""
    parts = [_stages(prediction, width, coloured), Text(memory_table(prediction, width))]
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


def memory_table(prediction: Prediction, width: int | None = None) -> str:
    """Return the bytes of each rank by kind; neighbours that need the same have one column."""
    parts = prediction.memory_parts or [None] * len(prediction.memory)
    columns: dict[str, list[int]] = {}
    for rank, (size, rank_parts) in enumerate(zip(prediction.memory, parts, strict=True)):
        figures = [*(() if rank_parts is None else msgspec.structs.astuple(rank_parts)), size]
        if trains(prediction.schedule):
            placed = zip(prediction.stages, prediction.placement, strict=True)
            figures.append(sum(stage.saved_bytes for stage, place in placed if place == rank))
        last = next(reversed(columns), "")
        if columns and columns[last] == figures:
            columns[f"{last.partition('–')[0]}–{rank}"] = columns.pop(last)
        else:
            columns[f"rank {rank}"] = figures
    kinds = [*(RankMemory.kinds() if prediction.memory_parts else ()), "together"]
    kinds += ["a microbatch keeps"] if trains(prediction.schedule) else []
    rows = [
        [kind, *map(format_bytes, sizes)]
        for kind, *sizes in zip(kinds, *columns.values(), strict=True)
        if any(sizes) or kind == "together"
    ]
    fullest = max(columns, key=lambda name: columns[name][kinds.index("together")])
    return table(["memory", *columns], rows, width, [name for name in reversed(columns) if name != fullest])


def _cuts(prediction: Prediction, width: int | None) -> str:
    def shifted(cut: ShiftedCut | None) -> str:
        return UNKNOWN if cut is None else f"{prediction.change(cut)} ({clip(cut.point, 44)})"

    rows = [
        [str(number), clip(cut.point, 44), format_bytes(cut.boundary_bytes), shifted(cut.earlier), shifted(cut.later)]
        for number, cut in enumerate(prediction.cuts, 1)
    ]
    optional_columns = "one later", "one segment earlier"
    return table(["stage", "begins at", "crosses", "one segment earlier", "one later"], rows, width, optional_columns)


# ---- hardware profile ------------------------------------------------------------------------------------------------
# A hardware profile as text: what the device attains, its links, and the sources of the figures.


def render_hardware(hardware: Hardware, width: int | None = None) -> str:
    """Return the device, a line for each kind of figure, and the sources of the figures."""
    links = hardware.links
    rows = [
        *_flops(hardware),
        ("memory bandwidth", _span(hardware.attained_bandwidth, hardware.memory_bandwidth, "B/s")),
        ("memory", format_bytes(hardware.memory_bytes)),
        ("kernel, at least", format_seconds(hardware.kernel_floor)),
    ]
    ends = [("in a node", links.intra_node), ("between nodes", links.inter_node)]
    if links.measured is not None:
        ends = [
            (f"rank {rank} to rank {peer}", links.between(rank, peer))
            for rank in range(links.measured.ranks)
            for peer in range(links.measured.ranks)
            if rank != peer
        ]
    for where, link in ends:
        if link is not None:
            figures = f"{format_seconds(link.latency)}, {format_count(link.bandwidth, 'B/s')}"
            rows.append((f"link {where}", f"{figures} ({link.name})"))
    for where, link in (("in a node", links.intra_node), ("between nodes", links.inter_node)):
        for operation in ("gather", "reduce", "all_reduce", "all_gather"):
            measured = getattr(link, operation, None)
            if measured is not None:
                rows.append((f"{operation.replace('_', '-')} {where}", _span(measured, 1.0, "B/s")))
    if hardware.host_link is not None:
        figures = f"{format_seconds(hardware.host_link.latency)}, {format_count(hardware.host_link.bandwidth, 'B/s')}"
        rows.append(("link to CPU memory", f"{figures} ({hardware.host_link.name})"))
    ratio = hardware.measured_ratio
    if ratio != UNCORRECTED:
        factors = zip("FIW", (ratio.forward, ratio.input_grad, ratio.weight_grad), strict=True)
        rows.append(("measured ÷ predicted", ", ".join(f"{kind} {factor:.3g}" for kind, factor in factors)))
    longest = max((len(place) for place in hardware.sources), default=0)
    sources = [f"{place:<{longest}}  {one_line(source)}" for place, source in hardware.sources.items()]
    return "\n\n".join(
        [
            f"{hardware.name}: {one_line(hardware.device)}",
            table(["what", "attained"], rows, width),
            wrap("\n".join([f"{'figure':<{longest}}  source", *sources]), width),
        ]
    )


def _flops(hardware: Hardware) -> Iterator[tuple[str, str]]:
    for kind, by_dtype in hardware.attained_flops.items():
        for dtype, attained in by_dtype.items():
            peak = hardware.peak_flops.get(dtype)
            if peak is not None:
                yield f"{kind.replace('_', ' ')}, {dtype}", _span(attained, peak, "FLOP/s")


def _span(part: SizeTable, peak: float, unit: str) -> str:
    low, high = part.smallest * peak, part.largest * peak
    return format_count(high, unit) if low == high else f"{format_count(low, unit)} to {format_count(high, unit)}"


# ---- batch lines -----------------------------------------------------------------------------------------------------
# The lines on the batch of a package: the role of each input, and what is computed for each microbatch alone.


_MOST = 4  # operators that a line names


def batch_lines(manifest: Manifest) -> list[str]:
    """Return what a user has to know of the batch: a line on the inputs, and one on each kind of operator.

    Operators that mix rows are printed with a cure, because such a package runs one microbatch.
    """
    values = manifest.caller_tensors()
    if not values:
        return []
    lines = [f"batch: {', '.join(f'{one_line(value.name)} {role_text(value)}' for value in values)}"]
    batch = manifest.batch
    if batch.per_microbatch:
        lines.append(f"computed per microbatch: {_named(batch.per_microbatch)}")
    if batch.mixing:
        cure = f"--batch-dim {batch.suggestion}, " if batch.suggestion else "a role for an input (--batch-dim), "
        lines.append(f"mixes the rows of a batch: {_named(batch.mixing)}; so a step cuts no batch into microbatches.")
        lines.append(f"Try: {cure}lists of microbatches, or one microbatch.")
    return lines


def role_text(value: Value) -> str:
    """``rows (0)``, ``whole`` or ``list``: the dimension of the rows is in parentheses."""
    return f"rows ({value.batch_dim})" if value.batch_role == "rows" else value.batch_role


def batch_dict(manifest: Manifest) -> dict[str, Any]:
    """Return the same as data."""
    inputs = {value.name: {"role": value.batch_role, "dim": value.batch_dim} for value in manifest.caller_tensors()}
    return {"inputs": inputs, **msgspec.to_builtins(manifest.batch)}


def _named(operators: tuple[RowOperator, ...]) -> str:
    names = [one_line(str(operator)) for operator in operators[:_MOST]]
    names += [f"{len(operators) - _MOST} more"] if len(operators) > _MOST else []
    return ", ".join(names)


# ---- package tables --------------------------------------------------------------------------------------------------


def render_package(
    package: Package,
    schedule: Schedule,
    width: int | None = None,
    coloured: bool = False,
    damaged: Sequence[str] = (),
    verbose: bool = False,
) -> Text:
    """Return the text of ``pipegraph show``. The grid is drawn as if F, I and W took the same time on every stage. With
    ``verbose`` it says the layout of the stages."""
    manifest = package.manifest
    layout = layout_lines(manifest.plan.layout or "") if verbose else []
    parts = [
        package_title(manifest),
        table(*stage_table(package), width, ("weights", "keeps", "I", "W", "F", "forward")),
        table(*boundary_table(manifest), width, ("gradient", "from")),
    ]
    parts += ["\n".join([*explain_cuts(manifest.prediction), *layout])]
    parts += ["\n".join(batch_lines(manifest))]
    parts += ["\n".join(f"tied: {group}" for group in tied_groups(manifest))]
    changes = {
        "edited since it was written": package.edited(),
        "missing": package.missing(),
        "damaged, or changed since it was written": damaged,
    }
    parts += [f"{state}: {', '.join(map(one_line, files))}" for state, files in changes.items() if files]
    timeline = simulate(schedule, Times.equal(schedule.stages))
    text = Text("\n\n".join([*filter(None, parts), f"{schedule_title(schedule)}\n"]))
    text.append(render_grid(schedule, timeline, width, coloured))
    return text.append("\n\n").append(render_legend(schedule, width)) if coloured else text


def package_dict(package: Package, schedule: Schedule, damaged: Sequence[str] = ()) -> dict[str, Any]:
    """Return the same as data, for ``--json``."""
    return {
        **manifest_dict(package.manifest),
        "edited": list(package.edited()),
        "missing": list(package.missing()),
        "damaged": list(damaged),
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.microbatches,
            "ranks": [[str(action) for action in actions] for actions in schedule.actions],
        },
    }


def manifest_dict(manifest: Manifest) -> dict[str, Any]:
    """Return the stages of a package, written or about to be, and what crosses between them, as data."""
    return {
        "model": msgspec.to_builtins(manifest.model),
        "points": list(manifest.plan.points),
        "plan": manifest.prediction.to_dict() if manifest.prediction else {},
        "stages": [
            {
                "index": stage.index,
                "holds": held_modules(manifest, stage.index),
                "inputs": list(stage.inputs),
                "outputs": list(stage.outputs),
                "cost": stage.cost.to_dict(),
            }
            for stage in manifest.stages
        ],
        "boundaries": [
            {
                "value": value.name,
                "dtype": value.dtype,
                "shape": list(value.shape),
                "bytes": bytes_of(value, manifest.captured_sizes),
                "producer": value.producer,
                "consumers": list(value.consumers),
                "requires_grad": value.requires_grad,
            }
            for value in _crossing(manifest)
        ],
        "tied": [list(group) for group in manifest.tied],
        "batch": batch_dict(manifest),
    }


def held_modules(manifest: Manifest, stage: int) -> str:
    """Return the modules of a stage: ``tok_embeddings, layers.0 – layers.3``; empty if the plan does not say."""
    described = manifest.plan.stages
    return described[stage] if stage < len(described) else ""


def bytes_of(value: Value, sizes: Mapping[str, int] | None = None) -> int:
    """Return the bytes of a value of one microbatch. Raises PackageError for a size that is not among ``sizes``."""
    bits = re.search("[0-9]+", value.dtype)  # the first number: float8_e4m3fn has 8
    return math.prod(value.shape_at(sizes)) * (int(bits[0]) if bits else 8) // 8  # "bool" has no number, and 8 bits


def package_title(manifest: Manifest) -> str:
    """Return ``Transformer of transformer.py in 4 stages``; without the file if the model came from none."""
    name = one_line(manifest.model.class_name or "model")
    source = f" of {one_line(manifest.model.source)}" if manifest.model.source else ""
    return f"{name}{source} in {format_number_of('stage', len(manifest.stages))}"


def has_times(manifest: Manifest) -> bool:
    """Return whether F, I and W of every stage were predicted or measured."""
    return _have_times([stage.cost for stage in manifest.stages])


def _have_times(costs: Sequence[StageCost]) -> bool:
    return all(cost.times and cost.saved_bytes is not None for cost in costs)


def stage_table(package: Package) -> Table:
    """Return headers and rows: what each stage holds, and what it costs as far as that is known."""
    manifest = package.manifest
    stage_modules = [held_modules(manifest, stage.index) for stage in manifest.stages]
    headers, rows = cost_table(stage_modules, [stage.cost for stage in manifest.stages])
    for row, stage in zip(rows, manifest.stages, strict=True):
        row[2] = row[2] or str(len(stage.parameters))
        row.append(_weights(package, stage))
    return [*headers, "weights"], rows


def cost_table(stage_modules: Sequence[str], costs: Sequence[StageCost]) -> Table:
    """Return headers and rows of stages: their modules, sizes and, if all have them, times and what is kept."""
    headers = ["stage", "holds", "parameters", "forward"]
    rows = [
        [
            str(number),
            clip(short_modules(modules)),
            "" if cost.parameters is None else format_count(cost.parameters),
            "" if cost.flops is None else format_count(cost.flops, "FLOP"),
        ]
        for number, (modules, cost) in enumerate(zip(stage_modules, costs, strict=True))
    ]
    if _have_times(costs):
        times = [cost.times or (0.0, 0.0, 0.0) for cost in costs]
        unit = TimeFormat.of_column(map(sum, times))
        headers += ["F", "I", "W", unit.unit, "keeps"]
        for row, cost, figures in zip(rows, costs, times, strict=True):
            row += [*map(unit.number, (*figures, sum(figures))), format_bytes(cost.saved_bytes)]
    return headers, rows


def short_stage_table(manifest: Manifest, placement: Sequence[int]) -> Table:
    """Return headers and rows of five columns: stage, rank, modules, parameters, and the times of F, I and W."""
    unit = TimeFormat.of_column(sum(stage.cost.times or ()) for stage in manifest.stages)
    timed, rows = has_times(manifest), []
    for stage, rank in zip(manifest.stages, placement, strict=True):
        flops = stage.cost.flops
        work = " + ".join(map(unit.number, stage.cost.times or ())) if timed else format_count(flops or 0, "FLOP")
        parameters = format_count(stage.cost.parameters or 0)
        modules = clip(short_modules(held_modules(manifest, stage.index)))
        rows.append([str(stage.index), str(rank), modules, parameters, work])
    return ["stage", "rank", "holds", "parameters", f"F + I + W, {unit.unit}" if timed else "forward"], rows


def short_boundary_table(manifest: Manifest) -> Table:
    """Return the table of boundaries with five columns: the way of each tensor stands in one of them."""
    _, rows = boundary_table(manifest)
    short_rows = [[name, tensor, f"{start} → {end}", size, grad] for name, tensor, start, end, size, grad in rows]
    return ["boundary", "tensor", "way", "microbatch", "gradient"], short_rows


def boundary_table(manifest: Manifest) -> Table:
    """Return headers and rows: the tensors that cross between stages, and those that the caller gives."""
    rows = [
        [
            clip(value.name),
            one_line(value.type_text),
            "caller" if value.producer == CALLER else f"stage {value.producer}",
            ", ".join(f"stage {consumer}" for consumer in value.consumers) or "no stage",
            format_bytes(bytes_of(value, manifest.captured_sizes)),
            "yes" if value.requires_grad else "no",
        ]
        for value in _crossing(manifest)
    ]
    return ["boundary", "tensor", "from", "to", "microbatch", "gradient"], rows


def explain_cuts(prediction: Prediction | None) -> list[str]:
    """Return lines: the predicted step, and the reason of each cut; empty if nothing was predicted."""
    if prediction is None:
        return []
    reasons = [f"stage {number} begins at {cut.point}: {cut.reason}" for number, cut in enumerate(prediction.cuts, 1)]
    return [*render_prediction_summary(prediction).split("\n"), *map(one_line, reasons)]


def tied_groups(manifest: Manifest) -> list[str]:
    """Return ``embed.weight = output.weight`` for each group of parameters that are one."""
    return [" = ".join(map(clip, group)) for group in manifest.tied]


def _weights(package: Package, stage: StageEntry) -> str:
    """Where the weights of a stage are."""
    if not stage.weights:
        return "none"
    return clip(stage.weights) if package.has_weights else "buffers only"


def _crossing(manifest: Manifest) -> list[Value]:
    """Return the tensors that cross, those from the caller first, then by producer."""
    values = [value for value in manifest.values.values() if not value.is_constant and value.consumers]
    return sorted(values, key=lambda value: (value.producer, value.name))
