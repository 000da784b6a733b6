"""Checksums of the tensors that a rank was given, by which ranks are compared that were given the same batch.

values, as 64-bit integers   x0 x1 x2 … | x1024 …          Σ weight(position) · x,  modulo 2**64
weights                      h0 h1 h2 … | 3·h0 …           so that rows in another order have another sum
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.device import Device
from pipegraph.torch_private.pytrees import pytree

ABSENT: Final = -(2**63)
"""The checksum of an input that a rank was not given."""

_CHUNK: Final = 1024
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(value: Any, dim: int | None) -> Tensor | None:
    """A checksum [] on the device of the tensors; None without tensors.

    A batch has the same one as a whole and as a list of microbatches.

    Args:
        value: nested tensors, or a list with one such structure for each microbatch.
        dim: of the rows.
    """
    if isinstance(value, Tensor):
        return _sum_of(_integers(_in_order_of_rows(value, dim)))
    if value is None:
        return None
    items = value if isinstance(value, list) else [value]
    by_microbatch = [[leaf for leaf in pytree.tree_leaves(item) if isinstance(leaf, Tensor)] for item in items]
    if len({len(leaves) for leaves in by_microbatch}) != 1 or not by_microbatch[0]:
        return None
    columns = zip(*by_microbatch, strict=True)
    sums = [_sum_of(_integers(torch.cat([_in_order_of_rows(leaf, dim) for leaf in column]))) for column in columns]
    total = sums[0]
    for place, number in enumerate(sums[1:], 1):
        total = total + number.to(total.device) * (2 * place + 1)
    return total


def _in_order_of_rows(tensor: Tensor, dim: int | None) -> Tensor:
    """The values of a tensor [values], row by row. Its memory is used if possible."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if dim and tensor.dim() > dim:
        tensor = tensor.movedim(dim, 0)
    return tensor.reshape(-1)


def _integers(values: Tensor) -> Tensor:
    """The bits of values as integers of 64 bits. Their memory is used if possible."""
    size = values.element_size()
    if values.nbytes % 8 == 0 and size in _INTEGERS:  # the same on all ranks that were given the same values
        if values.storage_offset() * size % 8:
            values = values.clone()
        return values.view(torch.int64)
    return (values.view(_INTEGERS[size]) if size in _INTEGERS else values).to(torch.int64)


def _sum_of(values: Tensor) -> Tensor:
    """The weighted sum of integers [values]."""
    weights, count = _weights(values.device), values.numel()
    if count <= _CHUNK:
        return _dot(values, weights[:count])
    chunks = count // _CHUNK
    remainder = values[chunks * _CHUNK :]
    table = values[: chunks * _CHUNK].view(chunks, _CHUNK)
    # A CPU multiplies a matrix of integers in one pass; a GPU has no such kernel.
    sums = torch.mv(table, weights) if values.device.type == "cpu" else (table * weights).sum(1)
    total = _dot(sums, torch.arange(1, 2 * chunks + 1, 2, device=values.device))
    return total + _dot(remainder, weights[: len(remainder)]) * (2 * chunks + 1)


def _dot(values: Tensor, weights: Tensor) -> Tensor:
    return torch.dot(values, weights) if values.device.type == "cpu" else (values * weights).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x9E3779B9)
    limits = torch.iinfo(torch.int64)
    return (torch.randint(limits.min, limits.max, (_CHUNK,), generator=generator) | 1).to(device)


class Checksums:
    """The checksums that a rank reports with each call.

    On a CPU they are those of the same call. On a GPU the host does not wait for them: they are copied to its memory
    while the call runs, and reported with the next call. If the host is a whole call ahead of the GPU then, it waits
    until the GPU begins the last one, which the GPU spends computing.

    Args:
        count: of checksums in a call.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count = count
        self._device = Device(device)
        self._pending: deque[tuple[int, Tensor, Any]] = deque()  # call, checksums, the event after their copy

    def report(self, call: int, sums: Sequence[Tensor | None]) -> tuple[int, tuple[int, ...]]:
        """Return the number of a call and its checksums, `ABSENT` for None; number 0 if none is known yet.

        Args:
            call: the number of this call.
            sums: its checksums.
        """
        if self._device.is_cpu:
            return call, tuple(ABSENT if number is None else int(number) for number in sums)
        reported = self._take()
        device = self._device.torch_device
        table = torch.stack(
            [torch.full((), ABSENT, device=device) if number is None else number.to(device) for number in sums]
        )
        copy = torch.empty_like(table, device="cpu", pin_memory=True).copy_(table, non_blocking=True)
        self._pending.append((call, copy, self._device.record_event()))
        return reported

    def _take(self) -> tuple[int, tuple[int, ...]]:
        if not self._pending:
            return 0, (ABSENT,) * self._count
        call, copy, event = self._pending.popleft()
        event.synchronize()
        return call, tuple(copy.tolist())
