"""The memory that messages are received into.

take ─▶ a message is written ─▶ actions read it ─▶ release ─▶ taken again
                                              └──▶ or never released, if something that left the executor shares it
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.package import Value
from pipegraph.runtime.wiring import torch_dtype

Shapes = tuple[tuple[int, ...], ...]


class BufferPool:
    """Buffers for the messages of one direction of one edge, each with room for all `values` of a message.

    Buffers of shapes that a step has not used are dropped at the end of it.

    A buffer belongs to whoever took it until it is released, so that there are as many as the schedule holds messages
    at one time. One that is not released is never used again, and its memory lives as long as its tensors.

    On a GPU a released buffer may still be read by kernels that are enqueued. That is safe: a receive into it begins
    when everything is done that the current stream holds at that moment.
    """

    def __init__(self, values: Sequence[Value], device: torch.device) -> None:
        self._dtypes = list(map(torch_dtype, values))
        self._device = device
        self._free: dict[Shapes, list[tuple[Tensor, ...]]] = {}
        self._used: set[Shapes] = set()
        self._verifies = verifies_releases()

    def take(self, shapes: Shapes) -> tuple[Tensor, ...]:
        """A tensor of its shape for each value, with undefined content."""
        self._used.add(shapes)
        if free := self._free.get(shapes):
            return free.pop()
        with torch.inference_mode(False):  # `eval` may be called in it, and a later step needs gradients
            pairs = zip(shapes, self._dtypes, strict=True)
            return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in pairs)

    def drop_unused(self) -> None:
        """Drop the buffers of other shapes than those that were taken since the last call, if any were."""
        if not self._used:  # an eval takes none for gradients
            return
        self._free = {shapes: free for shapes, free in self._free.items() if shapes in self._used}
        self._used.clear()

    def release(self, tensors: tuple[Tensor, ...]) -> None:
        """Take back what `take` gave. Nothing may read it any more."""
        if self._verifies:
            overwrite(tensors)
        self._free.setdefault(tuple(tensor.shape for tensor in tensors), []).append(tensors)


def verifies_releases() -> bool:
    """Whether `PIPEGRAPH_VERIFY=1` asks to overwrite released memory at once, so that a wrong release shows."""
    return os.environ.get("PIPEGRAPH_VERIFY", "0") not in ("", "0")


def overwrite(tensors: Iterable[Tensor]) -> None:
    """Fill tensors with values that no later result can hide: NaN, or the largest integer."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max)


def storage_address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins: equal for two tensors that share memory. A sparse tensor has none."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


def share_memory(tensors: Iterable[Any], others: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` uses the storage of one of the others. Items that are no tensors are skipped."""
    addresses = set(map(storage_address, others))
    return any(isinstance(each, Tensor) and storage_address(each) in addresses for each in tensors)
