"""Batches: checked against the manifest, cut into microbatches, and joined again from the outputs of microbatches."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.errors import BatchError
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.package.sizes import BATCH, holds
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.model_arguments import bind_arguments, fill_structure
from pipegraph.runtime.step_data import NO_TARGET, StepBatch, StepInputs, StepRequest, StepSizes, sizes_of_inputs
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.runtime.targets import check_strided, cut_target, placed
from pipegraph.runtime.wiring import dtype_name, torch_dtype
from pipegraph.units import format_number_of


@dataclass(frozen=True)
class PassedBatch:
    """What a caller passed to a step: tensors of the whole batch, or lists with one tensor for each microbatch.

    Attributes:
        inputs: by name, without those that are None.
        target: None if it was left out.
        count: how many microbatches the lists have; None without lists.
    """

    inputs: Mapping[str, Any]
    target: Any
    count: int | None

    def tensors(self, name: str) -> list[tuple[str, Any]]:
        """What was passed for an input, each with a name for messages."""
        passed = self.inputs.get(name)
        return (
            [(f"{name}[{i}]", each) for i, each in enumerate(passed)] if isinstance(passed, list) else [(name, passed)]
        )

    def sizes(self, manifest: Manifest) -> tuple[dict[str, int], list[int] | None]:
        """The sizes that the inputs show, by name, and the rows of each microbatch of lists."""
        known: dict[str, int] = {}
        lists = {name: each for name, each in self.inputs.items() if isinstance(each, list)}
        rows = []
        for index in range(self.count or 0):
            own = sizes_of_inputs(manifest, {name: each[index].shape for name, each in lists.items()})
            rows += [own.pop(BATCH)] if BATCH in own else []
            known = {**own, **known}
        if rows:
            known[BATCH] = sum(rows)
        whole = {name: each.shape for name, each in self.inputs.items() if name not in lists}
        return {**sizes_of_inputs(manifest, whole), **known}, rows or None


class BatchSplitter:
    """Cuts the batches that the stages of this process take, and joins what the last stage gives.

    Inputs of the dtype `cast_from` are cast to those that the manifest has.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Collection[int],
        device: torch.device,
        reduction: LossReduction,
        replicas: int = 1,
        cast_from: torch.dtype | None = None,
    ) -> None:
        self._manifest = manifest
        self._cast_from = cast_from
        self._replicas = replicas
        self._device = device
        self.has_last_stage = len(manifest.stages) - 1 in stages
        self._reduction = reduction if self.has_last_stage else LossReduction()  # others have no target
        inputs = {name for index in stages for name in manifest.stages[index].inputs}
        self._needed = {name for name in inputs if manifest.values[name].producer == CALLER}
        last = manifest.stages[-1].outputs
        known = [value for value in manifest.values.values() if value.producer == CALLER or value.name in last]
        self._batched = [value for value in known if value.batch_dim is not None and not value.is_constant]

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: StepRequest) -> PassedBatch:
        """Find out what was passed. Raises BatchError for arguments and lists that do not fit together."""
        inputs = bind_arguments(self._manifest, args, kwargs)
        target = None if request.target is NO_TARGET else request.target
        passed = *inputs.items(), ("target", target)
        lists = [(name, len(each)) for name, each in passed if isinstance(each, list)]
        for name, length in lists:
            first, count = lists[0]
            if length != count:
                raise BatchError(
                    f"{first} is a list of {count} microbatches, and {name} one of {length}.\nTry: equally many."
                )
            if length == 0 or request.microbatches not in (None, length):
                given = "" if length == 0 else f", and microbatches={request.microbatches} was given"
                raise BatchError(f"{name} is a list of {length} microbatches{given}.\nTry: one for each microbatch.")
        return PassedBatch(inputs, target, lists[0][1] if lists else None)

    def split(self, passed: PassedBatch, request: StepRequest, microbatches: int) -> StepInputs:
        """Check and cut a batch. Raises BatchError for what does not fit the package.

        A batch with too few rows for so many microbatches is cut into fewer, unless the caller has cut it.

        Inputs that only stages of other processes take are checked as well, so that every process raises the same.
        """
        manifest = self._manifest
        for name in sorted(self._needed | passed.inputs.keys()):
            for label, tensor in passed.tensors(name):
                _check_kind(manifest.values[name], label, tensor, self._cast_from)
        known, rows = passed.sizes(manifest)
        given = StepInputs(
            known,
            tuple(manifest.sizes),
            lambda sizes, rows, count: self._cut(sizes, rows, passed, count),
            microbatches,
            request,
            self._reduction,
            self._replicas,
            rows,
        )
        if given.unknown:
            return given
        given.learn({})
        return given

    def _cut(
        self, sizes: Mapping[str, int], rows: Sequence[int] | None, passed: PassedBatch, microbatches: int
    ) -> StepBatch:
        """Cut what was passed whole. Raises BatchError for what does not fit."""
        values = self._manifest.values
        if BATCH in sizes and rows is None:
            least = max(self._manifest.sizes[BATCH].min, 1)
            if sizes[BATCH] < least:
                raise BatchError(
                    f"the batch has {format_number_of('row', sizes[BATCH])}, and a microbatch of this package takes "
                    f"{least} or more.\nTry: {format_number_of('row', least)} or more."
                )
            microbatches = min(microbatches, sizes[BATCH] // least)
        step = StepSizes(sizes, microbatches, rows)
        for each in {id(each): each for each in step.microbatches}.values():
            _check_limits(self._manifest, each.sizes)
        if passed.count not in (None, len(step.microbatches)):
            raise BatchError(
                f"lists of {passed.count} microbatches were passed, and the whole tensors have rows for "
                f"{len(step.microbatches)}.\nTry: lists alone."
            )
        for name, tensors in passed.inputs.items():
            if isinstance(tensors, list):
                _check_list(values[name], tensors, step)
            elif tensors.shape != step.shape(values[name]):
                raise BatchError(_wrong_shape(values[name], tensors, step, microbatches))
        inputs = {name: self._cut_input(values[name], passed.inputs[name], step) for name in self._needed}
        device = self._device if self.has_last_stage else None
        if not isinstance(passed.target, list):
            of_each = map(step.lengths, self._batched)
            lengths = {sum(each): each for each in of_each}
            return StepBatch(step, inputs, cut_target(passed.target, microbatches, device, lengths))
        targets: list[Any] = []
        for index, target in enumerate(passed.target):
            lengths = {step.lengths(value)[index]: step.lengths(value)[index : index + 1] for value in self._batched}
            targets += cut_target(target, 1, device, lengths, f"target[{index}]", f"microbatch {index}")
        return StepBatch(step, inputs, targets)

    def join(self, results: StepOutputs, stages: Mapping[int, nn.Module]) -> Any:
        """The model's outputs for the whole batch, in its own structure; None if none were kept here.

        Args:
            stages: of this process. The mode of the model's last stage is that of the outputs.
        """
        if not results.outputs:
            return None
        manifest = self._manifest
        by_microbatch = [results.outputs[index] for index in sorted(results.outputs)]
        named = zip(manifest.stages[-1].outputs, zip(*by_microbatch, strict=True), strict=True)
        joined = {name: join_outputs(parts, manifest.values[name].batch_dim) for name, parts in named}
        training = stages[len(manifest.stages) - 1].training
        return fill_structure(manifest.outputs_in(training), joined)

    def _cut_input(self, value: Value, passed: Tensor | list[Tensor], step: StepSizes) -> Sequence[Tensor]:
        """A checked input, cut along its batch, or the same for all microbatches if it has none."""
        if isinstance(passed, list):
            return [self._placed(value, tensor) for tensor in passed]
        tensor = self._placed(value, passed)
        if value.batch_dim is None:
            return (tensor,) * len(step.microbatches)
        return tensor.split(step.lengths(value), value.batch_dim)

    def _placed(self, value: Value, tensor: Tensor) -> Tensor:
        return placed(tensor.detach(), self._device, torch_dtype(value))


def join_outputs(parts: Sequence[Any], dim: int | None = 0) -> Any:
    """Join one output of all microbatches along its batch, or along a new dimension if it has none."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.stack(tuple(parts)) if dim is None or parts[0].dim() == 0 else torch.cat(tuple(parts), dim)


def _place_of(manifest: Manifest, size: str) -> str:
    """Where a size is among the inputs: ``dimension 1 of tokens``."""
    shapes = ((value.name, value.shape) for value in manifest.values.values() if value.producer == CALLER)
    places = (f"dimension {shape.index(size)} of {name}" for name, shape in shapes if size in shape)
    return next(places, "a size of the inputs")


def _check_limits(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise BatchError for sizes that the model does not take, or for which it may take another branch."""
    for name, size in sizes.items():
        limits = manifest.sizes[name]
        if size < limits.min or (limits.max is not None and size > limits.max):
            most = f"to {limits.max}" if limits.max is not None else "or more"
            raise BatchError(
                f"{name}, {_place_of(manifest, name)}, is {size}; the stages are the model for {limits.min} {most}.\n"
                f"Try: {limits.min} {most}, or capture the model with {name} {size}, if it takes that."
            )
    for condition in manifest.conditions:
        if not holds(condition, sizes):
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise BatchError(
                f"the stages are the model where {condition}, and a microbatch has {given}.\n"
                "Try: other sizes, or capture the model with these."
            )


def _check_list(value: Value, tensors: Sequence[Tensor], step: StepSizes) -> None:
    """Raise BatchError unless each tensor has the shape of its microbatch."""
    for index, (tensor, sizes) in enumerate(zip(tensors, step.microbatches, strict=True)):
        if tensor.shape != sizes.shape(value):
            raise BatchError(
                f"{value.name}[{index}] has the shape {list(tensor.shape)}; beside the other inputs and microbatches "
                f"it is {list(sizes.shape(value))}: they differ in their rows alone.\nTry: that shape."
            )


def _check_kind(value: Value, label: str, passed: Any, cast_from: torch.dtype | None) -> None:
    """Raise BatchError unless `passed` is a tensor of this input's number of dimensions and its dtype, or of one that
    is cast to it."""
    if not isinstance(passed, Tensor):
        found = "missing" if passed is None else reprlib.repr(passed)
        raise BatchError(f"{label} is {found}, and the model takes a tensor.\nTry: a tensor like {value}.")
    check_strided(label, passed)
    if passed.dim() != len(value.shape):
        raise BatchError(
            f"{label} has the shape {list(passed.shape)}; the captured microbatch is {value}.\n"
            f"Try: a tensor with {format_number_of('dimension', len(value.shape))}."
        )
    own = torch_dtype(value)
    if passed.dtype != own and not (passed.dtype == cast_from and own.is_floating_point):
        raise BatchError(
            f"{label} is {dtype_name(passed)}; the plan has {value}.\nTry: {label}.to(torch.{value.dtype})."
        )


def _wrong_shape(value: Value, passed: Tensor, step: StepSizes, microbatches: int) -> str:
    found, batch = f"{value.name} has the shape {list(passed.shape)}", step.shape(value)
    dim = value.batch_dim
    if dim is None or [*passed.shape[:dim], *passed.shape[dim + 1 :]] != [*batch[:dim], *batch[dim + 1 :]]:
        sizes = ", ".join(f"{name} {size}" for name, size in step.sizes.items())
        captured = f"[{', '.join(map(str, value.shape))}]"
        return (
            f"{found}; the captured microbatch is {captured}, and {microbatches} of them make {list(batch)}"
            f"{f' with {sizes}' if sizes else ''}.\nTry: that shape, or capture the model with another one."
        )
    rows, own = passed.shape[dim], step.lengths(value)[0]
    if BATCH in step.sizes:
        return (
            f"{found}: {rows} rows, and another input has {step.sizes[BATCH]}.\nTry: {list(batch)}; or, if these are "
            f'no rows of the batch, capture with another number of them, or with dynamic_shapes={{"{value.name}": '
            f'{{{dim}: "rows"}}, …}}.'
        )
    near = max(rows // own, 1)
    other = f"microbatches={near}" if near * own == rows else f"{near * own} rows with microbatches={near}"
    text = (
        f"{found}: {rows} rows for {microbatches} microbatches. The captured microbatch is {own} rows.\n"
        f"Try: {batch[dim]} rows, or {other}"
    )
    varying = next((at for at, size in enumerate(value.shape) if isinstance(size, str)), None)
    if varying is None:
        return f"{text}."
    shapes = f'dynamic_shapes={{"{value.name}": {{{varying}: "batch"}}}}'
    return f"{text}; or, if the batch is dimension {varying}, which varies, capture with {shapes}."
