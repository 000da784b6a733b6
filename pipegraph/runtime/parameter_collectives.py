"""UNSHARD, RESHARD and REDUCE_GRAD of a process's stages, as the executor asks for them.

UNSHARD ─ gather, started ─▶ first action: waited for ─▶ … ─▶ RESHARD ─ freed
                                     last W or B ─▶ REDUCE_GRAD, started ─────▶ end of the step: waited for
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn
from torch.profiler import record_function

from pipegraph.runtime.fully_sharded import ShardedGroup
from pipegraph.runtime.gradient_reduction import GradientReduction
from pipegraph.runtime.measurements import CollectiveTimer, Sent
from pipegraph.runtime.parameters import redistribute
from pipegraph.runtime.shard_transfers import GroupTransfers, all_parameters
from pipegraph.schedule import Collective, CollectiveKind


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
