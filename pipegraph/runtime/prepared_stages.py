"""The stages of a process, ready for their kernels: loaded, divided over the mesh, and in the dtypes asked for.

load_stages ─▶ tp ─▶ parallelize_fn ─▶ precision ─▶ fully_shard
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.kernels import Dynamic, Maker
from pipegraph.package import Manifest, Package
from pipegraph.runtime import parameters
from pipegraph.runtime.fully_sharded import ShardedGroup
from pipegraph.runtime.gradient_hooks import GradientHooks
from pipegraph.runtime.package_agreement import check_loaded_weights
from pipegraph.runtime.parallelized_stages import check_is_used, divide_tensors, shard_stages
from pipegraph.runtime.precision import (
    AppliedPrecision,
    buffers_to_keep,
    convert_stages,
    named_precision,
    sharding_options,
)
from pipegraph.runtime.processes.rank_grid import SHARD
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.tensor_parallel import Plan


@dataclass(frozen=True)
class PipelineOptions:
    """Arguments of `Pipeline` that its stages and kernels depend on, under their names."""

    weights: Path | Mapping[str, Tensor] | None
    check_weights: bool
    seed: int | None
    tp_plan: Plan | None
    parallelize_fn: parameters.ParallelizeFunction | None
    precision: str | None
    fsdp: Mapping[str, Any] | None
    resident: int | None
    kernels: str | Maker
    recompute: Any
    max_variants: int
    strict: bool
    cuda_graphs: bool
    dynamic: Dynamic


@dataclass(frozen=True)
class PreparedStages:
    """Stages by index.

    Attributes:
        modules: as `parallelize_fn` returned them.
        manifest: with the shapes and dtypes that values have now.
        precision: applied to the kernels; None without one.
        groups: of each stage, the groups of its sharded parameters.
        hooks: of parameters, in the model.
    """

    modules: dict[int, nn.Module]
    manifest: Manifest
    precision: AppliedPrecision | None
    groups: Mapping[int, Sequence[ShardedGroup]]
    hooks: GradientHooks


@torch.inference_mode(False)  # in which nothing could be trained later
def prepare_stages(
    package: Package, indices: list[int], device: torch.device, world: World | None, options: PipelineOptions
) -> PreparedStages:
    """Prepare the stages `indices`. Collective. Raises PipegraphError for what does not fit."""
    precision = named_precision(options.precision)
    fsdp, applied = options.fsdp, None
    stages = parameters.load_stages(package, indices, device, options.weights, options.check_weights, options.seed or 0)
    hooks = GradientHooks(stages)
    if world is not None:
        check_loaded_weights(world, stages)
    uncast_buffers = {} if precision is None else buffers_to_keep(precision, stages, package.manifest)
    is_changed = options.parallelize_fn is not None
    package = replace(package, manifest=divide_tensors(stages, package.manifest, world, options.tp_plan, is_changed))
    manifest = package.manifest
    if options.parallelize_fn is not None:
        stages, manifest = parameters.parallelize_stages(package, stages, options.parallelize_fn)
    if precision is not None:
        applied, manifest = convert_stages(precision, stages, manifest, uncast_buffers)
        is_sharded = world is not None and world.grid.length(SHARD) > 1
        fsdp = sharding_options(precision, fsdp, stages, is_sharded)
    check_is_used("fsdp", options.fsdp, SHARD, world)
    groups, manifest = shard_stages(stages, manifest, world, fsdp)
    return PreparedStages(stages, manifest, applied, groups, hooks)
