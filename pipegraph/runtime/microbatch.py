"""Batches: checked against the manifest, cut into microbatches, and joined again from the outputs of microbatches."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import BatchError, nearest
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.package.sizes import BATCH, holds
from pipegraph.runtime.internals import pytree
from pipegraph.runtime.step_data import NO_TARGET, StepBatch, StepInputs, StepRequest, StepSizes, sizes_of_inputs
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.runtime.wiring import dtype_name, torch_dtype


class BatchSplitter:
    """Cuts the batches that the stages of this process take, and joins what the last stage gives."""

    def __init__(
        self, manifest: Manifest, stages: Collection[int], device: torch.device, loss_reduction: str = "mean"
    ) -> None:
        self._manifest = manifest
        self._loss_reduction = loss_reduction
        self._device = device
        self.has_last_stage = len(manifest.stages) - 1 in stages
        inputs = {name for index in stages for name in manifest.stages[index].inputs}
        self._needed = {name for name in inputs if manifest.values[name].producer == CALLER}

    def split(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: StepRequest,
        microbatches: int,
        trains: bool = False,
    ) -> StepInputs:
        """Check and cut a batch. Raises BatchError for what does not fit the package.

        A batch with too few rows for so many microbatches is cut into fewer.

        Inputs that only stages of other processes take are checked as well, so that every process raises the same.
        """
        manifest = self._manifest
        passed = bind_arguments(manifest, args, kwargs)
        for name in sorted(self._needed | passed.keys()):
            _check_kind(manifest.values[name], passed.get(name))
            if trains and passed[name].requires_grad:
                raise BatchError(
                    f"{name} requires a gradient, and a step gives gradients to parameters alone.\n"
                    f"Try: pass {name}.detach(), or make what is to be trained a parameter of the model."
                )
        known = sizes_of_inputs(manifest, {name: tensor.shape for name, tensor in passed.items()})

        def cut(sizes: Mapping[str, int]) -> StepBatch:
            return self._cut(sizes, passed, None if request.target is NO_TARGET else request.target, microbatches)

        given = StepInputs(
            known,
            tuple(manifest.sizes),
            cut,
            microbatches,
            request.with_loss,
            request.return_outputs,
            self._loss_reduction,
        )
        if given.unknown:
            return given
        given.learn({})
        return given

    def _cut(self, sizes: Mapping[str, int], passed: Mapping[str, Tensor], target: Any, microbatches: int) -> StepBatch:
        """Cut what was passed. Raises BatchError for what does not fit."""
        values = self._manifest.values
        if BATCH in sizes:
            least = max(self._manifest.sizes[BATCH].min, 1)
            if sizes[BATCH] < least:
                raise BatchError(f"the batch has {sizes[BATCH]} rows: pass {least} or more.")
            microbatches = min(microbatches, sizes[BATCH] // least)
        step = StepSizes(sizes, microbatches)
        for each in {id(each): each for each in step.microbatches}.values():
            _check_limits(self._manifest, each.sizes)
        for name in passed:
            if passed[name].shape != step.shape(values[name]):
                raise BatchError(_wrong_shape(values[name], passed[name], step, microbatches))
        inputs = {name: self._cut_input(values[name], passed[name], step) for name in self._needed}
        last = self._manifest.stages[-1].outputs
        known = [value for value in values.values() if value.producer == CALLER or value.name in last]
        batched = [value for value in known if value.batch_dim is not None and not value.is_constant]
        lengths = {step.shape(value)[value.batch_dim or 0]: step.lengths(value) for value in batched}
        device = self._device if self.has_last_stage else None
        return StepBatch(step, inputs, cut_target(target, microbatches, device, lengths))

    def join(self, results: StepOutputs) -> Any:
        """The model's outputs for the whole batch, in its own structure; None if none were kept here."""
        if not results.outputs:
            return None
        manifest = self._manifest
        by_microbatch = [results.outputs[index] for index in sorted(results.outputs)]
        named = zip(manifest.stages[-1].outputs, zip(*by_microbatch, strict=True), strict=True)
        joined = {name: join_outputs(parts, manifest.values[name].batch_dim) for name, parts in named}
        return fill_structure(manifest.outputs, joined)

    def _cut_input(self, value: Value, passed: Tensor, step: StepSizes) -> Sequence[Tensor]:
        """A checked input, cut along its batch, or the same for all microbatches if it has none."""
        tensor = passed.detach().to(self._device, non_blocking=True)
        if value.batch_dim is None:
            return (tensor,) * len(step.microbatches)
        return tensor.split(step.lengths(value), value.batch_dim)


