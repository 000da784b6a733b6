"""What a package is compared with: a batch, the steps of the model on it, and how far tensors are from its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from math import isfinite, isinf, nan
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.cost.model_output import default_loss, output_tensors
from pipegraph.errors import BatchError, SourceError
from pipegraph.graph.batch.value_proof import distinct_rows
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.kernels.loss import check_loss, divide_loss
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH, holds
from pipegraph.runtime.batch import bind_arguments, sizes_of_inputs
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction, LossWeight
from pipegraph.runtime.microbatches import join_outputs
from pipegraph.torch_private.pytrees import pytree
from pipegraph.units import format_number_of
from pipegraph.workflows.batch import Batch, explain_model_mismatch, source_loss
from pipegraph.workflows.training_functions import errors_named, training_function

TOLERANCE = 1e-5
"""Relative, in float32; eight units in the last place for coarser formats, and none for integers."""

_SAFETY = 16
"""How many times the effect of one unit in the last place of weights and inputs counts as rounding."""
_MOST = 0.1
"""A larger difference is not rounding, except in a loss, which may be a sum of much larger values."""

# ---- batch -----------------------------------------------------------------------------------------------------------
# Two microbatches of rows that all differ.
#
# the package takes            the batch                             the model runs on
# any number of rows           3 rows, cut into 2 and 1              the whole batch
# 2 rows per microbatch        4 rows, cut into 2 and 2              the whole batch
# lists, or it mixes rows      2 lists of the example's sizes        each microbatch


@dataclass(frozen=True)
class VerificationBatch:
    """A batch, whole and in microbatches.

    Attributes:
        whole_batch: None if the model is compared on each microbatch alone.
        microbatches: what the model takes for each.
        passed: what the pipeline takes.
        rows: of each microbatch.
        reason: why there is no whole batch, or a single microbatch; "" otherwise.
    """

    whole_batch: Batch | None
    microbatches: tuple[Batch, ...]
    passed: Batch
    rows: tuple[int, ...]
    reason: str = ""

    @property
    def weights(self) -> list[float]:
        """The share of each microbatch in the mean over rows."""
        return [rows / sum(self.rows) for rows in self.rows]

    def __str__(self) -> str:
        if len(self.rows) == 1:
            return f"1 microbatch: {self.reason}"
        if self.whole_batch is None:
            return f"2 microbatches, each compared with the model alone: {self.reason}"
        first, second = self.rows
        return f"{format_number_of('row', first + second)}, all different, in microbatches of {first} and {second}"


def verification_batch(source: ModelSource, manifest: Manifest) -> VerificationBatch:
    """Return the batch for a package. Raises BatchError if the example is not one of the package's model."""
    inputs = bind_arguments(manifest, source.args, source.kwargs)
    tensors = {name: leaf for name, leaf in inputs.items() if isinstance(leaf, Tensor)}
    values = manifest.values
    if manifest.batch.mixing:
        return lists_of_microbatches(source, manifest, f"the model mixes rows, by {manifest.batch.mixing[0]}")
    lists = [name for name in tensors if values[name].batch_role == "list"]
    if lists:
        return lists_of_microbatches(source, manifest, f"{', '.join(lists)} is given as a list")
    lengths = [leaf.shape[dim] for name, leaf in tensors.items() if (dim := _dim(values[name], leaf)) is not None]
    if not lengths or not min(lengths):
        example = Batch(source.args, source.kwargs, source.example_target)
        return VerificationBatch(example, (example,), example, (1,), "no input has rows")
    rows = _rows(manifest, {name: leaf.shape for name, leaf in tensors.items()}, min(lengths))
    dims = _Dims.infer(source, manifest, min(lengths))
    if dims is None or rows is None:
        return lists_of_microbatches(source, manifest, "its sizes do not allow another number of rows")
    batch = dims.batch(sum(rows))
    microbatches = tuple(dims.slices(batch, rows))
    passed = batch
    if any(dims.target):  # the target of a pipeline is cut along dimension 0
        passed = Batch(batch.args, batch.kwargs, [microbatch.target for microbatch in microbatches])
    return VerificationBatch(batch, microbatches, passed, rows)


