"""The CPU memory, in which what a forward saved waits for its backward.

On a GPU copies run on two streams of their own, one for each direction, to and from pinned memory. On a CPU there is
one memory only: the copies are made all the same, and what the rank holds is counted as if they were elsewhere.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipegraph.kernels import OffloadedValues
from pipegraph.schedule import Action, Kind
from pipegraph.schedule.lifetimes import offload_windows

_Key = tuple[int, int]  # stage, microbatch


@dataclass
class _Away:
    """Values that were taken out: the bytes of each memory that they use, and where each value lies: the place of its
    memory, its dtype, offset, shape and strides.

    ``device`` holds them until ``copied``, an event of a GPU, has been waited for.
    """

    device: dict[str, Tensor]
    bytes: list[Tensor]
    layouts: dict[str, tuple[int, torch.dtype, Any, Any, Any]]
    copied: Any = None


class HostMemory:
    """Copies values that the stages of one rank offload: out during the action after F, in during that before I or B.

    Args:
        actions: the actions of the rank.
        device: the device of its stages.
    """

    def __init__(self, actions: Sequence[Action], device: torch.device) -> None:
        computing = [action for action in actions if not action.kind.is_transfer]
        self._device, self._is_gpu = device, device.type == "cuda"
        self._leaving: set[_Key] = set()
        self._keys_to_free: dict[Action, list[_Key]] = defaultdict(list)
        self._come_before: dict[Action, list[_Key]] = defaultdict(list)
        for window in offload_windows(computing):
            key = window.stage, window.microbatch
            self._leaving.add(key)
            self._keys_to_free[computing[window.departure]].append(key)
            self._come_before[computing[window.back]].append(key)
        self._away: dict[_Key, _Away] = {}
        self._coming: dict[_Key, Any] = {}  # events of a GPU, or None
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)  # pinned memory by its size
        self._streams: tuple[Any, Any] | None = None
        self._warned = False

    def before_action(self, action: Action, saved: Mapping[_Key, Any]) -> None:
        """Start to bring back what the next action reads, and wait for what this one does."""
        if not (self._away or self._coming):
            return
        for key in self._come_before.get(action, ()):
            if key in self._away:
                values, arrived = self._brought(self._away.pop(key))
                saved[key].put_back(values)
                self._coming[key] = arrived
        if action.kind in (Kind.B, Kind.I):
            arrived = self._coming.pop((action.stage, action.microbatch), None)
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)

    def after_action(self, action: Action, saved: Mapping[_Key, Any]) -> None:
        """Free what has been copied out by now, and start to copy out what this F saved."""
        for key in self._keys_to_free.get(action, ()) if self._away else ():
            if key in self._away:
                away = self._away[key]
                if away.copied is not None:
                    torch.cuda.current_stream(self._device).wait_event(away.copied)
                saved[key].take_offloaded(self._device)
                away.device.clear()
        key = action.stage, action.microbatch
        if action.kind is Kind.F and key in self._leaving:
            saved_values: Any = saved.get(key)
            if _may_offload(saved_values.__class__) and (values := saved_values.take_offloaded(self._device)):
                self._warn_of_emulation()
                saved_values.put_back(values)  # until they are copied
                self._away[key] = self._sent(values)

    def clear(self) -> None:
        """Discard the values of a step that failed.

        On a GPU the current stream waits for copies that still write to its memory, because it may reuse that memory.
        """
        for arrived in self._coming.values():
            if arrived is not None:
                torch.cuda.current_stream(self._device).wait_event(arrived)
        self._away.clear()
        self._coming.clear()

    def _sent(self, values: dict[str, Tensor]) -> _Away:
        memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in values.values()}
        place = {address: index for index, address in enumerate(memories)}
        layouts = {
            name: (
                place[tensor.untyped_storage().data_ptr()],
                tensor.dtype,
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )
            for name, tensor in values.items()
        }
        sources = [_bytes_of(memory, self._device) for memory in memories.values()]
        if not self._is_gpu:
            return _Away(values, [source.clone() for source in sources], layouts)
        out, _ = self._own_streams()
        buffers = [self._pinned(len(source)) for source in sources]
        out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(out):
            for (buffer, read), source in zip(buffers, sources, strict=True):
                if read is not None:
                    out.wait_event(read)
                buffer.copy_(source, non_blocking=True)
            copied = out.record_event()
        return _Away(values, [buffer for buffer, _ in buffers], layouts, copied)

    def _brought(self, away: _Away) -> tuple[dict[str, Tensor], Any]:
        copies = [torch.empty_like(host_buffer, device=self._device, pin_memory=False) for host_buffer in away.bytes]
        arrived = None
        if self._is_gpu:
            _, back = self._own_streams()
            # The new memory may have been freed by work that this stream has yet to do.
            back.wait_stream(torch.cuda.current_stream(self._device))
            back.wait_event(away.copied)
            with torch.cuda.stream(back):
                for copy, buffer in zip(copies, away.bytes, strict=True):
                    copy.copy_(buffer, non_blocking=True)
                arrived = back.record_event()
            for buffer in away.bytes:
                self._free[len(buffer)].append((buffer, arrived))
        else:
            for copy, buffer in zip(copies, away.bytes, strict=True):
                copy.copy_(buffer)
        values = {
            name: torch.empty(0, dtype=dtype, device=self._device).set_(
                copies[index].untyped_storage(), offset, size, stride
            )
            for name, (index, dtype, offset, size, stride) in away.layouts.items()
        }
        return values, arrived

    def _pinned(self, size: int) -> tuple[Tensor, Any]:
        """Return pinned memory of `size` bytes, and the event after which it may be written, or None."""
        free = self._free[size]
        return free.pop(0) if free else (torch.empty(size, dtype=torch.uint8, pin_memory=True), None)

    def _own_streams(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        return self._streams

    def _warn_of_emulation(self) -> None:
        if not self._is_gpu and not self._warned:
            self._warned = True
            warnings.warn(
                'recompute="offload" is emulated on a CPU: what is saved is copied within the same memory, which takes '
                "time and frees none. Figures of memory count the copies as if they were in another one.",
                stacklevel=2,
            )


@cache
def _may_offload(kind: type) -> bool:
    """Whether values of this class may offload some. Asked once: comparing a class with a protocol takes long."""
    return issubclass(kind, OffloadedValues)


def _bytes_of(memory: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(memory)
