"""Tensors: their memory, how often they were written, and the hooks of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def storage_info(path: str, offset: int, length: int, transforms: Sequence[str] | None) -> Any:
    """Where a part of a tensor is in the files of torch.distributed.checkpoint, as its `FileSystemReader` takes it.

    The class is private, and its module builds it nowhere but in what it unpickles.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, offset, length, transforms)


def take_hooks(parameter: Tensor, module: str) -> list[tuple[str, Callable[..., Any]]]:
    """Remove the hooks of a parameter whose functions a Python module defines. Only who registers a hook can remove it.

    Returns the methods that register them, and the hooks, in the order in which autograd calls them.
    """
    kinds: dict[str, dict[int, Any] | None] = {
        "register_hook": parameter._backward_hooks,
        "register_post_accumulate_grad_hook": parameter._post_accumulate_grad_hooks,
    }
    registrations = []
    for method, hooks in kinds.items():
        keys = [key for key, hook in (hooks or {}).items() if getattr(hook, "__module__", "") == module]
        registrations += [(method, hooks.pop(key)) for key in keys if hooks is not None]
    return registrations


def version_of(tensor: torch.Tensor) -> int:
    """A number that rises with every write into a tensor."""
    return tensor._version


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made as a view of another; on the meta device no address says so."""
    return tensor._is_view()


def memory_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have alike if each write into one is a write into the other at the same place: tied weights."""
    if not tensor.numel():
        return (id(tensor),)
    return storage_identity(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def hooks_of(tensor: torch.Tensor) -> list[tuple[str, Callable[..., Any]]]:
    """The hooks of a tensor's gradient, with the methods that register them. The public interface has no list of them.

    In the order in which autograd calls them.
    """
    kinds: dict[str, dict[int, Any] | None] = {
        "register_hook": tensor._backward_hooks,
        "register_post_accumulate_grad_hook": tensor._post_accumulate_grad_hooks,
    }
    return [(method, hook) for method, hooks in kinds.items() for hook in (hooks or {}).values()]


def storage_identity(tensor: Tensor) -> int:
    """Return a number for a tensor's memory. `data_ptr` has none for a fake tensor."""
    return tensor.untyped_storage()._cdata


def add_all(tensors: list[Tensor], addends: list[Tensor]) -> None:
    """Add tensors in place, as one operation on a GPU. Optimizers of torch do so too, by the same private function."""
    torch._foreach_add_(tensors, addends)


def copy_all(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy tensors into others of any dtype, as one operation on a GPU, by a private function as `add_all`."""
    torch._foreach_copy_(tensors, sources)


def zero_all(tensors: list[Tensor]) -> None:
    """Fill tensors with zeros, as one operation on a GPU, by a private function as `add_all`."""
    torch._foreach_zero_(tensors)


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Return whether anything but this tensor holds its memory. Torch counts that under a private name alone."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the tensor and `storage`


def has_hooks(tensor: Tensor) -> bool:
    """Return whether autograd calls a hook of a parameter. There is no public way to ask."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))
