"""Cutting what the caller passes into microbatches, checked against the manifest, and joining what comes out."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipegraph.errors import BatchError, nearest
from pipegraph.package import CALLER, Manifest, Value
from pipegraph.runtime.wiring import dtype_name, torch_dtype


def bind(manifest: Manifest, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What the caller passed, by the names of values. What is None or left out does not appear.

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
    given = [
        (f"argument {i}", structure, item)
        for i, (structure, item) in enumerate(zip(manifest.args, positional, strict=True))
    ]
    given += [(f"argument {name!r}", manifest.kwargs[name], item) for name, item in keyword.items()]
    found: dict[str, Any] = {}
    for where, structure, item in given:
        for name, leaf in _leaves(where, structure, item):
            if manifest.values[name].is_constant:
                _check_constant(manifest.values[name], leaf)
            elif leaf is not None:
                found[name] = leaf
    return found


def check(value: Value, given: Any, microbatches: int) -> None:
    """Raise BatchError unless `given` is this input for so many microbatches, in shape and dtype."""
    if not isinstance(given, Tensor):
        raise BatchError(
            f"{value.name} is {'missing' if given is None else reprlib.repr(given)}: pass a tensor, {value}."
        )
    if given.shape != _batch_shape(value, microbatches):
        raise BatchError(_wrong_shape(value, given, microbatches))
    if given.dtype != torch_dtype(value):
        raise BatchError(f"{value.name} is {dtype_name(given)}; the plan has {value}: pass .to(torch.{value.dtype}).")


def cut(value: Value, given: Tensor, microbatches: int, device: torch.device) -> Sequence[Tensor]:
    """A checked input's microbatches on `device`: cut along dimension 0, or the same for all where it has none."""
    tensor = given.detach().to(device, non_blocking=True)
    return tensor.chunk(microbatches) if value.shape else (tensor,) * microbatches


def batch_rows(manifest: Manifest, microbatches: int) -> tuple[int, ...]:
    """How many rows a batch has, for so many microbatches: of the model's inputs and outputs, which may differ."""
    outputs = manifest.stages[-1].outputs
    known = [value for value in manifest.values.values() if value.producer == CALLER or value.name in outputs]
    return tuple(
        sorted({value.shape_at()[0] * microbatches for value in known if value.shape and not value.is_constant})
    )


def cut_target(
    target: Any, microbatches: int, device: torch.device | None, batch: Collection[int] = ()
) -> Sequence[Any]:
    """The target's microbatches, on `device` if given: tensors are cut along dimension 0, all else repeats.

    Containers keep their class; one that torch's pytree does not know is a BatchError if it holds tensors, but for a
    Mapping, which becomes a dict. So is a tensor whose rows are none of the `batch`: it would be broadcast in silence.
    """
    leaves, spec = pytree.tree_flatten_with_path(_without_strange_mappings(target))
    cuts = [_cut_leaf(leaf, microbatches, device, batch, f"target{pytree.keystr(path)}") for path, leaf in leaves]
    return [pytree.tree_unflatten([cut[index] for cut in cuts], spec) for index in range(microbatches)]


def pack(structure: Any, leaves: Mapping[str, Any]) -> Any:
    """The nested structure with each name replaced by its leaf; sequences become tuples."""
    if isinstance(structure, Mapping):
        return {key: pack(item, leaves) for key, item in structure.items()}
    if isinstance(structure, tuple):
        return tuple(pack(item, leaves) for item in structure)
    return None if structure is None else leaves[structure]


def join(parts: Sequence[Any]) -> Any:
    """One output of all microbatches: along dimension 0, or along a new one where it has none."""
    if len(parts) == 1 or not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat(tuple(parts)) if parts[0].dim() else torch.stack(tuple(parts))


def _without_strange_mappings(target: Any) -> Any:
    def plain(leaf: Any) -> Any:
        return {key: pytree.tree_map(plain, item) for key, item in leaf.items()} if isinstance(leaf, Mapping) else leaf

    return pytree.tree_map(plain, target)


def _cut_leaf(
    leaf: Any, microbatches: int, device: torch.device | None, batch: Collection[int], where: str
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
    rows = len(tensor)
    if (batch and rows not in batch) or rows == 0 or rows % microbatches:
        expected = " or ".join(map(str, batch)) or f"{max(rows // microbatches, 1) * microbatches}"
        raise BatchError(
            f"{where} has {rows} rows for {microbatches} microbatches: pass {expected} rows, one for each row of the "
            f"batch."
        )
    return tensor.chunk(microbatches)


def _holds_tensors(leaf: Any) -> bool:
    slots = getattr(leaf, "__slots__", ())
    names = [slots] if isinstance(slots, str) else [*slots]
    held = [*getattr(leaf, "__dict__", {}).values(), *(getattr(leaf, name, None) for name in names)]
    if isinstance(leaf, (list, tuple, set, frozenset)):
        held += leaf
    return any(isinstance(item, Tensor) for item in pytree.tree_leaves(held))


def _leaves(where: str, structure: Any, given: Any) -> Iterator[tuple[str, Any]]:
    """(name, what was passed) for every name in the structure."""
    if isinstance(structure, str):
        yield structure, given
    elif structure is None:
        if given is not None:
            raise BatchError(
                f"{where} was None when the model was captured: leave it out, or capture the model with it."
            )
    elif isinstance(structure, Mapping):
        if given is not None and (not isinstance(given, Mapping) or given.keys() != structure.keys()):
            found = sorted(given) if isinstance(given, Mapping) else type(given).__name__
            raise BatchError(f"{where} is {found}; it was a dict of {sorted(structure)} when the model was captured.")
        for key, item in structure.items():
            yield from _leaves(f"{where}[{key!r}]", item, None if given is None else given[key])
    else:
        if given is not None and (not isinstance(given, (tuple, list)) or len(given) != len(structure)):
            found = f"{len(given)} items" if isinstance(given, (tuple, list)) else type(given).__name__
            raise BatchError(f"{where} is {found}; it had {len(structure)} items when the model was captured.")
        for i, item in enumerate(structure):
            yield from _leaves(f"{where}[{i}]", item, None if given is None else given[i])


def _check_constant(value: Value, given: Any) -> None:
    if given is not None and (type(given) is not type(value.constant) or given != value.constant):
        raise BatchError(
            f"{value.name} is {given!r}; it was {value.constant!r} when the model was captured, and the stages were "
            f"written for that. Pass {value.constant!r}, or capture the model anew with the other."
        )


def _batch_shape(value: Value, microbatches: int) -> tuple[int, ...]:
    shape = value.shape_at()
    return (shape[0] * microbatches, *shape[1:]) if shape else ()


def _wrong_shape(value: Value, given: Tensor, microbatches: int) -> str:
    said, batch = f"{value.name} has the shape {list(given.shape)}", _batch_shape(value, microbatches)
    if not value.shape or given.shape[1:] != batch[1:]:
        return f"{said}; the captured microbatch is {list(value.shape)}, and {microbatches} of them make {list(batch)}."
    rows, own = len(given), value.shape_at()[0]
    near = max(rows // own, 1)
    other = f"microbatches={near}" if near * own == rows else f"{near * own} rows with microbatches={near}"
    return (
        f"{said}: {rows} rows for {microbatches} microbatches. The captured microbatch is {own} rows: "
        f"pass {batch[0]} rows, or {other}."
    )


def _signature(manifest: Manifest) -> str:
    names = [item if isinstance(item, str) else "…" for item in manifest.args] + [
        f"{name}=" for name in manifest.kwargs
    ]
    return f"the model was captured with ({', '.join(names)})"