def lists_of_microbatches(source: ModelSource, manifest: Manifest, reason: str) -> VerificationBatch:
    """Return two microbatches of the example's sizes, which the pipeline takes as lists."""
    inputs = bind_arguments(manifest, source.args, source.kwargs)
    microbatches = tuple(_like_example(source, manifest, seed) for seed in range(2))
    names = _names(inputs, (source.args, source.kwargs))
    by_leaf = zip(*(_leaves((microbatch.args, microbatch.kwargs)) for microbatch in microbatches), strict=True)
    joined = [
        list(parts) if name is not None and manifest.values[name].batch_role != "whole" else parts[0]
        for name, parts in zip(names, by_leaf, strict=True)
    ]
    args, kwargs = _refilled((source.args, source.kwargs), joined)
    target = None if source.example_target is None else [microbatch.target for microbatch in microbatches]
    return VerificationBatch(None, microbatches, Batch(args, kwargs, target), (1, 1), reason)


def with_whole_inputs_as_rows(source: ModelSource, manifest: Manifest) -> tuple[Batch, list[str]] | None:
    """Return the batch with whole inputs of one entry per row taken as rows, and their names; None without such inputs.

    Such a role is wrong if the model takes this batch, and not the one of the manifest.
    """
    inputs = bind_arguments(manifest, source.args, source.kwargs)
    tensors = {name: leaf for name, leaf in inputs.items() if isinstance(leaf, Tensor) and leaf.dim()}
    lengths = [
        leaf.shape[dim] for name, leaf in tensors.items() if (dim := _dim(manifest.values[name], leaf)) is not None
    ]
    names = [
        name
        for name, leaf in tensors.items()
        if manifest.values[name].batch_role == "whole" and lengths and len(leaf) == min(lengths)
    ]
    dims = _Dims.infer(source, manifest, min(lengths), names) if names else None
    return None if dims is None else (dims.batch(2 * min(lengths)), names)


@dataclass(frozen=True)
class _Dims:
    """The example in leaves, and the batch dimension of each."""

    arguments: Any
    targets: Any
    dims: Sequence[int | None]
    target: Sequence[int | None]
    example: int

    @classmethod
    def infer(cls, source: ModelSource, manifest: Manifest, example: int, as_rows: Iterable[str] = ()) -> _Dims | None:
        """Return them; None if a tensor has not a multiple of the rows of the example."""
        arguments = source.args, source.kwargs
        leaves = _leaves(arguments)
        names = _names(bind_arguments(manifest, *arguments), arguments)
        dims = [
            None if name is None else 0 if name in as_rows else _dim(manifest.values[name], leaf)
            for name, leaf in zip(names, leaves, strict=True)
        ]
        if any(dim is not None and leaf.shape[dim] % example for leaf, dim in zip(leaves, dims, strict=True)):
            return None
        outputs = [manifest.values[name].batch_dim for name in manifest.stages[-1].outputs]
        of_outputs = [dim for dim in outputs if dim is not None]
        target = [_target_dim(leaf, of_outputs, example) for leaf in _leaves(source.example_target)]
        return cls(arguments, source.example_target, dims, target, example)

    def batch(self, rows: int) -> Batch:
        """The batch with a number of rows."""
        args, kwargs = _refilled(self.arguments, distinct_rows(_leaves(self.arguments), self.dims, rows))
        of_target = zip(_leaves(self.targets), self.target, strict=True)
        targets = [_repeated(leaf, dim, self.example, rows) for leaf, dim in of_target]
        return Batch(args, kwargs, _refilled(self.targets, targets))

    def slices(self, batch: Batch, rows: Sequence[int]) -> Iterator[Batch]:
        """The microbatches of a batch."""
        leaves, targets = _leaves((batch.args, batch.kwargs)), _leaves(batch.target)
        first = 0
        for count in rows:
            cut = _slicer(first, count, sum(rows))
            args, kwargs = _refilled(self.arguments, map(cut, leaves, self.dims))
            yield Batch(args, kwargs, _refilled(self.targets, map(cut, targets, self.target)))
            first += count