def cut_target(
    target: Any, microbatches: int, device: torch.device | None, lengths: Mapping[int, Sequence[int]]
) -> Sequence[Any]:
    """Cut the target's tensors along dimension 0, on `device` if given. Everything else repeats in each microbatch.

    Containers keep their class, but a Mapping that torch's pytree does not know becomes a dict. Raises BatchError for
    another container that holds tensors, and for a tensor whose rows are not the batch's: the loss would broadcast it
    in silence.

    Args:
        lengths: rows that the batch may have, in its inputs and outputs → those of each microbatch.
    """
    leaves, spec = pytree.tree_flatten_with_path(_with_plain_mappings(target))
    cuts = [_cut_leaf(leaf, microbatches, device, lengths, f"target{pytree.keystr(path)}") for path, leaf in leaves]
    return [pytree.tree_unflatten([cut[index] for cut in cuts], spec) for index in range(microbatches)]


def join_outputs(parts: Sequence[Any], dim: int | None = 0) -> Any:
    """Join one output of all microbatches along its batch, or along a new dimension if it has none."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.stack(tuple(parts)) if dim is None or parts[0].dim() == 0 else torch.cat(tuple(parts), dim)


def _check_limits(manifest: Manifest, sizes: Mapping[str, int]) -> None:
    """Raise BatchError for sizes that the model does not take, or for which it may take another branch."""
    for name, size in sizes.items():
        limits = manifest.sizes[name]
        if size < limits.min or (limits.max is not None and size > limits.max):
            most = f"to {limits.max}" if limits.max is not None else "or more"
            raise BatchError(
                f"{name} is {size}; the stages are the model for {limits.min} {most}. Pass such a size, or capture the "
                f"model with {name} {size}."
            )
    for condition in manifest.conditions:
        if not holds(condition, sizes):
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise BatchError(
                f"the stages are the model where {condition}, and a microbatch has {given}. Pass other sizes, or "
                "capture the model with these."
            )


def _check_kind(value: Value, passed: Any) -> None:
    """Raise BatchError unless `passed` is a tensor of this input's dtype and number of dimensions."""
    if not isinstance(passed, Tensor):
        raise BatchError(
            f"{value.name} is {'missing' if passed is None else reprlib.repr(passed)}: pass a tensor, {value}."
        )
    if passed.dim() != len(value.shape):
        raise BatchError(f"{value.name} has the shape {list(passed.shape)}; the captured microbatch is {value}.")
    if passed.dtype != torch_dtype(value):
        raise BatchError(f"{value.name} is {dtype_name(passed)}; the plan has {value}: pass .to(torch.{value.dtype}).")


