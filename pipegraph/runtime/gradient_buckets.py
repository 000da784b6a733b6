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
        own = [None if each.grad is None else local(each.grad) for each in parameters]
        if any(gradient is not None and gradient.is_sparse for gradient in own):
            raise PipegraphError("sparse gradients are not reduced over ranks.\nTry: sparse=False in the embedding.")
        like = [local(parameter.detach()) for parameter in parameters]
        parts = [torch.zeros_like(each) if mine is None else mine for each, mine in zip(like, own, strict=True)]
        found = torch.ones(len(own), dtype=like[0].dtype, device=like[0].device)
        found[[index for index, gradient in enumerate(own) if gradient is None]] = 0
        self._sizes = [*(part.numel() for part in parts), len(parts)]
        self._has_own = [gradient is not None for gradient in own]
        self.flat = torch.cat([*(part.reshape(-1).to(like[0].dtype) for part in parts), found])
        for parameter in parameters:
            parameter.grad = None

    def give_back(self) -> None:
        """Make what was reduced the parameters' ``.grad``: views of the tensor, in the memory layout of parameters."""
        *reduced, found = self.flat.split(self._sizes)
        each = zip(self._parameters, reduced, self._has_own, found, strict=True)
        for parameter, tensor, has_own, count in each:
            if has_own or count > 0:  # only the count is waited for, on a GPU
                like = local(parameter.detach())
                view = tensor.view_as(like)
                own = view if like.is_contiguous() else torch.empty_like(like).copy_(view)
                parameter.grad = rebuilt(own, parameter)


def buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters of one dtype each, in their order, which is that of every rank."""
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or held >= BUCKET_BYTES):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += local(parameter.detach()).nbytes
    if bucket:
        yield bucket


def overwrite_together(tensors: Sequence[Tensor], broadcast: Callable[[Tensor], None]) -> None:
    """Overwrite tensors of any dtype in one message with those of another rank, as bytes that `broadcast` takes."""
    held = [each.detach().reshape(-1).view(torch.uint8) for each in tensors if each.numel()]
    if not held:
        return
    sent = torch.cat(held)
    broadcast(sent)
    parts = iter(sent.split([part.numel() for part in held]))
    with torch.no_grad():
        for tensor in tensors:
            if tensor.numel():
                tensor.copy_(next(parts).clone().view(tensor.dtype).view_as(tensor))  # a clone is aligned