def _slicer(first: int, count: int, rows: int) -> Callable[[Any, int | None], Any]:
    def cut(leaf: Any, dim: int | None) -> Any:
        if dim is None:
            return leaf
        entries = leaf.shape[dim] // rows
        return leaf.narrow(dim, first * entries, count * entries)

    return cut


def _names(inputs: Mapping[str, Any], arguments: Any) -> list[str | None]:
    """The name of each leaf of the arguments; None for one that is not an input, such as a constant."""
    by_identity = {id(leaf): name for name, leaf in inputs.items() if isinstance(leaf, Tensor)}
    return [by_identity.get(id(leaf)) if isinstance(leaf, Tensor) else None for leaf in _leaves(arguments)]


def _dim(value: Value, leaf: Tensor) -> int | None:
    dim = value.batch_dim
    return dim if dim is not None and leaf.dim() > dim else None


def _target_dim(leaf: Any, outputs: Sequence[int], example: int) -> int | None:
    """The batch dimension of a tensor of the target: that of an output, or 0 for rows that are joined."""
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return None
    for dim in (*outputs, 0):
        if leaf.dim() > dim and leaf.shape[dim] == example:
            return dim
    return None if len(leaf) % example else 0


def _repeated(leaf: Any, dim: int | None, example: int, rows: int) -> Any:
    """A tensor of the target with the entries of row ``r % example`` for row ``r``."""
    if dim is None:
        return leaf
    by_row = leaf.unflatten(dim, (example, -1))
    return by_row.index_select(dim, torch.arange(rows, device=leaf.device) % example).flatten(dim, dim + 1)


def _rows(manifest: Manifest, shapes: Mapping[str, Sequence[int]], example: int) -> tuple[int, int] | None:
    """The rows of two microbatches, unequal if the package allows that; None if it does not take any."""
    if BATCH not in manifest.sizes:
        return example, example
    sizes, limits = sizes_of_inputs(manifest, shapes.items()), manifest.sizes[BATCH]
    rows = sizes.get(BATCH, example)
    least = max(limits.min, 2 if manifest.batch.per_microbatch else 1)  # statistics need two rows
    for pair in ((rows, rows - 1), (rows + 1, rows), (rows, rows)):
        in_range = all(least <= count and (limits.max is None or count <= limits.max) for count in pair)
        if in_range and all(holds(text, {**sizes, BATCH: count}) for text in manifest.conditions for count in pair):
            return pair
    return None


def _like_example(source: ModelSource, manifest: Manifest, seed: int) -> Batch:
    """A microbatch of the example's sizes. Integers of a list stay: they may be offsets into another input."""
    arguments = source.args, source.kwargs
    names = _names(bind_arguments(manifest, *arguments), arguments)
    leaves = []
    for leaf, name in zip(_leaves(arguments), names, strict=True):
        value = None if name is None else manifest.values[name]
        dim = None if value is None else value.batch_dim
        if value is not None and value.batch_role == "list":
            dim = 0 if leaf.is_floating_point() and leaf.dim() else None
        rows = 0 if dim is None else leaf.shape[dim]
        leaves.append(distinct_rows([leaf], [dim], rows, seed)[0] if rows else leaf)
    args, kwargs = _refilled(arguments, leaves)
    return Batch(args, kwargs, source.example_target)


