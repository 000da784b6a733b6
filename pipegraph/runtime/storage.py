"""The storages of tensors: which tensors share memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def storage_address(tensor: Tensor) -> int:
    """Return where the memory of a tensor begins: equal for two tensors that share memory. A sparse tensor has none."""
    return id(tensor) if tensor.layout is not torch.strided else tensor.untyped_storage().data_ptr()


def share_memory(tensors: Iterable[Any], other_tensors: Iterable[Tensor]) -> bool:
    """Whether one of `tensors` uses the storage of one of the others. Items that are no tensors are skipped."""
    addresses = set(map(storage_address, other_tensors))
    return any(isinstance(item, Tensor) and storage_address(item) in addresses for item in tensors)
