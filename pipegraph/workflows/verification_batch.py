"""The batch on which a package is compared with its model: two microbatches of rows that all differ.

the package takes            the batch                             the model runs on
any number of rows           3 rows, cut into 2 and 1              the whole batch
2 rows per microbatch        4 rows, cut into 2 and 2              the whole batch
lists, or it mixes rows      2 lists of the example's sizes        each microbatch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipegraph.graph.batch.value_proof import distinct_rows
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH, holds
from pipegraph.runtime.batch import bind_arguments, sizes_of_inputs
from pipegraph.torch_private.pytrees import pytree
from pipegraph.units import format_number_of
from pipegraph.workflows.batch import Batch


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