def _leaves(structure: Any) -> list[Any]:
    leaves: list[Any] = []

    def collect(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    _mapped(collect, structure)
    return leaves


def _refilled(structure: Any, leaves: Iterable[Any]) -> Any:
    """The structure with other leaves, in the order of `_leaves`."""
    remaining = iter(leaves)
    return _mapped(lambda leaf: next(remaining), structure)


def _mapped(function: Callable[[Any], Any], structure: Any) -> Any:
    """Apply a function to every leaf. The fields of dataclasses count as well, which torch's pytree may not know."""

    def of_leaf(leaf: Any) -> Any:
        if is_dataclass(leaf) and not isinstance(leaf, type):
            items = {field.name: _mapped(function, getattr(leaf, field.name)) for field in fields(leaf)}
            return replace(leaf, **items)
        return function(leaf)

    return pytree.tree_map(of_leaf, structure)


# ---- step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTensors:
    """Tensors of one step, by name. A parameter's gradient may be None."""

    outputs: dict[str, Tensor]
    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    evaluated: dict[str, Tensor]

    def by_kind(self) -> dict[str, Mapping[str, Tensor | None]]:
        """The tensors by the kinds of `TensorComparison`."""
        return {
            "output": self.outputs,
            "loss": {"loss": self.loss},
            "gradient": self.gradients,
            "buffer": self.buffers,
            "evaluation": self.evaluated,
        }


@dataclass(frozen=True)
class ModelStep:
    """A step of a model, as a whole or microbatch after microbatch.

    Attributes:
        steps: of which this is one.
        microbatches: what the model takes, one after the other; the whole batch is a single one.
        weights: the factor of the loss of each.
        evaluation: what the model takes after the step, in evaluation mode. If there is a whole batch, it comes first,
            and outputs without rows are those of the microbatches that follow.
    """

    steps: ModelSteps
    microbatches: Sequence[Batch]
    weights: Sequence[float]
    evaluation: Sequence[Sequence[Batch]]

    def run(self, backward: bool = True, seed: int = 0, nudged: bool = False) -> StepTensors:
        """Run the step, and the model in evaluation mode after it, on a new copy of the model.

        Args:
            backward: without it, only the outputs and the loss are computed.
            seed: what random operations draw from.
            nudged: whether every parameter and input is first moved by one unit in its last place, up or down at
                random.

        Raises:
            SourceError: the model or the loss raises an error.
        """
        source = self.steps.source
        subject = f"{type(source.model).__name__} ({source.name})"
        advice = "the model itself on its example_inputs in Python; it should run without error."
        with own_model(source, seed) as model, errors_named(subject, advice):
            if self.steps.evaluate:
                model.eval()
            batches, evaluation = copy.deepcopy((list(self.microbatches), list(self.evaluation)))
            if nudged:
                inputs = output_tensors([(example.args, example.kwargs) for example in chain(batches, *evaluation)])
                _nudge([*model.parameters(), *inputs.values()])
            outputs, losses = [], []
            for batch, weight in zip(batches, self.weights, strict=True):
                output = model(*batch.args, **batch.kwargs)
                loss = _loss(source, self.steps.loss_fn, output, batch.target)
                if backward and loss.requires_grad:
                    (loss * weight).backward()
                outputs.append(_detached(output))
                losses.append(loss.detach() * weight)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
            buffers = dict(model.named_buffers(remove_duplicate=False))
            of_step, of_evaluation = self.steps.output_dims_of_step
            evaluated: dict[str, Tensor] = {}
            model.eval()
            for group in evaluation if backward else ():
                with torch.no_grad():
                    parts = [_detached(model(*microbatch.args, **microbatch.kwargs)) for microbatch in group]
                outputs_of_group = joined_outputs(parts, of_evaluation, self.steps.batch.weights)
                evaluated |= {
                    name: tensor
                    for name, tensor in outputs_of_group.items()
                    if name not in evaluated or of_evaluation.get(name) is None
                }
        return StepTensors(
            joined_outputs(outputs, of_step, self.steps.batch.weights),
            torch.stack(losses).sum() if len(losses) > 1 else losses[0],
            gradients,
            buffers,
            evaluated,
        )


def joined_outputs(
    parts: Sequence[dict[str, Tensor]], dims: Mapping[str, int | None], weights: Sequence[float]
) -> dict[str, Tensor]:
    """Join the outputs of microbatches as a pipeline does. Outputs that other microbatches do not have are left out."""
    if len(parts) < 2:
        return dict(*parts)
    joined = {
        name: join_outputs([part[name] for part in parts], dims.get(name), weights)
        for name in parts[0]
        if all(name in part for part in parts)
    }
    return output_tensors(joined)


def _detached(output: Any) -> dict[str, Tensor]:
    # A later microbatch may write to what this one returned, such as a buffer.
    return {name: tensor.detach().clone() for name, tensor in output_tensors(output).items()}


def _loss(source: ModelSource, loss_fn: Callable[..., Any], output: Any, target: Any) -> Tensor:
    """The loss of an output. Raises PipegraphError if it is not a loss, or if `loss_fn` raises an error."""
    advice = "loss_fn(output, example_target) in Python, with what the model returns for its example_inputs."
    with errors_named(f"loss_fn of {source.name}", advice):
        returned = loss_fn(output, target)
    loss, _ = divide_loss(returned)
    check_loss(loss)
    return loss


@contextmanager
def own_model(source: ModelSource, seed: int = 0) -> Iterator[nn.Module]:
    """The model of a source, built again with the same values, while random numbers are seeded.

    A deep copy would not do: what a lambda or a closure of the model holds is not copied.
    """
    with torch.random.fork_rng(devices=[]):
        model = source.rebuild() if source.rebuild is not None else source.model
        if model is source.model:
            model = copy.deepcopy(source.model)  # nothing builds another one
        else:
            _copy_values(source, model)
        torch.manual_seed(seed)
        yield model


def _copy_values(source: ModelSource, model: nn.Module) -> None:
    """Give a model that was built again the values of the first one: it need not be seeded."""
    state, values = dict(_tensors(model)), dict(_tensors(source.model))
    if {name: tensor.shape for name, tensor in state.items()} != {name: value.shape for name, value in values.items()}:
        differing = sorted(state.keys() ^ values.keys()) or sorted(
            name for name in state if state[name].shape != values[name].shape
        )
        raise SourceError(
            f"{source.name} builds another model each time: {differing[0]} differs.",
            "let it build the same modules with the same sizes whenever it runs.",
        )
    with torch.no_grad():
        for name, tensor in state.items():
            tensor.copy_(values[name])


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))


