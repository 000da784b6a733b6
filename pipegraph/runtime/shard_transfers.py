"""The messages of a group of sharded parameters: their gathering, and the reduction of their gradients.

gather     a │ part of p │ part of q │   of each rank ─▶ whole p, whole q
reduce     row of rank 0 │ of p │ of q │ counts │        of each row the sum over ranks and replicas ─▶ its rank

Complex numbers travel as pairs of real ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import Work

from pipegraph.collectives import CompositeWork
from pipegraph.kernels.sharded import local, rebuilt
from pipegraph.runtime.fully_sharded import ShardedGroup, ShardedParameter
from pipegraph.runtime.measurements import Message, Sent
from pipegraph.runtime.processes.rank_grid import SHARD
from pipegraph.runtime.processes.shard_group import Reduction, ShardLine

# ---- part layout -----------------------------------------------------------------------------------------------------
# How a tensor is divided between ranks: into parts of one size, each of which is a row of a message.
#
# [5, 3] along its first dimension between two ranks    row 0 │ [3, 3]
#                                                       row 1 │ [2, 3], filled up to [3, 3]


@dataclass(frozen=True)
class PartLayout:
    """Parts of a tensor along one of its dimensions.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension.
        ranks: how many parts there are.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int

    @cached_property
    def part(self) -> tuple[int, ...]:
        """The shape of a part, filled up to that of the largest."""
        return *self.shape[: self.dim], math.ceil(self.shape[self.dim] / self.ranks), *self.shape[self.dim + 1 :]

    @cached_property
    def length(self) -> int:
        """The elements of a row."""
        return math.prod(self.part)

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same size: then none is filled up."""
        return self.shape[self.dim] == self.part[self.dim] * self.ranks

    def part_in(self, row: Tensor, size: int) -> Tensor:
        """A rank's part, which has this size along the dimension, in its row [length]; a view."""
        return row.view(self.part).narrow(self.dim, 0, size)

    def read(self, rows: Tensor, tensor: Tensor) -> None:
        """Fill a whole tensor from rows [ranks, length]."""
        parts = rows.view(self.ranks, *self.part).movedim(0, self.dim)
        if self.is_even:
            tensor.unflatten(self.dim, (self.ranks, self.part[self.dim])).copy_(parts)
        else:
            tensor.copy_(parts.flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.shape[self.dim]))

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Write a whole tensor to rows [ranks, length]. What fills them up is zero."""
        if not self.is_even:
            filled = list(self.shape)
            filled[self.dim] = self.part[self.dim] * self.ranks
            source, tensor = tensor, tensor.new_zeros(filled)
            tensor.narrow(self.dim, 0, self.shape[self.dim]).copy_(source)
        parts = tensor.unflatten(self.dim, (self.ranks, self.part[self.dim])).movedim(self.dim, 0)
        rows.view(parts.shape).copy_(parts)


# ---- shard transfers -------------------------------------------------------------------------------------------------


class GroupTransfers:
    """What is sent for one group of parameters.

    Args:
        line: the ranks that have a part each, and their replicas.
    """

    def __init__(self, group: ShardedGroup, line: ShardLine) -> None:
        self._parameters, self._reduce_dtype = group.parameters, group.reduce_dtype
        self._line = line
        self._layouts = {
            parameter: PartLayout(tuple(_real(parameter.local_whole).shape), parameter.dim(SHARD), line.size)
            for parameter in group.parameters
        }
        self._sums: dict[ShardedParameter, Tensor] = {}
        self._gathering: tuple[Work | CompositeWork, Tensor] | None = None
        self._reducing: tuple[list[Reduction], Callable[[], Tensor], Tensor] | None = None
        self._reduced: Tensor | None = None
        self._missing: set[ShardedParameter] = set()

    def start_gather(self) -> Sent:
        """Start to gather the parameters."""
        lengths, like = self._lengths(self._parameters), _real(self._parameters[0].local_whole)
        rows = torch.empty(self._line.size, sum(lengths), dtype=like.dtype, device=like.device)
        for parameter, row in zip(self._parameters, rows[self._line.place].split(lengths), strict=True):
            part, layout = _real(local(parameter.sharded)), self._layouts[parameter]
            layout.part_in(row, part.shape[layout.dim]).copy_(part)
        work = self._line.start_gather(rows)
        self._gathering = work, rows
        return work, Message("gather", rows.nbytes, self._line.ranks)

    def finish_gather(self) -> None:
        """Wait for what was started, and fill the whole parameters with it."""
        assert self._gathering is not None
        work, gathered = self._gathering
        self._gathering = None
        self._line.wait(work)
        with torch.no_grad():
            lengths = self._lengths(self._parameters)
            for parameter, rows in zip(self._parameters, gathered.split(lengths, dim=1), strict=True):
                parameter.allocate()
                self._layouts[parameter].read(rows, _real(parameter.local_whole))

    def end(self) -> None:
        """Free and forget what a step has left, also one that failed."""
        self._gathering = self._reducing = self._reduced = None
        self._sums.clear()
        for parameter in self._parameters:
            parameter.unsharded.grad = None
        self.free()

    def free(self) -> None:
        """Free the whole parameters."""
        for parameter in self._parameters:
            parameter.free()

    def add_up(self) -> None:
        """Add the gradients of the last action to those before, in the dtype of the reduction, if it is another one."""
        if self._reduce_dtype is None:
            return
        for parameter in self._parameters:
            gradient = None if parameter.unsharded.grad is None else _real(local(parameter.unsharded.grad))
            if gradient is not None and gradient.dtype != self._reduce_dtype:
                parameter.unsharded.grad = None
                if parameter in self._sums:
                    self._sums[parameter].add_(gradient)
                else:
                    self._sums[parameter] = gradient.to(self._reduce_dtype)

    def start_reduce(self) -> list[Sent]:
        """Start to add up the gradients over ranks, each rank those of its part. Returns the messages."""
        trained = self._trained()
        if not trained:
            return []
        like = _real(trained[0].local_whole)
        dtype = self._reduce_dtype or like.dtype
        lengths = self._lengths(trained)
        sent = torch.empty(self._line.size, sum(lengths) + len(trained), dtype=dtype, device=like.device)
        *rows, counts = sent.split([*lengths, len(trained)], dim=1)
        counts.zero_()
        self._missing.clear()
        for index, (parameter, row) in enumerate(zip(trained, rows, strict=True)):
            gradient = self._take_gradient(parameter)
            if gradient is None:
                self._missing.add(parameter)
                row.zero_()
                continue
            counts[:, index] = 1
            self._layouts[parameter].write(gradient, row)
        started, own_sum = self._line.start_reduce(sent)
        self._reducing = started, own_sum, sent
        return [(reduction.work, Message(reduction.way, reduction.size, reduction.ranks)) for reduction in started]

    def free_reduced(self) -> None:
        """Keep this rank's part alone of what has been reduced by now."""
        if self._reducing is not None and self._reducing[0][-1].work.is_completed():
            self._wait_for_part()

    def finish_reduce(self) -> None:
        """Add the results to `.grad` of the parts. A parameter that has no gradient on any rank keeps what it has."""
        if self._reducing is not None:
            self._wait_for_part()
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return
        trained = self._trained()
        *rows, counts = reduced.split([*self._lengths(trained), len(trained)])
        for parameter, row, count in zip(trained, rows, counts, strict=True):
            if parameter not in self._missing or count > 0:  # the count is on a GPU, which would have to be waited for
                _add_gradient(parameter, row, self._layouts[parameter])

    def _wait_for_part(self) -> None:
        assert self._reducing is not None
        started, own_sum, _ = self._reducing
        self._line.wait(*(reduction.work for reduction in started))
        self._reduced, self._reducing = own_sum(), None

    def _take_gradient(self, parameter: ShardedParameter) -> Tensor | None:
        """The gradient of the whole parameter, in real numbers. The parameter gives it away."""
        gradient_sum, gradient = self._sums.pop(parameter, None), parameter.unsharded.grad
        parameter.unsharded.grad = None
        return _real(local(gradient)) if gradient_sum is None and gradient is not None else gradient_sum

    def _trained(self) -> list[ShardedParameter]:
        return [parameter for parameter in self._parameters if parameter.sharded.requires_grad]

    def _lengths(self, parameters: Sequence[ShardedParameter]) -> list[int]:
        return [self._layouts[parameter].length for parameter in parameters]


def _add_gradient(parameter: ShardedParameter, row: Tensor, layout: PartLayout) -> None:
    sharded: nn.Parameter = parameter.sharded
    part = _real(local(sharded))
    gradient = layout.part_in(row, part.shape[layout.dim]).to(part.device, part.dtype).contiguous()
    if sharded.grad is not None:
        _real(local(sharded.grad)).add_(gradient)
    else:
        sharded.grad = rebuilt(torch.view_as_complex(gradient) if sharded.is_complex() else gradient, sharded)


def _real(tensor: Tensor) -> Tensor:
    """A tensor as real numbers, which is a view; collectives add up no complex ones."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def all_parameters(groups: Sequence[ShardedGroup]) -> list[ShardedParameter]:
    """The parameters of groups."""
    return [parameter for group in groups for parameter in group.parameters]
