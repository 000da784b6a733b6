"""UNSHARD, RESHARD and REDUCE_GRAD of a process's stages, as the executor asks for them.

UNSHARD ─ gather, started ─▶ first action: waited for ─▶ … ─▶ RESHARD ─ freed
                                     last W or B ─▶ REDUCE_GRAD, started ─────▶ end of the step: waited for
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.profiler import record_function

from pipegraph.collectives import CompositeWork
from pipegraph.kernels.sharded import local, rebuilt
from pipegraph.runtime.fully_sharded import ShardedGroup, ShardedParameter
from pipegraph.runtime.gradient_reduction import GradientReduction
from pipegraph.runtime.measurements import CollectiveTimer, Message, Sent
from pipegraph.runtime.parameters import redistribute
from pipegraph.runtime.processes.rank_grid import SHARD
from pipegraph.runtime.processes.shard_group import Reduction, ShardLine
from pipegraph.schedule import Collective, CollectiveKind

# ---- shard transfers -------------------------------------------------------------------------------------------------
# The messages of a group of sharded parameters: their gathering, and the reduction of their gradients.
#
# gather     a │ part of p │ part of q │   of each rank ─▶ whole p, whole q
# reduce     row of rank 0 │ of p │ of q │ counts │        of each row the sum over ranks and replicas ─▶ its rank
#
# Complex numbers travel as pairs of real ones.


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


# ---- group transfers -------------------------------------------------------------------------------------------------


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


# ---- parameter collectives -------------------------------------------------------------------------------------------


class ParameterCollectives:
    """What the ranks that hold the same stages do together for their parameters and gradients in a step.

    Args:
        groups: of each stage, the groups of its sharded parameters.
        transfers: of each group, what is sent for it.
        reduction: of the gradients of all other parameters; None if no other rank has them.
    """

    def __init__(
        self,
        groups: Mapping[int, Sequence[ShardedGroup]],
        transfers: Mapping[int, Sequence[GroupTransfers]],
        reduction: GradientReduction | None,
    ) -> None:
        self._parameters = {stage: all_parameters(stage_groups) for stage, stage_groups in groups.items()}
        self._transfers, self._reduction = transfers, reduction
        self._gathering: set[int] = set()
        self._timer: CollectiveTimer | None = None

    @contextmanager
    def during_step(self, timer: CollectiveTimer | None = None) -> Iterator[None]:
        """A context in which the modules hold whole parameters, and `.grad` of others is that of the step alone.

        Args:
            timer: takes the times of the collectives in it.
        """
        self._timer = timer
        self._place_parameters(True)
        try:
            if self._reduction is None:
                yield
            else:
                with self._reduction.of_this_step():
                    yield
            if timer is not None:
                timer.report()
        finally:
            self._gathering.clear()
            for transfers in self._transfers.values():
                for group_transfers in transfers:
                    group_transfers.end()
            self._place_parameters(False)

    def do(self, collective: Collective) -> None:
        """Do a collective of the schedule, or start it. Profilers see it by its name."""
        stage, kind = collective.stage, collective.kind
        with record_function(f"{kind.value} stage {stage}"):
            if self._timer is None:
                self._start(stage, kind)
            else:
                with self._timer.timed(collective) as sent:
                    sent += self._start(stage, kind)

    def _start(self, stage: int, kind: CollectiveKind) -> list[Sent]:
        """Do or start a collective. Returns its messages."""
        sent: list[Sent] = []
        if kind is CollectiveKind.UNSHARD:
            sent += [transfers.start_gather() for transfers in self._transfers[stage]]
            self._gathering.add(stage)
        elif kind is CollectiveKind.RESHARD:
            self.use(stage)  # what was gathered in vain has to arrive as well
            for group_transfers in self._transfers[stage]:
                group_transfers.free()
        else:
            redistribute(parameter.unsharded for parameter in self._parameters.get(stage, ()))
            for group_transfers in self._transfers.get(stage, ()):
                sent += group_transfers.start_reduce()
            if self._reduction is not None:
                sent += self._reduction.start(stage)
        return sent

    def use(self, stage: int) -> None:
        """Wait for the parameters of a stage that is about to compute."""
        if stage in self._gathering:
            self._gathering.discard(stage)
            for group_transfers in self._transfers[stage]:
                group_transfers.finish_gather()

    def computed(self, stage: int) -> None:
        """Take the gradients of an action of a stage, and free those that have been reduced since the last one."""
        for group_transfers in self._transfers.get(stage, ()):
            group_transfers.add_up()
        for transfers in self._transfers.values():
            for group_transfers in transfers:
                group_transfers.free_reduced()

    def finish(self) -> None:
        """Wait for all reductions, and put their results into `.grad`."""
        for transfers in self._transfers.values():
            for group_transfers in transfers:
                group_transfers.finish_reduce()
        if self._reduction is not None:
            self._reduction.finish()

    def make_buffers_equal(self) -> None:
        """Make the buffers of all copies those of the first. Collective."""
        if self._reduction is not None:
            self._reduction.make_buffers_equal()

    def _place_parameters(self, is_whole: bool) -> None:
        for parameters in self._parameters.values():
            for parameter in parameters:
                parameter.set_in_modules(is_whole)


def sharded_parameters(groups: Mapping[int, Sequence[ShardedGroup]]) -> set[int]:
    """The identities of the parts that this process holds."""
    return {id(parameter.sharded) for stage_groups in groups.values() for parameter in all_parameters(stage_groups)}


def find_parts(groups: Mapping[int, Sequence[ShardedGroup]], stages: Mapping[int, nn.Module]) -> None:
    """Take the parts that the modules hold, once stages of one process share those of tied weights."""
    for stage in stages.keys() & groups.keys():
        for parameter in all_parameters(groups[stage]):
            parameter.find()