@torch.no_grad()
def _nudge(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            signs = torch.randint(2, tensor.shape, device=tensor.device) * 2 - 1
            moved = tensor + tensor * signs.to(tensor.dtype) * torch.finfo(tensor.dtype).eps
            tensor.copy_(torch.where(moved.isfinite(), moved, tensor))  # a mask may hold the least number that there is


# ---- model steps -----------------------------------------------------------------------------------------------------
# The steps of a model that a package is compared with: on the whole batch, and microbatch after microbatch.


@dataclass(frozen=True)
class ModelSteps:
    """Steps of a model on one batch.

    Attributes:
        loss_fn, loss_weight: of the model file.
        output_dims: the batch dimension of each output by its path, in training and in evaluation mode.
        evaluate: whether the steps run in evaluation mode.
    """

    source: ModelSource
    batch: VerificationBatch
    loss_fn: LossFunction
    loss_weight: LossWeight | None
    output_dims: tuple[Mapping[str, int | None], Mapping[str, int | None]]
    evaluate: bool = False

    @property
    def has_whole_batch(self) -> bool:
        """Whether the whole batch has several microbatches."""
        return self.batch.whole_batch is not None and len(self.batch.rows) > 1

    @property
    def output_dims_of_step(self) -> tuple[Mapping[str, int | None], Mapping[str, int | None]]:
        """The batch dimension of each output, of the step and in evaluation mode after it."""
        in_training, in_evaluation = self.output_dims
        return (in_evaluation if self.evaluate else in_training), in_evaluation

    @property
    def reference(self) -> ModelStep:
        """The step on the whole batch or, without a whole batch, on each microbatch."""
        whole_batch = self.batch.whole_batch
        return self.by_microbatch if whole_batch is None else self._step([whole_batch], [1.0], [[whole_batch]])

    @property
    def by_microbatch(self) -> ModelStep:
        """The step on each microbatch. Gradients add up, and each loss has the weight of its rows."""
        microbatches, whole_batch = self.batch.microbatches, self.batch.whole_batch
        evaluation = [microbatches] if whole_batch is None else [[whole_batch], microbatches]
        return self._step(microbatches, self.batch.weights, evaluation)

    def _step(
        self, microbatches: Sequence[Batch], weights: Sequence[float], evaluation: Sequence[Sequence[Batch]]
    ) -> ModelStep:
        if self.loss_weight is not None:
            total = LossReduction(weight_of=self.loss_weight).weigh([batch.target for batch in microbatches])
            weights = [1 / max(total, 1.0) for _ in microbatches]
        return ModelStep(self, microbatches, weights, evaluation)


def first_step(source: ModelSource, manifest: Manifest) -> tuple[ModelSteps, StepTensors]:
    """Return the steps on a batch that the model takes, and what the first one computes.

    Raises:
        SourceError: the model or its loss raises an error, on its example too.
        BatchError: the model raises an error on a batch of rows as the manifest describes them.
    """
    with explain_model_mismatch(manifest, source):
        batch = verification_batch(source, manifest)
    dims = tuple(_dims(manifest, manifest.outputs_in(training)) for training in (True, False))
    steps = ModelSteps(source, batch, source_loss(source), training_function(source, "loss_weight"), (dims[0], dims[1]))
    try:
        return steps, steps.reference.run()
    except SourceError as error:
        if batch.whole_batch is None or len(batch.rows) == 1:
            raise
        reason = _reason_for_lists(steps, manifest, error)
    steps = replace(steps, batch=lists_of_microbatches(source, manifest, reason))
    return steps, steps.reference.run()


def roles(manifest: Manifest) -> str:
    """The roles of the inputs: ``tokens rows along dimension 0, table whole``."""
    return ", ".join(
        f"{value.name} rows along dimension {value.batch_dim}"
        if value.batch_role == "rows"
        else f"{value.name} {'as a list' if value.batch_role == 'list' else 'whole'}"
        for value in manifest.caller_tensors()
    )


def _reason_for_lists(steps: ModelSteps, manifest: Manifest, error: SourceError) -> str:
    """Why the model is compared on lists of microbatches after an error on the whole batch.

    Raises BatchError if a role of the manifest is the likely cause.
    """
    source, problem = steps.source, error.problem
    rows = sum(steps.batch.rows)
    if _takes(steps, steps.batch.whole_batch):
        return f"the loss does not take {rows} rows"
    example = Batch(source.args, source.kwargs, source.example_target)
    if not _takes(steps, example):
        raise error
    rows_instead = with_whole_inputs_as_rows(source, manifest)
    if rows_instead is not None and _takes(steps, rows_instead[0]):
        names = ", ".join(rows_instead[1])
        raise BatchError(
            f"The model does not take {rows} rows with the {names} of the example, which pipeline.json gives whole "
            f"to every microbatch: {problem}\n"
            f"Its inputs: {roles(manifest)}.",
            f"rows for {names}, as the model takes them: split again with --batch-dim {rows_instead[1][0]}=0.",
        )
    if BATCH in manifest.sizes:
        raise BatchError(
            f"The model takes its example, and not {rows} rows of it, which pipeline.json allows: {problem}\n"
            f"Its inputs: {roles(manifest)}.",
            "the right role for each input: split again with --batch-dim NAME=DIM, NAME=whole or NAME=list.",
        )
    return f"the model does not take {rows} rows"


def _takes(steps: ModelSteps, batch: Batch | None) -> bool:
    """Return whether the forward of the model runs on a batch."""
    if batch is None:
        return False
    without_loss = replace(steps, loss_fn=default_loss, loss_weight=None)
    try:
        without_loss._step([batch], [1.0], []).run(backward=False)
    except SourceError:
        return False
    return True


def _dims(manifest: Manifest, structure: Any, path: str = "") -> dict[str, int | None]:
    """The batch dimension of each output, by its path as `output_tensors` names it."""
    if isinstance(structure, str):
        return {path: manifest.values[structure].batch_dim}
    items = structure.items() if isinstance(structure, Mapping) else enumerate(structure or ())
    dims: dict[str, int | None] = {}
    for key, item in items:
        dims |= _dims(manifest, item, f"{path}.{key}" if path else str(key))
    return dims


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorComparison:
    """A tensor of the package compared with the model's. ``difference`` is relative; infinite if one lacks it.

    Its kind is that of a step's tensor, ``weight`` for an entry of ``state_dict()`` before the step, or ``evaluation``
    for an output in evaluation mode after it. ``problem`` says what is not comparable: another dtype or shape.
    """

    kind: str
    name: str
    difference: float
    tolerance: float
    problem: str = ""

    @property
    def equal(self) -> bool:
        return self.difference <= self.tolerance  # false for nan

    def __str__(self) -> str:
        return self.problem or f"{self.difference:.1e}"


def compare_named(
    kind: str, reference: Mapping[str, Tensor | None], actual: Mapping[str, Tensor | None]
) -> Iterator[TensorComparison]:
    """Compare all tensors of a kind.

    A difference is relative to a thousandth of the largest value of them all at least: a tensor that is zero but for
    rounding, such as the gradient of an attention's key bias, is then not reported.
    """
    floor = max((largest(tensor) for tensor in reference.values() if tensor is not None), default=0.0) / 1000
    for name in dict.fromkeys([*reference, *actual]):
        yield compare(kind, name or kind, actual.get(name), reference.get(name), floor)


def compare(
    kind: str, name: str, actual: Tensor | None, reference: Tensor | None, floor: float = 0.0
) -> TensorComparison:
    """Compare the largest difference of two tensors with the reference's largest value. A missing gradient is zero."""
    if actual is None and reference is None:
        return TensorComparison(kind, name, 0.0, TOLERANCE)
    if actual is None or reference is None:
        present = reference if actual is None else actual
        assert present is not None
        if kind == "gradient" and largest(present) == 0:
            return TensorComparison(kind, name, 0.0, TOLERANCE)
        where = "the package" if actual is None else "the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{where} has none")
    if actual.dtype != reference.dtype:
        names = [str(tensor.dtype).removeprefix("torch.") for tensor in (actual, reference)]
        return TensorComparison(kind, name, float("inf"), TOLERANCE, f"{names[0]}, and {names[1]} in the model")
    if actual.shape != reference.shape:
        problem = f"{list(actual.shape)}, and {list(reference.shape)} in the model"
        return TensorComparison(kind, name, float("inf"), TOLERANCE, problem)
    tolerance = 0.0 if kind == "weight" else _tolerance(actual.dtype)
    if torch.equal(actual, reference):  # the usual case; the rest makes copies
        return TensorComparison(kind, name, 0.0, tolerance)
    first, second = _double(actual), _double(reference)
    # The difference of equal infinities, as in a mask, is 0.
    difference = torch.where(first == second, 0.0, first - second).abs()
    greatest = float(difference.max()) if difference.numel() else 0.0
    return TensorComparison(kind, name, greatest / max(largest(reference), floor, 1e-30), tolerance)