def _wrong_shape(value: Value, passed: Tensor, step: StepSizes, microbatches: int) -> str:
    found, batch = f"{value.name} has the shape {list(passed.shape)}", step.shape(value)
    dim = value.batch_dim
    if dim is None or [*passed.shape[:dim], *passed.shape[dim + 1 :]] != [*batch[:dim], *batch[dim + 1 :]]:
        sizes = ", ".join(f"{name} {size}" for name, size in step.sizes.items())
        captured = f"[{', '.join(map(str, value.shape))}]"
        return (
            f"{found}; the captured microbatch is {captured}, and {microbatches} of them make {list(batch)}"
            f"{f' with {sizes}' if sizes else ''}."
        )
    rows, own = passed.shape[dim], step.lengths(value)[0]
    if BATCH in step.sizes:
        return f"{found}: {rows} rows, and another input has {step.sizes[BATCH]}: pass {list(batch)}."
    near = max(rows // own, 1)
    other = f"microbatches={near}" if near * own == rows else f"{near * own} rows with microbatches={near}"
    return (
        f"{found}: {rows} rows for {microbatches} microbatches. The captured microbatch is {own} rows: "
        f"pass {batch[dim]} rows, or {other}."
    )


def _with_plain_mappings(target: Any) -> Any:
    def plain(leaf: Any) -> Any:
        return {key: pytree.tree_map(plain, item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(plain, target)


def _cut_leaf(
    leaf: Any, microbatches: int, device: torch.device | None, lengths: Mapping[int, Sequence[int]], where: str
) -> Sequence[Any]:
    if not isinstance(leaf, Tensor):
        if _holds_tensors(leaf):
            raise BatchError(
                f"{where} is a {type(leaf).__name__} that holds tensors, which cannot be cut: pass a dict, a list, a "
                f"tuple or a named tuple of them."
            )
        return [leaf] * microbatches
    tensor = leaf.to(device=device, non_blocking=True)
    if tensor.dim() == 0:
        return [tensor] * microbatches
    if len(tensor) not in lengths:
        raise BatchError(
            f"{where} has {len(tensor)} rows for {microbatches} microbatches: pass "
            f"{' or '.join(map(str, sorted(lengths)))} rows, one for each row of the batch."
        )
    return tensor.split(list(lengths[len(tensor)]))


def _holds_tensors(leaf: Any) -> bool:
    slots = getattr(leaf, "__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    held = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in names)]
    if isinstance(leaf, (list, tuple, set, frozenset)):
        held += leaf
    return any(isinstance(item, Tensor) for item in pytree.tree_leaves(held))


def bind_arguments(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the caller passed, by the names of values, without what is None or left out.

    Raises BatchError for an argument that the model did not have at capture, or of another structure.
    """
    positional, keyword = list(args), dict(kwargs)
    if len(positional) > len(manifest.args):
        raise BatchError(f"{len(positional)} positional arguments were passed; {_signature(manifest)}.")
    for structure in manifest.args[len(positional) :]:  # a positional argument may be passed by its name
        positional.append(keyword.pop(structure, None) if isinstance(structure, str) else None)
    for name in keyword:
        if name not in manifest.kwargs:
            raise BatchError(f"there is no argument {name!r}; {_signature(manifest)}.{nearest(name, manifest.kwargs)}")
    passed = [
        (f"argument {i}", structure, item)
        for i, (structure, item) in enumerate(zip(manifest.args, positional, strict=True))
    ]
    passed += [(f"argument {name!r}", manifest.kwargs[name], item) for name, item in keyword.items()]
    by_name: dict[str, Any] = {}
    for where, structure, item in passed:
        for name, leaf in _leaves(where, structure, item):
            if manifest.values[name].is_constant:
                _check_constant(manifest.values[name], leaf)
            elif leaf is not None:
                by_name[name] = leaf
    return by_name


def fill_structure(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The nested structure with each name replaced by its leaf. Sequences become tuples."""
    if isinstance(structure, Mapping):
        return {key: fill_structure(item, leaves) for key, item in structure.items()}
    if isinstance(structure, tuple):
        return tuple(fill_structure(item, leaves) for item in structure)
    return None if structure is None else leaves[structure]


def _leaves(where: str, structure: Any, passed: Any) -> Iterator[tuple[str, Any]]:
    """(name, what was passed) for every name in the structure."""
    if isinstance(structure, str):
        yield structure, passed
    elif structure is None:
        if passed is not None:
            raise BatchError(
                f"{where} was None when the model was captured: leave it out, or capture the model with it."
            )
    elif isinstance(structure, Mapping):
        if passed is not None and (not isinstance(passed, Mapping) or passed.keys() != structure.keys()):
            other = sorted(passed) if isinstance(passed, Mapping) else type(passed).__name__
            raise BatchError(f"{where} is {other}; it was a dict of {sorted(structure)} when the model was captured.")
        for key, item in structure.items():
            yield from _leaves(f"{where}[{key!r}]", item, None if passed is None else passed[key])
    else:
        if passed is not None and (not isinstance(passed, (tuple, list)) or len(passed) != len(structure)):
            other = f"{len(passed)} items" if isinstance(passed, (tuple, list)) else type(passed).__name__
            raise BatchError(f"{where} is {other}; it had {len(structure)} items when the model was captured.")
        for i, item in enumerate(structure):
            yield from _leaves(f"{where}[{i}]", item, None if passed is None else passed[i])


def _check_constant(value: Value, passed: Any) -> None:
    if passed is not None and (type(passed) is not type(value.constant) or passed != value.constant):
        raise BatchError(
            f"{value.name} is {passed!r}; it was {value.constant!r} when the model was captured, and the stages were "
            f"written for that. Pass {value.constant!r}, or capture the model anew with the other."
        )


def _signature(manifest: Manifest) -> str:
    names = [item if isinstance(item, str) else "…" for item in manifest.args] + [
        f"{name}=" for name in manifest.kwargs
    ]
    return f"the model was captured with ({', '.join(names)})"
