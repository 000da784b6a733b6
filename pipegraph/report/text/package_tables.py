"""A package at a glance: its stages and their costs, what crosses between them, and the schedule's grid."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from rich.text import Text

from pipegraph.errors import one_line
from pipegraph.package import CALLER, Manifest, Package, StageEntry, Value
from pipegraph.report.text.plan_tables import summary
from pipegraph.report.text.schedule_figures import title
from pipegraph.report.text.tables import clip, table
from pipegraph.report.text.timeline_text import grid, legend
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.units import TimeFormat, format_bytes, format_count


def overview(package: Package, schedule: Schedule, width: int | None = None, coloured: bool = False) -> Text:
    """The text of ``pipegraph show``. The schedule is drawn as if F, I and W took the same time on every stage."""
    manifest = package.manifest
    parts = [model_title(manifest), table(*stage_cells(package)), table(*boundary_cells(manifest))]
    parts += ["\n".join(each) for each in [explanation(manifest)] if each]
    if manifest.tied:
        parts.append("\n".join(f"tied: {' = '.join(map(clip, group))}" for group in manifest.tied))
    if edited := package.edited():
        parts.append(f"edited since it was written: {', '.join(map(one_line, edited))}")
    if missing := package.missing():
        parts.append(f"missing: {', '.join(map(one_line, missing))}")
    timeline = simulate(schedule, Times.equal(schedule.stages))
    text = Text("\n\n".join([*parts, f"{title(schedule)}\n"])).append(grid(schedule, timeline, width, coloured))
    return text.append("\n\n").append(legend(schedule)) if coloured else text


def overview_dict(package: Package, schedule: Schedule) -> dict[str, Any]:
    """The same as data, for ``--json``."""
    return {
        **manifest_dict(package.manifest),
        "edited": list(package.edited()),
        "missing": list(package.missing()),
        "schedule": {
            "name": schedule.name,
            "microbatches": schedule.microbatches,
            "ranks": [[str(action) for action in actions] for actions in schedule.actions],
        },
    }


def manifest_dict(manifest: Manifest) -> dict[str, Any]:
    """The stages of a package, written or about to be, and what crosses between them."""
    return {
        "model": msgspec.to_builtins(manifest.model),
        "points": list(manifest.plan.points),
        "plan": manifest.prediction.to_dict() if manifest.prediction else {},
        "stages": [
            {
                "index": stage.index,
                "holds": holds(manifest, stage.index),
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
                "bytes": bytes_of(value),
                "producer": value.producer,
                "consumers": list(value.consumers),
                "requires_grad": value.requires_grad,
            }
            for value in _crossing(manifest)
        ],
        "tied": [list(group) for group in manifest.tied],
    }


def holds(manifest: Manifest, stage: int) -> str:
    """The modules of a stage: ``tok_embeddings, layers.0 – layers.3``; empty where the plan does not say."""
    described = manifest.plan.stages
    return described[stage] if stage < len(described) else ""


def bytes_of(value: Value) -> int:
    """The size of a value of one microbatch, in bytes."""
    bits = re.search("[0-9]+", value.dtype)  # the first number: float8_e4m3fn has 8
    return math.prod(value.shape_at()) * (int(bits[0]) if bits else 8) // 8  # a bool has 8, and does not say so


def model_title(manifest: Manifest) -> str:
    """``Transformer of transformer.py in 4 stages``"""
    model, stages = manifest.model, len(manifest.stages)
    name, source = one_line(model.class_name or "model"), one_line(model.source or "?")
    return f"{name} of {source} in {stages} stage{'s' if stages > 1 else ''}"


def knows_times(manifest: Manifest) -> bool:
    """Whether F, I and W of every stage were predicted or measured."""
    return all(stage.cost.times and stage.cost.saved_bytes is not None for stage in manifest.stages)


def stage_cells(package: Package) -> tuple[list[str], list[list[str]]]:
    """A table's headers and rows: what each stage holds, and what it costs as far as that is known."""
    manifest = package.manifest
    rows = [
        [str(stage.index), clip(holds(manifest, stage.index)), *_costs(package, stage)] for stage in manifest.stages
    ]
    headers = ["stage", "holds", "parameters", "forward", "weights"]
    if knows_times(manifest):
        times = [stage.cost.times or (0.0, 0.0, 0.0) for stage in manifest.stages]
        unit = TimeFormat.of_column(map(sum, times))
        headers[4:4] = ["F", "I", "W", unit.unit, "keeps"]
        for row, stage, figures in zip(rows, manifest.stages, times, strict=True):
            row[4:4] = [
                *(unit.number(each) for each in (*figures, sum(figures))),
                format_bytes(stage.cost.saved_bytes),
            ]
    return headers, rows


def explanation(manifest: Manifest) -> list[str]:
    """Lines: what a step is expected to take, and why each cut is where it is; none for a plan that was not priced."""
    prediction = manifest.prediction
    if prediction is None:
        return []
    reasons = [f"stage {number} begins at {cut.point}: {cut.reason}" for number, cut in enumerate(prediction.cuts, 1)]
    return [*summary(prediction).split("\n"), *map(one_line, reasons)]


def _costs(package: Package, stage: StageEntry) -> list[str]:
    parameters, flops = stage.cost.parameters, stage.cost.flops
    return [
        str(len(stage.parameters)) if parameters is None else format_count(parameters),
        "" if flops is None else format_count(flops, "FLOP"),
        clip(stage.weights) if stage.weights and package.has_weights else "buffers only" if stage.weights else "none",
    ]


def boundary_cells(manifest: Manifest) -> tuple[list[str], list[list[str]]]:
    """A table's headers and rows: the tensors that cross between stages, and those that the caller gives."""
    rows = [
        [
            clip(value.name),
            one_line(f"{value.dtype}{list(value.shape)}"),
            "caller" if value.producer == CALLER else f"stage {value.producer}",
            ", ".join(f"stage {consumer}" for consumer in value.consumers) or "no stage",
            format_bytes(bytes_of(value)),
            "yes" if value.requires_grad else "no",
        ]
        for value in _crossing(manifest)
    ]
    return ["boundary", "tensor", "from", "to", "microbatch", "gradient"], rows


def _crossing(manifest: Manifest) -> list[Value]:
    """The tensors that cross: from the caller first, then by producer."""
    found = [value for value in manifest.values.values() if not value.is_constant and value.consumers]
    return sorted(found, key=lambda value: (value.producer, value.name))
