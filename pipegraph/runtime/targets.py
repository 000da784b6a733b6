"""The target of a step, cut into microbatches along its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import BatchError
from pipegraph.torch_private.pytrees import pytree


def cut_target(
    target: Any,
    microbatches: int,
    device: torch.device | None,
    lengths: Mapping[int, Sequence[int]],
    name: str = "target",
    owner: str = "the batch",
    dims: Sequence[int] = (0,),
) -> Sequence[Any]:
    """Cut the target's tensors along their rows, on `device` if given. Everything else repeats in each microbatch.

    Containers keep their class, but a Mapping that torch's pytree does not know becomes a dict. Raises BatchError for
    another container that holds tensors, and for a tensor whose rows are not the batch's: the loss would broadcast it
    in silence.

    Args:
        lengths: rows that the batch may have, in its inputs and outputs → those of each microbatch.
        name, owner: of the target and of what has its rows, in messages.
        dims: along which the rows of a tensor may lie. The first that it has with such a length counts.
    """
    leaves, spec = pytree.tree_flatten_with_path(_with_plain_mappings(target))
    cuts = [
        _cut_leaf(leaf, microbatches, device, lengths, f"{name}{pytree.keystr(path)}", owner, dims)
        for path, leaf in leaves
    ]
    if spec.is_leaf():
        return cuts[0]
    return [pytree.tree_unflatten([cut[index] for cut in cuts], spec) for index in range(microbatches)]


def join_target(targets: Sequence[Any], lengths: Collection[int], dims: Sequence[int]) -> Any:
    """Join the targets of microbatches. What has no rows is the same for all of them.

    Args:
        lengths: rows that the batch may have.
        dims: along which the rows of a tensor may lie, as in `cut_target`.
    """

    def joined(*parts: Any) -> Any:
        first = parts[0]
        if not isinstance(first, Tensor) or first.dim() == 0 or len(parts) == 1:
            return first
        along = (dim for dim in dims if dim < first.dim())
        dim = next((dim for dim in along if sum(part.shape[dim] for part in parts) in lengths), 0)
        return torch.cat(parts, dim)

    return pytree.tree_map(joined, *targets)


def placed(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on `device` if given, and in this dtype.

    Only what goes to a GPU is not waited for: whatever reads it there comes later in the same stream.
    """
    return tensor.to(device, dtype, non_blocking=device is not None and device.type != "cpu")


def check_strided(label: str, tensor: Tensor) -> None:
    """Raise BatchError for a tensor that cannot be cut along a dimension, or has no numbers."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind, dense = ("nested", "to_padded_tensor(0)") if tensor.is_nested else ("sparse", "to_dense()")
        raise BatchError(f"{label} is a {kind} tensor, which is not cut into microbatches.", f"{label}.{dense}.")
    if tensor.is_meta:
        raise BatchError(f"{label} is on the device meta: it has no numbers.", "a tensor on a CPU or a GPU.")


def _with_plain_mappings(target: Any) -> Any:
    def plain(leaf: Any) -> Any:
        return {key: pytree.tree_map(plain, item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(plain, target)


def _cut_leaf(
    leaf: Any,
    microbatches: int,
    device: torch.device | None,
    lengths: Mapping[int, Sequence[int]],
    where: str,
    owner: str,
    dims: Sequence[int],
) -> Sequence[Any]:
    if not isinstance(leaf, Tensor):
        if _holds_tensors(leaf):
            raise BatchError(
                f"{where} is a {type(leaf).__name__} that holds tensors, which cannot be cut.",
                "a dict, a list, a tuple or a named tuple of them.",
                is_of_target=True,
            )
        return [leaf] * microbatches
    check_strided(where, leaf)
    tensor = placed(leaf, device)
    if tensor.dim() == 0:
        return [tensor] * microbatches
    dim = next((dim for dim in dims if dim < tensor.dim() and tensor.shape[dim] in lengths), None)
    if dim is None:
        rows, place = " or ".join(map(str, sorted(lengths))), next((dim for dim in dims if dim < tensor.dim()), 0)
        along = f" along dimension {place}" if place else ""
        raise BatchError(
            f"{where} has {tensor.shape[place]} rows{along}, and {owner} has {rows}: the loss would pair the wrong "
            f"ones.",
            f"a target with {rows} rows, one for each of {owner}; or, if they lie along another dimension, "
            'capture with batch_dims={"target": DIM}.',
            is_of_target=True,
        )
    return tensor.split(list(lengths[tensor.shape[dim]]), dim)


def _holds_tensors(leaf: Any) -> bool:
    slots = getattr(leaf, "__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    members = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in names)]
    if isinstance(leaf, (list, tuple, set, frozenset)):
        members += leaf
    return any(isinstance(item, Tensor) for item in pytree.tree_leaves(members))
