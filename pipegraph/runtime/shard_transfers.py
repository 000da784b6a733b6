"""The messages of a group of sharded parameters: their gathering, and the reduction of their gradients.

gather     a │ part of p │ part of q │   of each rank ─▶ whole p, whole q
reduce     row of rank 0 │ of p │ of q │ counts │        of each row the sum over ranks ─▶ its rank
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import Work

from pipegraph.kernels.sharded import local, rebuilt
from pipegraph.runtime.fully_sharded import ShardedGroup, ShardedParameter
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.rank_grid import SHARD
from pipegraph.runtime.processes.shard_group import ShardLine


class GroupTransfers:
    """What is sent for one group of parameters.

    Args:
        line: the ranks that have a part each.
        replicas: the ranks that have the same part as this one; None if there are no others.
    """

    def __init__(self, group: ShardedGroup, line: ShardLine, replicas: Group | None) -> None:
        self._parameters, self._reduce_dtype = group.parameters, group.reduce_dtype
        self._line, self._replicas = line, replicas
        self._sums: dict[ShardedParameter, Tensor] = {}
        self._gathering: tuple[Work, Tensor, Tensor] | None = None
        self._reducing: tuple[Work, Tensor, Tensor] | None = None
        self._adding: Work | None = None
        self._missing: set[ShardedParameter] = set()

    def start_gather(self) -> None:
        """Start to gather the parameters."""
        parts = [self._padded(each, local(each.sharded.detach())) for each in self._parameters]
        sent = torch.cat([part.to(each.local_whole) for part, each in zip(parts, self._parameters, strict=True)])
        received = torch.empty(self._line.size, len(sent), dtype=sent.dtype, device=sent.device)
        self._gathering = self._line.start_gather(received, sent), received, sent

    def finish_gather(self) -> None:
        """Wait for what was started, and fill the whole parameters with it."""
        assert self._gathering is not None
        work, received, _ = self._gathering
        self._gathering = None
        self._line.wait(work)
        with torch.no_grad():
            for each, rows in zip(self._parameters, received.split(self._lengths(), dim=1), strict=True):
                each.allocate()
                shape, dim = self._part_shape(each), each.dim(SHARD)
                joined = rows.view(-1, *shape).movedim(0, dim).flatten(dim, dim + 1)
                own = each.local_whole
                own.detach().copy_(joined.narrow(dim, 0, own.shape[dim]))

    def end(self) -> None:
        """Free and forget what a step has left, also one that failed."""
        self._gathering = self._reducing = self._adding = None
        self._sums.clear()
        for each in self._parameters:
            each.whole.grad = None
        self.free()

    def free(self) -> None:
        """Free the whole parameters."""
        for each in self._parameters:
            each.free()

    def add_up(self) -> None:
        """Add the gradients of the last action to those before, in the dtype of the reduction, if it is another one."""
        if self._reduce_dtype is None:
            return
        for each in self._parameters:
            gradient = each.whole.grad
            if gradient is not None and gradient.dtype != self._reduce_dtype:
                each.whole.grad = None
                own = local(gradient)
                if each in self._sums:
                    self._sums[each].add_(own)
                else:
                    self._sums[each] = own.to(self._reduce_dtype)

    def start_reduce(self) -> None:
        """Start to add up the gradients over ranks, each rank those of its part."""
        trained = self._trained()
        if not trained:
            return
        gradients = [self._sums.pop(each, None) for each in trained]
        gradients = [
            local(each.whole.grad) if own is None and each.whole.grad is not None else own
            for each, own in zip(trained, gradients, strict=True)
        ]
        like = trained[0].local_whole
        dtype = self._reduce_dtype or like.dtype
        lengths = [math.prod(self._part_shape(each)) for each in trained]
        sent = torch.zeros(self._line.size, sum(lengths) + len(trained), dtype=dtype, device=like.device)
        *rows, counts = sent.split([*lengths, len(trained)], dim=1)
        self._missing.clear()
        for index, (each, gradient, row) in enumerate(zip(trained, gradients, rows, strict=True)):
            each.whole.grad = None
            if gradient is None:
                self._missing.add(each)
                continue
            counts[:, index] = 1
            shape, dim = self._part_shape(each), each.dim(SHARD)
            whole = list(shape)
            whole[dim] *= self._line.size
            padded = torch.zeros(whole, dtype=dtype, device=like.device)
            padded.narrow(dim, 0, gradient.shape[dim]).copy_(gradient)
            row.copy_(padded.unflatten(dim, (self._line.size, -1)).movedim(dim, 0).flatten(1))
        received = torch.empty(sent.shape[1], dtype=dtype, device=like.device)
        self._reducing = self._line.start_reduce(received, sent), received, sent

    def start_adding(self) -> None:
        """Wait for the reduction, and start to add up its results over replicas."""
        if self._reducing is not None:
            self._line.wait(self._reducing[0])
            if self._replicas is not None:
                self._adding = self._replicas.start_all_reduce(self._reducing[1])

    def finish_reduce(self) -> None:
        """Add the results to `.grad` of the parts. A parameter that has no gradient on any rank keeps what it has."""
        if self._reducing is None:
            return
        if self._adding is not None and self._replicas is not None:
            self._replicas.wait(self._adding)
        trained, (_, received, _) = self._trained(), self._reducing
        self._reducing = self._adding = None
        lengths = [math.prod(self._part_shape(each)) for each in trained]
        *parts, counts = received.split([*lengths, len(trained)])
        for each, part, count in zip(trained, parts, counts, strict=True):
            if each not in self._missing or count > 0:  # the count is on a GPU, which would have to be waited for
                _add_gradient(each, part.view(self._part_shape(each)), each.dim(SHARD))

    def _trained(self) -> list[ShardedParameter]:
        return [each for each in self._parameters if each.sharded.requires_grad]

    def _part_shape(self, parameter: ShardedParameter) -> tuple[int, ...]:
        """The shape of a rank's part, filled up to that of the largest."""
        shape, dim = list(parameter.local_whole.shape), parameter.dim(SHARD)
        shape[dim] = math.ceil(shape[dim] / self._line.size)
        return tuple(shape)

    def _lengths(self) -> list[int]:
        return [math.prod(self._part_shape(each)) for each in self._parameters]

    def _padded(self, parameter: ShardedParameter, part: Tensor) -> Tensor:
        shape, dim = self._part_shape(parameter), parameter.dim(SHARD)
        if part.shape == shape:
            return part.reshape(-1)
        padded = part.new_zeros(shape)
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        return padded.view(-1)


def _add_gradient(parameter: ShardedParameter, part: Tensor, dim: int) -> None:
    sharded: nn.Parameter = parameter.sharded
    own = local(sharded.detach())
    gradient = part.narrow(dim, 0, own.shape[dim]).to(own.device, own.dtype).contiguous()
    if sharded.grad is None:
        sharded.grad = rebuilt(gradient, sharded)
    else:
        local(sharded.grad).add_(gradient)


def all_parameters(groups: Sequence[ShardedGroup]) -> list[ShardedParameter]:
    """The parameters of groups."""
    return [each for group in groups for each in group.parameters]
