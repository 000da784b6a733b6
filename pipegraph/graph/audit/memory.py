"""Memory that parameters and buffers share with each other, or with tensors that a model keeps elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipegraph.errors import CaptureError
from pipegraph.torch_private.tensors import memory_of, storage_identity


class _Extent(NamedTuple):
    """The bytes of a storage that a tensor uses, from ``start`` to before ``stop``."""

    start: int
    stop: int
    name: str
    kind: str
    tensor: Tensor


def check_layouts(model: nn.Module) -> None:
    """Raise CaptureError for a parameter or buffer that is sparse."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor.layout is not torch.strided:
                raise CaptureError(
                    f"the {kind} {name} is sparse ({tensor.layout}), which torch.export cannot trace.",
                    "to_dense() of it; or its indices and values as buffers, with index_add or scatter_add.",
                )


def check_overlaps(model: nn.Module) -> None:
    """Raise CaptureError if two parameters or buffers share a part of their memory, and are not one."""
    by_storage: dict[int, list[_Extent]] = defaultdict(list)
    for extent in _extents(model):
        by_storage[storage_identity(extent.tensor)].append(extent)
    for extents in by_storage.values():
        last: _Extent | None = None
        for extent in sorted(extents, key=lambda extent: extent[:2]):
            if last is not None and extent.start < last.stop:
                _check_pair(last, extent)
            if last is None or extent.stop > last.stop:
                last = extent


def _check_pair(first: _Extent, two: _Extent) -> None:
    is_same = memory_of(first.tensor) == memory_of(two.tensor)
    if is_same and first.kind == two.kind and first.tensor.requires_grad == two.tensor.requires_grad:
        return
    how = "the same memory" if is_same else "a part of their memory"
    raise CaptureError(
        f"{first.kind} {first.name} and {two.kind} {two.name} share {how}, and a stage would give each its own.",
        f"one parameter under both names if they are the same weight; or {two.name} as a copy, .clone().",
    )


def check_constants(model: nn.Module, constants: Mapping[str, object]) -> None:
    """Raise CaptureError if a constant of a program is memory of a parameter or buffer: a stage would not update it."""
    owners = {storage_identity(extent.tensor): extent for extent in _extents(model)}
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}  # which torch.export lists, too
    for name, constant in constants.items():
        owner = owners.get(storage_identity(constant)) if isinstance(constant, Tensor) and constant.numel() else None
        if owner is not None and name not in buffers:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {name} is memory of the {owner.kind} {owner.name}, and a "
                f"stage would have its values at capture for ever.",
                f"{owner.name} itself in forward, with "
                ".detach() where it needs no gradient; or a copy, .clone(), if it is to stay as it is.",
            )


def _extents(model: nn.Module) -> Iterator[_Extent]:
    named = (("parameter", model.named_parameters()), ("buffer", model.named_buffers()))
    for kind, tensors in named:
        for name, tensor in tensors:
            if tensor.numel():
                size, start = tensor.element_size(), tensor.storage_offset()
                spans = zip(tensor.shape, tensor.stride(), strict=True)
                length = 1 + sum(int(count - 1) * int(stride) for count, stride in spans)
                yield _Extent(int(start) * size, (int(start) + length) * size, name, kind, tensor)
