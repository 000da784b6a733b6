"""Stages that several processes share: each trains on its rows, and holds a part of every parameter (FSDP)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.step.contenders import Contender, OwnPipeline, own_code
from benchmarks.step.cuts import RANKS
from benchmarks.step.models import Case
from benchmarks.step.peers import TorchPipeline
from pipegraph.runtime.fully_sharded import repeated_layers
from pipegraph.schedule import Schedule


@cache
def mesh_of(shards: int) -> DeviceMesh:
    """Return the mesh of all processes: a pipeline of two ranks for each shard. Collective at the first call."""
    return init_device_mesh("cpu", (RANKS, shards), mesh_dim_names=("pp", "dp_shard"))


class _OnShards(Contender):
    """A pipeline that is given its rows of the batch, and whose gradients are parts."""

    pipeline: Contender

    def __init__(self, shards: int) -> None:
        self._shards, self._place = shards, mesh_of(shards).get_local_rank("dp_shard")

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        shares = (batch.chunk(self._shards)[self._place] for batch in (inputs, targets))
        loss = self.pipeline.step(*shares)
        return None if loss is None else loss / self._shards

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.pipeline.named_parameters()

    def gradients(self) -> dict[str, Tensor | None]:
        gradients = self.pipeline.gradients()
        return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in gradients.items()}


class OwnShards(_OnShards):
    """pipegraph over a mesh."""

    def __init__(self, case: Case, package: Path, schedule: str | Schedule, kernels: str, shards: int) -> None:
        super().__init__(shards)
        self.pipeline = OwnPipeline(case, package, schedule, kernels, mesh_of(shards))


class TorchShards(_OnShards):
    """A schedule of torch with `fully_shard` around each layer and what is left of a stage, as torchtitan has it.

    Layers are compiled one by one, inside the hooks of `fully_shard`. Nothing is resharded after a forward: with more
    than one microbatch that would gather all of it again for each.
    """

    def __init__(
        self, case: Case, model: nn.Module, schedule: str, cuts: Sequence[str], shards: int, compiled: bool = True
    ) -> None:
        super().__init__(shards)
        mesh = mesh_of(shards)

        def shard(stage: nn.Module) -> nn.Module:
            for module in (*repeated_layers(stage), stage):
                if compiled and module is not stage:
                    _compile(module)
                fully_shard(module, mesh=mesh["dp_shard"], reshard_after_forward=False)
            return stage

        rows = replace(case, rows=case.rows // shards)
        clone = copy.deepcopy(model)  # other contenders take the model's own parameters
        self.pipeline = TorchPipeline(rows, clone, schedule, cuts, compiled, group=mesh.get_group("pp"), prepare=shard)


def _compile(module: Any) -> None:
    module.forward = torch.compile(MethodType(own_code(type(module).forward), module), dynamic=False)


def check_shards(case: Case, shards: int) -> str | None:
    """Return why a case cannot be run on this number of shards; None if it can."""
    if shards < 1 or case.rows % shards:
        return f"a microbatch has {case.rows} rows, which {shards} shards cannot divide"
    if case.microbatches < RANKS * shards:
        return f"the limit deals {case.microbatches} microbatches to {RANKS * shards} processes"
    return None


def process_count(shards: int) -> int:
    """Return how many processes run."""
    return RANKS * shards
