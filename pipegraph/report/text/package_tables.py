"""The tables of a package: its stages and their costs, its boundaries, and the schedule's grid; as text and data."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from rich.text import Text

from pipegraph.cost.hardware import Hardware, SizeTable
from pipegraph.errors import one_line
from pipegraph.package import CALLER, Manifest, Package, RowOperator, StageCost, StageEntry, Value
from pipegraph.package.prediction import UNCORRECTED
from pipegraph.report.text import Table, clip, short_modules, table, wrap
from pipegraph.report.text.plan_tables import layout_lines, render_prediction_summary
from pipegraph.report.text.schedule_report import render_grid, render_legend, schedule_title
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.units import TimeFormat, format_bytes, format_count, format_number_of, format_seconds

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
    values = [value for value in manifest.values.values() if value.producer == CALLER and not value.is_constant]
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
    inputs = {
        value.name: {"role": value.batch_role, "dim": value.batch_dim}
        for value in manifest.values.values()
        if value.producer == CALLER and not value.is_constant
    }
    return {"inputs": inputs, **msgspec.to_builtins(manifest.batch)}


def _named(operators: tuple[RowOperator, ...]) -> str:
    return ", ".join(_texts(operators))


def _texts(operators: tuple[RowOperator, ...]) -> Iterator[str]:
    yield from (one_line(str(operator)) for operator in operators[:_MOST])
    if len(operators) > _MOST:
        yield f"{len(operators) - _MOST} more"


# ---- package tables --------------------------------------------------------------------------------------------------


def render_package(
    package: Package,
    schedule: Schedule,
    width: int | None = None,
    coloured: bool = False,
    damaged: Sequence[str] = (),
) -> Text:
    """Return the text of ``pipegraph show``. The grid is drawn as if F, I and W took the same time on every stage."""
    manifest = package.manifest
    parts = [
        package_title(manifest),
        table(*stage_table(package), width, ("weights", "keeps", "I", "W", "F", "forward")),
        table(*boundary_table(manifest), width, ("gradient", "from")),
    ]
    parts += ["\n".join([*explain_cuts(manifest), *layout_lines(manifest.plan.layout or "")])]
    parts += ["\n".join(batch_lines(manifest))]
    parts += ["\n".join(f"tied: {group}" for group in tied_groups(manifest))]
    changes = {**_changes(package), "damaged, or changed since it was written": damaged}
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


def explain_cuts(manifest: Manifest) -> list[str]:
    """Return lines: the predicted step, and the reason of each cut; empty if nothing was predicted."""
    prediction = manifest.prediction
    if prediction is None:
        return []
    reasons = [f"stage {number} begins at {cut.point}: {cut.reason}" for number, cut in enumerate(prediction.cuts, 1)]
    return [*render_prediction_summary(prediction).split("\n"), *map(one_line, reasons)]


def tied_groups(manifest: Manifest) -> list[str]:
    """Return ``embed.weight = output.weight`` for each group of parameters that are one."""
    return [" = ".join(map(clip, group)) for group in manifest.tied]


def _changes(package: Package) -> dict[str, Sequence[str]]:
    return {"edited since it was written": package.edited(), "missing": package.missing()}


def _weights(package: Package, stage: StageEntry) -> str:
    """Where the weights of a stage are."""
    if not stage.weights:
        return "none"
    return clip(stage.weights) if package.has_weights else "buffers only"


def _crossing(manifest: Manifest) -> list[Value]:
    """Return the tensors that cross, those from the caller first, then by producer."""
    values = [value for value in manifest.values.values() if not value.is_constant and value.consumers]
    return sorted(values, key=lambda value: (value.producer, value.name))
