"""Replicas of a stage in other pipelines: torch's `DistributedDataParallel` around a stage says which they are.

step 1   F0 F1 B0 B1 ─▶ .grad of this pipeline ─▶ mean over replicas ─▶ .grad of all

The wrapper's own forward arms hooks that reduce gradients in the next backward, once. Under a schedule several forwards
come before a backward, and the backwards after the first one would reduce nothing. So the module inside is what runs,
traced as any other, and gradients are reduced when the step has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipegraph.errors import PipegraphError
from pipegraph.kernels.sharded import local
from pipegraph.runtime.gradient_buckets import GradientBucket, buckets, overwrite_together
from pipegraph.runtime.processes.group import lost_connections
from pipegraph.torch_private.distributed import has_communication_hook, is_replicated


def unwrapped(stage: nn.Module) -> nn.Module:
    """Return the stage inside a `DistributedDataParallel`, or the stage itself."""
    return stage.module if isinstance(stage, DistributedDataParallel) else stage


def check_replication(index: int, stage: nn.Module) -> None:
    """Raise PipegraphError if the gradients of replicas would not be reduced as torch promises."""
    if isinstance(stage, DistributedDataParallel) and stage.mixed_precision is not None:
        raise PipegraphError(
            f"parallelize_fn gave stage {index} the mixed_precision of DistributedDataParallel, whose casts are in a "
            f"forward that does not run here.",
            "torch.autocast around the step, or stage.to(torch.bfloat16).",
        )
    _check_communication_hook(index, stage)
    for name, module in unwrapped(stage).named_modules():
        where = f"{name} in stage {index}" if name else f"stage {index}"
        if isinstance(module, DistributedDataParallel):
            raise PipegraphError(
                f"parallelize_fn put DistributedDataParallel around {where}, where each backward of a microbatch would "
                f"reduce gradients, or none would.",
                "return DistributedDataParallel(stage), around the whole stage.",
            )
        if is_replicated(module):
            raise PipegraphError(
                f"parallelize_fn applied replicate to {where}. It reduces the gradients of the first microbatch alone: "
                f"each forward prepares one reduction, and a schedule has several backwards after a forward.",
                "return DistributedDataParallel(stage).",
            )


def _check_communication_hook(index: int, stage: nn.Module) -> None:
    if isinstance(stage, DistributedDataParallel) and has_communication_hook(stage):
        raise PipegraphError(
            f"stage {index} has a communication hook, which belongs to the reduction of DistributedDataParallel's own "
            f"backward. That does not run here.",
            "without the hook.",
        )


class Replicas:
    """The stages of this process that have replicas.

    Args:
        stages: as `parallelize_fn` returned them.
    """

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        self._wrappers = {index: stage for index, stage in stages.items() if isinstance(stage, DistributedDataParallel)}

    def __bool__(self) -> bool:
        return bool(self._wrappers)

    def count(self, stage: int) -> int:
        """How many replicas a stage has, itself included; 1 for a stage of another process."""
        wrapper = self._wrappers.get(stage)
        return 1 if wrapper is None else dist.get_world_size(wrapper.process_group)

    def place(self, stage: int) -> int:
        """The place of a stage of this process among its replicas; 0 without any."""
        wrapper = self._wrappers.get(stage)
        return 0 if wrapper is None else dist.get_rank(wrapper.process_group)

    def reduce(self) -> None:
        """Take the mean of `.grad` over the replicas of every stage, and make buffers equal to the first replica's.

        What earlier steps have reduced is equal on all replicas, and so stays as it is.

        Collective over the replicas, which do it in the order of the stages; not while `no_sync` is on. Raises
        ConnectionLost.
        """
        reduced: set[int] = set()  # a tied parameter is in several stages
        for index, wrapper in sorted(self._wrappers.items()):
            _check_communication_hook(index, wrapper)  # one may have been registered since
            if wrapper.require_backward_grad_sync:
                with lost_connections(None):
                    self._reduce(wrapper, reduced)

    def _reduce(self, wrapper: DistributedDataParallel, reduced: set[int]) -> None:
        group = wrapper.process_group
        named = [
            parameter
            for name, parameter in wrapper.module.named_parameters()
            if name not in wrapper.parameters_to_ignore
        ]
        trained = [parameter for parameter in named if parameter.requires_grad and id(parameter) not in reduced]
        reduced.update(map(id, trained))
        for bucket in buckets(trained):
            sent = GradientBucket(bucket)
            sent.flat.div_(dist.get_world_size(group))
            dist.all_reduce(sent.flat, group=group)
            sent.give_back()
        if wrapper.broadcast_buffers:
            named_buffers = wrapper.module.named_buffers()
            buffers = [local(buffer) for name, buffer in named_buffers if name not in wrapper.parameters_to_ignore]
            first = dist.get_global_rank(group, 0)
            overwrite_together(buffers, lambda sent: _broadcast(sent, first, group))


def _broadcast(sent: Tensor, first: int, group: Any) -> None:
    dist.broadcast(sent, first, group=group)
