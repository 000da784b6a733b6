"""Many tensors as one: gradients that are reduced over ranks together, and state that is sent together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import local, rebuilt

BUCKET_BYTES: Final = 25 * 2**20
"""How many bytes of gradients are reduced at once: DistributedDataParallel's own default."""


class GradientBucket:
    """The gradients of some parameters of one dtype, moved into one tensor, which ranks sum.

    It ends with a number for each parameter: how many ranks have its gradient. One that no rank has stays None.

    Attributes:
        flat: the tensor [elements + parameters].
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """``.grad`` of the parameters is None until `give_back`, so that no gradient is held twice."""
        self._parameters = parameters
        grads = [None if leaf.grad is None else local(leaf.grad) for leaf in parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in grads):
            raise PipegraphError("sparse gradients are not reduced over ranks.", "sparse=False in the embedding.")
        like = [local(parameter.detach()) for parameter in parameters]
        parts = [torch.zeros_like(tensor) if grad is None else grad for tensor, grad in zip(like, grads, strict=True)]
        counts = torch.ones(len(grads), dtype=like[0].dtype, device=like[0].device)
        counts[[index for index, gradient in enumerate(grads) if gradient is None]] = 0
        self._sizes = [*(part.numel() for part in parts), len(parts)]
        self._has_gradient = [gradient is not None for gradient in grads]
        self.flat = torch.cat([*(part.reshape(-1).to(like[0].dtype) for part in parts), counts])
        for parameter in parameters:
            parameter.grad = None

    def give_back(self) -> None:
        """Make what was reduced the parameters' ``.grad``: views of the tensor, in the memory layout of parameters."""
        *reduced, counts = self.flat.split(self._sizes)
        rows = zip(self._parameters, reduced, self._has_gradient, counts, strict=True)
        for parameter, tensor, has_gradient, count in rows:
            if has_gradient or count > 0:  # only the count is waited for, on a GPU
                like = local(parameter.detach())
                view = tensor.view_as(like)
                gradient = view if like.is_contiguous() else torch.empty_like(like).copy_(view)
                parameter.grad = rebuilt(gradient, parameter)


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype each, in their order, which is that of every rank."""
    bucket: list[nn.Parameter] = []
    byte_count = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or byte_count >= BUCKET_BYTES):
            yield bucket
            bucket, byte_count = [], 0
        bucket.append(parameter)
        byte_count += local(parameter.detach()).nbytes
    if bucket:
        yield bucket


def overwrite_together(tensors: Sequence[Tensor], broadcast: Callable[[Tensor], None]) -> None:
    """Overwrite tensors of any dtype in one message with those of another rank, as bytes that `broadcast` takes."""
    byte_views = [target.detach().reshape(-1).view(torch.uint8) for target in tensors if target.numel()]
    if not byte_views:
        return
    sent = torch.cat(byte_views)
    broadcast(sent)
    parts = iter(sent.split([part.numel() for part in byte_views]))
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                tensor.copy_(next(parts).clone().view(tensor.dtype).view_as(tensor))  # a clone is aligned
