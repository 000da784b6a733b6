"""What messages are received into."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from pipegraph.package import Value
from pipegraph.runtime.wiring import torch_dtype


class Buffers:
    """The buffers of one value on one edge, in one direction. They are used in turns, each when nothing else holds it.

    No more than `most` are kept, as many as the schedule holds at one time. What is held longer than the schedule asks,
    such as an input that the stage returns or a gradient that became `.grad`, is left to whoever holds it.

    On a GPU a buffer may still be read by work that is enqueued. A receive into it comes behind that, as NCCL begins
    one when all that the current stream holds by then is done.
    """

    def __init__(self, value: Value, device: torch.device, most: int) -> None:
        self._shape, self._dtype, self._device, self._most = value.shape_at(), torch_dtype(value), device, most
        self._buffers: deque[tuple[Tensor, torch.UntypedStorage]] = deque()

    def take(self) -> Tensor:
        """A tensor of undefined content. Its memory comes back when neither it nor a view of it is left."""
        for _ in range(len(self._buffers)):
            self._buffers.rotate(-1)
            tensor, storage = self._buffers[-1]
            if _holders(storage) == 2:  # the tensor and the storage that are kept here
                return tensor.detach()
        with torch.inference_mode(False):  # which `eval` may be called in, and a later step needs a gradient of it
            tensor = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        self._buffers.append((tensor, tensor.untyped_storage()))
        if len(self._buffers) > self._most:
            self._buffers.popleft()
        return tensor.detach()


def _holders(storage: torch.UntypedStorage) -> int:
    """How many tensors and storages hold this memory, by `torch._C._storage_Use_Count`.

    Private: a weak reference tells when one tensor is gone, and not the views of it or what autograd keeps.
    """
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count
