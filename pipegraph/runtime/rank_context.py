"""`RankContext`: the facts about one process of a pipeline that all parts of its steps read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from pipegraph.package import Manifest
from pipegraph.runtime.gradient_reduction import trained_by
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction
from pipegraph.runtime.prepared_stages import PreparedStages
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.rank_grid import DATA, TENSOR
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.random_numbers import RandomNumbers
from pipegraph.runtime.replicas import Replicas, unwrapped
from pipegraph.runtime.wiring import StageWiring, stage_wirings
from pipegraph.schedule import Schedule


@dataclass(frozen=True)
class RankContext:
    """One process of a pipeline. Nothing in it changes after the pipeline is made, but for the state of `numbers`.

    Attributes:
        prepared: the stages of this process.
        schedule: of the pipeline.
        loss_fn: the loss of one microbatch; None without a loss.
        reduction: of the losses of microbatches.
        numbers: the state that random numbers depend on.
        device: of the stages.
        world: the processes of the pipeline; None for a plain process, which has all stages.
        guard: the context around collective calls.
    """

    prepared: PreparedStages
    schedule: Schedule
    loss_fn: LossFunction | None
    reduction: LossReduction
    numbers: RandomNumbers
    device: torch.device
    world: World | None
    guard: FaultGuard

    @property
    def manifest(self) -> Manifest:
        """The manifest, with the shapes and dtypes that values have after `prepare_stages`."""
        return self.prepared.manifest

    @cached_property
    def stages(self) -> Mapping[int, nn.Module]:
        """The stages of this process by index, without a `DistributedDataParallel` around them."""
        return {index: unwrapped(stage) for index, stage in self.prepared.modules.items()}

    @cached_property
    def replicas(self) -> Replicas:
        """The stages of this process in `DistributedDataParallel`."""
        return Replicas(self.prepared.modules)

    @cached_property
    def wiring(self) -> tuple[StageWiring, ...]:
        """The inputs and outputs of all stages."""
        return stage_wirings(self.manifest, self.schedule.placement)

    @property
    def last(self) -> int:
        """The index of the last stage."""
        return len(self.manifest.stages) - 1

    @property
    def trained_by_loss(self) -> list[nn.Parameter]:
        """The parameters that `loss_fn` trains, on a process with the last stage."""
        return trained_by(self.loss_fn) if self.last in self.stages else []

    @property
    def trained_flags(self) -> tuple[bool, ...]:
        """Whether each parameter of the stages of this process is trained, in their order."""
        return tuple(parameter.requires_grad for stage in self.stages.values() for parameter in stage.parameters())

    # ---- ranks -------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The rank of this process in the world; 0 for a plain process."""
        return 0 if self.world is None else self.world.rank

    @property
    def pipeline(self) -> tuple[int, ...]:
        """The rank in the world of each rank of the schedule."""
        return tuple(range(self.schedule.ranks)) if self.world is None else self.world.pipeline

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the schedule on this process: one, or all."""
        return self.pipeline if self.world is None else (self.pipeline.index(self.world.rank),)

    @property
    def world_ranks(self) -> tuple[int, ...]:
        """The same ranks in the world."""
        return self.pipeline if self.world is None else (self.world.rank,)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The rank in the world of each stage."""
        return tuple(self.pipeline[rank] for rank in self.schedule.placement)

    @property
    def data_ranks(self) -> int:
        """The number of data-parallel ranks; 1 without a mesh."""
        return 1 if self.world is None else self.world.grid.length(*DATA)

    @property
    def data_rank(self) -> int:
        """The place of this process among the data-parallel ranks."""
        return 0 if self.world is None else self.world.grid.line(self.world.rank, *DATA).index(self.world.rank)

    @property
    def tensor_ranks(self) -> int:
        """The number of ranks along `tp`; 1 without a mesh."""
        return 1 if self.world is None else self.world.grid.length(TENSOR)
