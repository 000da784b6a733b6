"""Microbatches: cut from a batch, and their outputs joined again.

StepBatch ─ check ─▶ cut ─▶ Microbatches ─▶ executors ─▶ outputs of microbatches ─ join ─▶ outputs of the batch
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from pipegraph.errors import ArgumentError, BatchError, nearest
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
from pipegraph.runtime.loss_reduction import LossScale
from pipegraph.runtime.parameters import share_memory
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.wiring import torch_dtype, zeros_for
from pipegraph.torch_private.pytrees import pytree

# ---- padding ---------------------------------------------------------------------------------------------------------
# `pad_to`: lengths of microbatches are rounded up, so that kernels for static shapes serve more of them.
#
# tokens [2, 13], mask [2, 13], labels [2, 13]   pad_to={"seq": 8}   tokens, mask [2, 16] with zeros, labels with -100


IGNORED: Final = -100
"""The label that `torch.nn.functional.cross_entropy` leaves out."""


@dataclass(frozen=True)
class Padding:
    """The sizes that are rounded up.

    Attributes:
        multiples: name of a size → the number that it is rounded up to a multiple of.
    """

    multiples: Mapping[str, int] = field(default_factory=dict)

    def check(self, manifest: Manifest) -> None:
        """Raise ArgumentError for a size that the package does not have, or a multiple below 1."""
        for name, multiple in self.multiples.items():
            sizes = [size for size in manifest.sizes if size != BATCH]
            if name not in sizes:
                raise ArgumentError(
                    f"pad_to names {name!r}, which is not a dynamic size other than the rows.{nearest(name, sizes)}",
                    f"{', '.join(sizes) or 'without pad_to'}.",
                )
            if type(multiple) is not int or multiple < 1:
                raise ArgumentError(f"pad_to cannot have {multiple!r} for {name}.", "a whole number from 1 on.")

    def pad(self, manifest: Manifest, batch: StepBatch) -> StepBatch:
        """Return the batch with inputs that end in zeros, and a target that ends in `IGNORED`.

        Raises:
            BatchError: an input requires a gradient, or the target has floats along a size that is padded.
        """
        if not self.multiples:
            return batch
        inputs = {name: self._padded_input(manifest.values[name], tensors) for name, tensors in batch.inputs.items()}
        if not isinstance(batch.target, list):
            return replace(batch, inputs=inputs, target=self._padded_target(manifest, batch, batch.target, None))
        targets = [self._padded_target(manifest, batch, item, index) for index, item in enumerate(batch.target)]
        return replace(batch, inputs=inputs, target=targets)

    def _padded_input(self, value: Value, tensors: Any) -> Any:
        if isinstance(tensors, list):
            return [self._padded_input(value, tensor) for tensor in tensors]
        if not isinstance(tensors, Tensor) or tensors.dim() != len(value.shape):
            return tensors  # it is refused later
        ends = [
            self._missing(size, tensors.shape[dim]) if isinstance(size, str) else 0
            for dim, size in enumerate(value.shape)
        ]
        if not any(ends):
            return tensors
        if tensors.requires_grad:
            raise BatchError(
                f"{value.name} requires a gradient, and pad_to pads it.", "pad it before the step, without pad_to."
            )
        return _with_ends(tensors, ends, 0)

    def _missing(self, name: str, length: int) -> int:
        return -length % self.multiples.get(name, 1)

    def _padded_target(self, manifest: Manifest, batch: StepBatch, target: Any, index: int | None) -> Any:
        """The target of the batch, or of one microbatch, padded along the dimensions with the lengths of inputs."""
        lengths: dict[int, int] = {}  # length → its padding
        for name, tensors in batch.inputs.items():
            tensor = tensors[index] if isinstance(tensors, list) and index is not None else tensors
            for dim, size in enumerate(manifest.values[name].shape if isinstance(tensor, Tensor) else ()):
                if size in self.multiples and dim < tensor.dim():
                    lengths[tensor.shape[dim]] = self._missing(str(size), tensor.shape[dim])

        def padded(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            ends = [0, *(lengths.get(length, 0) for length in leaf.shape[1:])][: leaf.dim()]
            if not any(ends):
                return leaf
            if leaf.is_floating_point() or leaf.is_complex():
                raise BatchError(
                    f"the target has floats of the shape {list(leaf.shape)}, and pad_to has no number that a loss "
                    f"leaves out.",
                    f"integers with {IGNORED}, or a batch that is padded before the step.",
                    is_of_target=True,
                )
            return _with_ends(leaf, ends, IGNORED)

        return pytree.tree_map(padded, target)


NO_PADDING: Final = Padding()


def _with_ends(tensor: Tensor, ends: list[int], value: int) -> Tensor:
    """The tensor with a number of elements added at the end of each dimension."""
    amounts = [amount for end in reversed(ends) for amount in (0, end)]
    return functional.pad(tensor, amounts, value=value)


# ---- microbatches ----------------------------------------------------------------------------------------------------


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


# ---- step inputs -----------------------------------------------------------------------------------------------------
# What the executors of a step read.


@dataclass(frozen=True)
class StepInputs:
    """The microbatches of a step, and how they are computed.

    Attributes:
        scale: of the losses.
        with_loss: whether the loss is computed.
        keep_outputs: whether the result has the model's outputs.
        dtypes: of values that have another dtype in this step than in the manifest.
    """

    batch: Microbatches
    scale: LossScale
    with_loss: bool
    keep_outputs: bool
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """The shape of a value in a microbatch."""
        return self.batch.sizes.microbatches[microbatch].shape(value)

    def dtype(self, value: Value) -> torch.dtype:
        """The dtype of a value in this step."""
        return self.dtypes.get(value.name) or torch_dtype(value)

    def zeros(self, value: Value, microbatch: int, device: torch.device) -> Tensor:
        """Zeros in the place of a value of a microbatch."""
        return zeros_for(value, self.shape(value, microbatch), self.dtype(value), device)
