"""What the ranks of a pipeline are given, and the stages that they made of it, as texts that can be compared.

A rank that differs would wait for what no other sends, or train something else; so it is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from pipegraph.arguments import argument
from pipegraph.kernels.sharded import is_style, layout_text
from pipegraph.package import Manifest
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.parameters import parameters_of
from pipegraph.runtime.prepared_stages import PipelineOptions
from pipegraph.runtime.processes.agreement import check_agreement
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, TENSOR
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.rank_context import RankContext
from pipegraph.schedule import Schedule


def check_options(
    world: World, manifest: Manifest, schedule: Schedule, options: PipelineOptions, reduction: LossReduction
) -> None:
    """Raise ArgumentError, on every rank, unless all of them were given the same. Collective."""
    grid, count = world.grid, len(manifest.stages)
    values: dict[str, Any] = {
        "package": ", ".join(filter(None, (manifest.model.class_name, manifest.model.source, f"{count} stages"))),
        "mesh": dict(zip(grid.names, grid.shape, strict=True)),
        "microbatches": schedule.microbatches,
        "schedule": schedule.name,
        "seed": options.seed,
        "precision": options.precision,
        "loss_reduction": "sum" if reduction.sums else "mean",
        "loss_over": reduction.over,
        "broadcast_loss": reduction.broadcast,
        "tp_plan": options.tp_plan,
        "fsdp": options.fsdp,
        "resident": options.resident,
    }
    # Without ranks along `tp`, nothing is sent within kernels, and each rank may have different ones. Every rank still
    # compares the same names.
    is_divided = grid.length(TENSOR) > 1
    values["kernels"], values["recompute"] = (options.kernels, options.recompute) if is_divided else (None, None)
    values["parallelize_fn"] = options.parallelize_fn and "given" if is_divided else None
    texts = {argument(name): described(value) for name, value in values.items()}
    # The last ones, because they differ with others, too, and say less.
    rows = " | ".join(" ".join(map(str, row)) for row in schedule.actions)
    check_agreement(
        world,
        {**texts, "the order of the schedule": rows, "pipeline.json of the package": manifest.to_json()},
        *DIMENSIONS,
    )


def check_stages(context: RankContext, world: World) -> None:
    """Raise ArgumentError, on all ranks that find it, unless their stages fit together. Collective."""
    values = {name: [value.dtype, *value.shape] for name, value in context.manifest.values.items()}
    check_agreement(world, {"what crosses between stages after parallelize_fn": described(values)}, *DIMENSIONS)
    if world.copies == 1:
        return
    texts = {}
    for index, stage in context.stages.items():
        tensors = {**dict(parameters_of(stage)), **dict(stage.named_buffers())}
        names = {id(tensor): name for name, tensor in tensors.items()}
        texts[f"stage {index} after parallelize_fn"] = described(
            {name: _layout(tensor) for name, tensor in tensors.items()}
        )
        texts[f"what fully_shard divides together in stage {index}"] = described(
            [
                [names[id(parameter.sharded)] for parameter in group.parameters]
                for group in context.prepared.groups.get(index, ())
            ]
        )
    texts["the parameters of loss_fn"] = described([_layout(parameter) for parameter in context.trained_by_loss])
    check_agreement(world, texts, *DATA, TENSOR)


def described(value: Any) -> str:
    """A value as text that is the same on every rank: of a style its class alone, of a function its name."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(described, value))}]"
    if is_style(value):
        return type(value).__name__
    if isinstance(value, Callable) and not isinstance(value, type):  # type: ignore[arg-type]
        return str(getattr(value, "__qualname__", type(value).__qualname__))
    return f'"{value}"' if isinstance(value, str) else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _layout(tensor: Any) -> list[Any]:
    return [tensor.dtype, *tensor.shape, layout_text(tensor)]
