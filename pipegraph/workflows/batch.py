"""The batch and the loss that a package is run with: a model file's, or made from the manifest."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipegraph.arguments import argument
from pipegraph.cost.model_output import default_loss
from pipegraph.device import require_room
from pipegraph.errors import BatchError, PackageError, SourceError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.package import Manifest, Value
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.runtime.wiring import random_for
from pipegraph.torch_private.pytrees import pytree


@dataclass(frozen=True)
class Batch:
    """The arguments of one step, all its microbatches joined along the batch of each input."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None


def batch_from_manifest(manifest: Manifest, microbatches: int, seed: int = 0) -> Batch:
    """Make seeded inputs as the manifest describes them: normal floats, integers below their bound, constants."""
    generator = torch.Generator().manual_seed(seed)
    # In the order of `values`, which every process reads alike.
    inputs = {
        name: value.constant if value.is_constant else _random(value, microbatches, generator)
        for name, value in sorted(manifest.at_capture().values.items())
        if value.producer < 0
    }
    args, kwargs = pytree.tree_map(
        lambda name: None if name is None else inputs[name], (manifest.args, manifest.kwargs)
    )
    return Batch(args, kwargs)


def planned_rows(manifest: Manifest) -> int | None:
    """Return the rows of a microbatch that a package was planned for; None without a plan."""
    if manifest.prediction is None:
        return None
    cut = (value for value in manifest.values.values() if value.producer < 0 and value.batch_dim == 0)
    return next((value.shape_at(manifest.captured_sizes)[0] for value in cut), None)


def batch_from_source(source: ModelSource, microbatches: int, manifest: Manifest) -> Batch:
    """Return the example inputs and target of a model file, repeated for each microbatch.

    Each microbatch has the number of rows and tokens that the source asks for. Inputs without a batch are not repeated:
    each microbatch takes the whole input.
    """
    example = at_asked_sizes(source)

    def repeat(leaf: Any, dim: int | None) -> Any:
        if dim is None or not isinstance(leaf, Tensor) or leaf.dim() <= dim:
            return leaf
        return torch.cat([leaf] * microbatches, dim)

    leaves, form = pytree.tree_flatten((example.args, example.kwargs))
    names = pytree.tree_leaves((manifest.args, manifest.kwargs))
    if len(names) == len(leaves):
        dims = [None if name is None else manifest.values[name].batch_dim for name in names]
    else:  # of another model, whose inputs are refused by name
        dims = [0] * len(leaves)
    args, kwargs = pytree.tree_unflatten(list(map(repeat, leaves, dims)), form)
    return Batch(args, kwargs, pytree.tree_map(lambda leaf: repeat(leaf, 0), example.example_target))


def at_asked_sizes(source: ModelSource) -> ModelSource:
    """Return the source with an example that has the number of rows and tokens that it asks for."""
    example = source.args, source.kwargs, source.example_target
    args, kwargs, target = pytree.tree_map(partial(_resized, source), example)
    return replace(source, args=args, kwargs=kwargs, example_target=target)


def loss_and_target(source: ModelSource) -> tuple[LossFunction, Any] | None:
    """Return the loss of a model's file and the target of one microbatch; None if the file has no loss.

    The target has the number of rows and tokens that the source asks for.
    """
    if source.loss_fn is None:
        return None
    return source_loss(source), pytree.tree_map(partial(_resized, source), source.example_target)


def _resized(source: ModelSource, tensor: Any) -> Any:
    """A tensor with its rows, and its tokens, repeated or left out; those of a target may be joined: [batch * seq].

    Rows and tokens are dimensions 0 and 1 of the source's first tensor, and of those that have the same sizes there.
    """
    first = next((leaf for leaf in pytree.tree_leaves((source.args, source.kwargs)) if isinstance(leaf, Tensor)), None)
    if not isinstance(tensor, Tensor) or first is None:
        return tensor
    batch, seq = (*first.shape[:2], 0, 0)[:2]
    requested_sizes = {batch: source.batch or batch}
    if first.dim() > 1:
        requested_sizes |= {batch * seq: requested_sizes[batch] * (source.seq or seq)}
    for dim, sizes in enumerate((requested_sizes, {seq: source.seq or seq})[: tensor.dim()]):
        size = tensor.shape[dim]
        if sizes.get(size, size) != size:
            request = argument("batch", source.batch) if dim == 0 and source.batch else argument("seq", source.seq)
            require_room(tensor.nbytes // max(size, 1) * sizes[size], f"a tensor with {request}")
            tensor = tensor.index_select(dim, torch.arange(sizes[size], device=tensor.device) % size)
    return tensor


def source_loss(source: ModelSource) -> LossFunction:
    """Return the model file's loss or, if it has none, the default: what the model returns as its loss.

    Raises SourceError if the loss takes a target and the file has no ``example_target``.
    """
    loss_fn = source.loss_fn
    if loss_fn is None:
        return default_loss
    if source.example_target is not None:
        return loss_fn
    try:
        inspect.signature(loss_fn).bind("output")
    except TypeError:
        raise SourceError(
            f"{source.name} defines loss_fn(output, target) and no example_target.",
            "example_target = … with the target of one microbatch, or leave loss_fn out.",
        ) from None
    except ValueError:  # no signature, as for a builtin
        return loss_fn
    return lambda output, target: loss_fn(output)


@contextmanager
def explain_model_mismatch(manifest: Manifest, source: ModelSource | None) -> Iterator[None]:
    """Turn the error of inputs or weights that do not fit into one that names the two models, if they differ.

    A target belongs to its inputs, and not to a model.
    """
    try:
        yield
    except (BatchError, PackageError) as error:
        split = (manifest.model.class_name, manifest.model.source)
        is_of_target = isinstance(error, BatchError) and error.is_of_target
        if source is None or is_of_target or split == (type(source.model).__name__, source.name):
            raise
        raise type(error)(
            f"The package is of {split[0]} ({split[1] or 'no file'}), and this is {type(source.model).__name__} "
            f"({source.name}): {error.problem}",
            "the model that was split, or the package of this one.",
        ) from error


def _random(value: Value, microbatches: int, generator: torch.Generator) -> Tensor:
    shape = [size * (microbatches if dim == value.batch_dim else 1) for dim, size in enumerate(value.shape_at())]
    return random_for(value, tuple(shape), generator)
