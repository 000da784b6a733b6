"""What the ranks of a pipeline are given, and the stages that they made of it, as texts that can be compared.

A rank that differs would wait for what no other sends, or train something else; so it is refused before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from pipegraph.arguments import argument
from pipegraph.kernels import Maker
from pipegraph.kernels.sharded import is_style, layout_text
from pipegraph.package import Manifest
from pipegraph.runtime.fully_sharded import ShardedGroup
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.parameters import parameters_of
from pipegraph.runtime.prepared_stages import StageRequest
from pipegraph.runtime.processes.agreement import check_agreement
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, TENSOR
from pipegraph.runtime.processes.world import World
from pipegraph.schedule import Schedule


def check_options(
    world: World,
    manifest: Manifest,
    schedule: Schedule,
    request: StageRequest,
    reduction: LossReduction,
    resident: int | None,
    kernels: str | Maker,
    recompute: Any,
) -> None:
    """Raise ArgumentError, on every rank, unless all of them were given the same. Collective."""
    grid, count = world.grid, len(manifest.stages)
    options = {
        "package": ", ".join(filter(None, (manifest.model.class_name, manifest.model.source, f"{count} stages"))),
        "mesh": dict(zip(grid.names, grid.shape, strict=True)),
        "microbatches": schedule.microbatches,
        "schedule": schedule.name,
        "seed": request.seed,
        "precision": request.precision,
        "loss_reduction": "sum" if reduction.sums else "mean",
        "loss_over": reduction.over,
        "tp_plan": request.tp_plan,
        "fsdp": request.fsdp,
        "resident": resident,
    }
    within_kernels = {"kernels": kernels, "recompute": recompute, "parallelize_fn": request.parallelize_fn and "given"}
    if grid.length(TENSOR) == 1:  # then nothing is sent within kernels, and each rank may have its own
        within_kernels = dict.fromkeys(within_kernels)
    texts = {argument(name): described(value) for name, value in {**options, **within_kernels}.items()}
    # The last ones, because they differ with others, too, and say less.
    rows = " | ".join(" ".join(map(str, row)) for row in schedule.actions)
    check_agreement(
        world,
        {**texts, "the order of the schedule": rows, "pipeline.json of the package": manifest.to_json()},
        *DIMENSIONS,
    )


def check_stages(
    world: World,
    manifest: Manifest,
    stages: Mapping[int, nn.Module],
    groups: Mapping[int, Sequence[ShardedGroup]],
    trained_by_loss: Sequence[nn.Parameter],
) -> None:
    """Raise ArgumentError, on all ranks that find it, unless their stages fit together. Collective.

    Args:
        groups: of each stage, the groups of its sharded parameters.
        trained_by_loss: the parameters of `loss_fn`, on a rank with the last stage.
    """
    values = {name: [value.dtype, *value.shape] for name, value in manifest.values.items()}
    check_agreement(world, {"what crosses between stages after parallelize_fn": described(values)}, *DIMENSIONS)
    if world.copies == 1:
        return
    texts = {}
    for index, stage in stages.items():
        tensors = {**dict(parameters_of(stage)), **dict(stage.named_buffers())}
        names = {id(tensor): name for name, tensor in tensors.items()}
        texts[f"stage {index} after parallelize_fn"] = described(
            {name: _layout(tensor) for name, tensor in tensors.items()}
        )
        texts[f"what fully_shard divides together in stage {index}"] = described(
            [[names[id(parameter.sharded)] for parameter in group.parameters] for group in groups.get(index, ())]
        )
    texts["the parameters of loss_fn"] = described([_layout(parameter) for parameter in trained_by_loss])
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