def within_rounding(comparison: TensorComparison, rounding: float) -> TensorComparison:
    """The same with a tolerance of what rounding does to this tensor: that of a loss may be all there is of it.

    Args:
        comparison: what differs.
        rounding: the relative change of the model's tensor that one unit in the last place of weights and inputs makes.
    """
    if not (isfinite(comparison.difference) and isfinite(rounding) and comparison.tolerance):
        return comparison
    most = float("inf") if comparison.kind == "loss" else min(_MOST, 100 * comparison.tolerance)
    return replace(comparison, tolerance=max(comparison.tolerance, min(_SAFETY * rounding, most)))


def largest(tensor: Tensor) -> float:
    """Return the largest magnitude of the finite values; nan if there is a nan, 0 without finite values."""
    if tensor.is_floating_point() and tensor.numel():
        magnitude = float(tensor.detach().abs().max())
        if not isinf(magnitude):
            return magnitude
    values = _double(tensor).abs()
    if values.isnan().any():
        return nan
    values = values[~values.isinf()]
    return float(values.max()) if values.numel() else 0.0


def _tolerance(dtype: torch.dtype) -> float:
    exact = not (dtype.is_floating_point or dtype.is_complex)
    return 0.0 if exact else max(TOLERANCE, 8 * torch.finfo(dtype).eps)


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()
