"""Microbatches: cut from a batch, and their outputs joined again.

StepBatch ─ check ─▶ cut ─▶ Microbatches ─▶ executors ─▶ outputs of microbatches ─ join ─▶ outputs of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipegraph.package import CALLER, Manifest, Value
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.batch import (
    MicrobatchSizes,
    ShownSizes,
    StepBatch,
    StepSizes,
    check_batch,
    check_tensors,
    cut_target,
    fill_structure,
    known_sizes,
    microbatch_tables,
    placed,
    step_sizes,
)
from pipegraph.runtime.parameters import share_memory
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.wiring import torch_dtype


@dataclass(frozen=True)
class Microbatches:
    """A batch in microbatches.

    Attributes:
        inputs: by name, one tensor for each microbatch.
        targets: one for each microbatch.
    """

    sizes: StepSizes
    inputs: Mapping[str, Sequence[Tensor]]
    targets: Sequence[Any]


def target_dims(manifest: Manifest) -> tuple[int, ...]:
    """The dimensions along which a target may have its rows: the declared one, or that of the outputs, or 0."""
    declared = manifest.batch.target_dim
    if declared is not None:
        return (declared,)
    outputs = {manifest.values[name].batch_dim for name in manifest.stages[-1].outputs}
    return tuple(dict.fromkeys((*(dim for dim in outputs if dim is not None and len(outputs) == 1), 0)))


def values_with_rows(manifest: Manifest) -> tuple[Value, ...]:
    """The caller's inputs and the model's outputs that have rows."""
    outputs = manifest.stages[-1].outputs
    return tuple(
        value
        for value in manifest.values.values()
        if (value.producer == CALLER or value.name in outputs) and value.batch_dim is not None and not value.is_constant
    )


@dataclass(frozen=True)
class BatchLayout:
    """What is equal for all batches of a pipeline on this process.

    Attributes:
        device: of the stages.
        inputs: the caller's inputs that the stages of this process take.
        has_last_stage: whether this process has the last stage, which takes the target.
        with_rows: the caller's inputs and the model's outputs that have rows.
        cast_from: inputs of this dtype are cast to that of the manifest.
        microbatch_sizes: returns the same object for equal sizes.
    """

    manifest: Manifest
    device: torch.device
    inputs: tuple[str, ...]
    has_last_stage: bool
    with_rows: tuple[Value, ...]
    cast_from: torch.dtype | None
    microbatch_sizes: Callable[[tuple[tuple[str, int], ...]], MicrobatchSizes]

    @classmethod
    def of(cls, context: RankContext) -> BatchLayout:
        """Return the layout of the batches of a process."""
        manifest, precision = context.manifest, context.prepared.precision
        inputs = {name for index in context.stages for name in manifest.stages[index].inputs}
        return cls(
            manifest,
            context.device,
            tuple(sorted(name for name in inputs if manifest.values[name].producer == CALLER)),
            context.last in context.stages,
            values_with_rows(manifest),
            None if precision is None else precision.cast_from,
            lru_cache(maxsize=1024)(MicrobatchSizes),
        )

    @property
    def size_names(self) -> tuple[str, ...]:
        """All sizes, in the order of the manifest."""
        return tuple(self.manifest.sizes)

    @property
    def min_rows(self) -> int:
        """The fewest rows of a microbatch."""
        batch = self.manifest.sizes.get(BATCH)
        return 1 if batch is None else batch.min

    def step_sizes(self, tables: Sequence[Mapping[str, int]]) -> StepSizes | None:
        """The sizes of a step from those of its microbatches; None if one of them is not known."""
        return step_sizes(tables, self.size_names, self.microbatch_sizes)


def local_sizes(layout: BatchLayout, batch: StepBatch, microbatches: int) -> tuple[ShownSizes, list[dict[str, int]]]:
    """Check the tensors of a batch. Return the sizes that they show, and by them those of each microbatch.

    Inputs that only stages of other processes take are checked as well, so that every process raises the same error.

    Args:
        microbatches: the requested number.

    Raises:
        BatchError: a tensor does not fit the package.
    """
    check_tensors(layout.manifest, batch, sorted({*layout.inputs, *batch.inputs}), layout.cast_from)
    sizes = known_sizes(layout.manifest, batch)
    return sizes, microbatch_tables(sizes, microbatches, layout.min_rows)


def cut(layout: BatchLayout, batch: StepBatch, sizes: StepSizes, microbatches: int) -> Microbatches:
    """Cut a batch into microbatches of these sizes. Raises BatchError if it does not fit them.

    Args:
        microbatches: the requested number.
    """
    check_batch(layout.manifest, batch, sizes, microbatches)
    values = layout.manifest.values
    inputs = {name: _cut_input(layout, values[name], batch.inputs[name], sizes) for name in layout.inputs}
    return Microbatches(sizes, inputs, _cut_target(layout, batch.target, sizes))


def _cut_input(layout: BatchLayout, value: Value, tensors: Tensor | list[Tensor], sizes: StepSizes) -> Sequence[Tensor]:
    """A checked input, cut along its rows, or the same for all microbatches if it has none."""
    dtype = torch_dtype(value)
    if isinstance(tensors, list):
        return [placed(tensor.detach(), layout.device, dtype) for tensor in tensors]
    tensor = placed(tensors.detach(), layout.device, dtype)
    if value.batch_dim is None:
        return (tensor,) * len(sizes.microbatches)
    return tensor.split(sizes.lengths(value), value.batch_dim)


def _cut_target(layout: BatchLayout, target: Any, sizes: StepSizes) -> Sequence[Any]:
    device, count = layout.device if layout.has_last_stage else None, len(sizes.microbatches)
    by_value = [sizes.lengths(value) for value in layout.with_rows]
    if not isinstance(target, list):
        lengths_of_batch = {sum(lengths): lengths for lengths in by_value}
        return cut_target(target, count, device, lengths_of_batch, dims=target_dims(layout.manifest))
    targets: list[Any] = []
    for index, item in enumerate(target):
        lengths = {column[index]: column[index : index + 1] for column in by_value}
        names = f"target[{index}]", f"microbatch {index}"
        targets += cut_target(item, 1, device, lengths, *names, dims=target_dims(layout.manifest))
    return targets


def join(manifest: Manifest, outputs: Mapping[int, tuple[Any, ...]], batch: Microbatches, training: bool) -> Any:
    """Return the model's outputs for the whole batch, in the model's structure; None if this process has no outputs.

    An output that shares memory with an input is copied, so that a change of one does not change the other.

    Args:
        outputs: microbatch → the outputs of the last stage.
        training: the mode of the last stage.
    """
    if not outputs:
        return None
    inputs = [tensor for tensors in batch.inputs.values() for tensor in tensors]
    by_microbatch = [outputs[index] for index in sorted(outputs)]
    columns = zip(manifest.stages[-1].outputs, zip(*by_microbatch, strict=True), strict=True)
    joined = {
        name: join_outputs(
            [part.clone() if share_memory([part], inputs) else part for part in parts],
            manifest.values[name].batch_dim,
            batch.sizes.weights,
        )
        for name, parts in columns
    }
    return fill_structure(manifest.outputs_in(training), joined)


def join_outputs(parts: Sequence[Any], dim: int | None, weights: Sequence[float]) -> Any:
    """Join one output of all microbatches.

    - with rows: along them; the list of all if their other dimensions differ, such as their lengths;
    - without rows, and equal in all microbatches, such as a parameter: as it is;
    - other numbers, such as an auxiliary loss: their mean, weighed by the rows of the microbatches;
    - else along a new dimension, or the list of all if their shapes differ.

    Args:
        dim: of the rows; None without rows.
        weights: the share of each microbatch in the rows of the batch.
    """
    first = parts[0]
    if len(parts) == 1 or not isinstance(first, Tensor):
        return first
    if dim is not None and first.dim() > dim:
        shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        return torch.cat(tuple(parts), dim) if len(shapes) == 1 else list(parts)
    if any(part.shape != first.shape for part in parts):
        return list(parts)
    if all(part is first or torch.equal(part, first) for part in parts[1:]):
        return first
    stacked = torch.stack(tuple(parts))
    if first.dim() == 0 and (first.is_floating_point() or first.is_complex()):
        return (stacked * torch.tensor(weights, dtype=first.dtype, device=first.device)).sum()
    return stacked
