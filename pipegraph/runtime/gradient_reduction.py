"""Sums of gradients over the ranks that hold a copy of a stage, once per step, while the rest of the step runs.

stage 1   F0 F1 B0 B1 ─▶ buckets ─ all-reduce ─────────┐
stage 0   F0 F1          B0 B1   ─▶ buckets ─ all-reduce ┴─▶ .grad of the step, added to that of earlier steps
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import Work

from pipegraph.kernels.loss import objects_held_by
from pipegraph.kernels.sharded import local
from pipegraph.runtime.gradient_buckets import GradientBucket, buckets, overwrite_together
from pipegraph.runtime.measurements import Message, Sent
from pipegraph.runtime.parameters import Stages, parameters_of, redistribute
from pipegraph.runtime.processes.group import Group


class GradientReduction:
    """The copies of this process's parameters on the ranks of a group.

    Args:
        parameters: of each stage, those that every rank of the group has whole. One may be in several stages.
        stages: the stages, which have buffers.
        group: the ranks.
        first: the rank whose parameters and buffers all of them have.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        stages: Mapping[int, nn.Module],
        group: Group,
        first: int,
    ) -> None:
        self._parameters, self._stages, self._group, self._first = parameters, stages, group, first
        self._reduced: list[tuple[GradientBucket, Work]] = []
        self._done: set[int] = set()

    def make_equal(self) -> None:
        """Overwrite parameters and buffers with those of the first rank. Collective."""
        for index, stage in self._stages.items():
            tensors = [*self._parameters[index], *(buffer for _, buffer in stage.named_buffers())]
            make_equal(tensors, self._group, self._first)

    def make_buffers_equal(self) -> None:
        """Overwrite what a step may have written to: the buffers that are in `state_dict()`. Collective."""
        for stage in self._stages.values():
            names = stage.state_dict(keep_vars=True)
            persistent_buffers = [buffer for name, buffer in stage.named_buffers() if name in names]
            make_equal(persistent_buffers, self._group, self._first)

    @contextmanager
    def of_this_step(self) -> Iterator[None]:
        """A context around a step: `.grad` is that of the step alone, and at its end what was there before is added."""
        distinct_parameters = {
            id(stage_parameter): stage_parameter
            for parameters in self._parameters.values()
            for stage_parameter in parameters
        }.values()
        previous_gradients = [parameter.grad for parameter in distinct_parameters]
        for parameter in distinct_parameters:
            parameter.grad = None
        self._done.clear()
        try:
            yield
        finally:
            self._reduced.clear()
            for parameter, old in zip(distinct_parameters, previous_gradients, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def start(self, stage: int) -> list[Sent]:
        """Start to reduce the gradients of a stage, which are whole. What it shares with others waits for the last.

        Returns the messages.
        """
        self._done.add(stage)
        redistribute(self._parameters[stage])
        waiting = {id(parameter) for index in self._stages.keys() - self._done for parameter in self._parameters[index]}
        ready = [
            parameter
            for parameter in self._parameters[stage]
            if parameter.requires_grad and id(parameter) not in waiting
        ]
        started = [
            (bucket, self._group.start_all_reduce(bucket.flat)) for bucket in map(GradientBucket, buckets(ready))
        ]
        self._reduced += started
        return [(work, Message("all_reduce", bucket.flat.nbytes, self._group.ranks)) for bucket, work in started]

    def finish(self) -> None:
        """Wait for all reductions, whose results become `.grad`."""
        for bucket, work in self._reduced:
            self._group.wait(work)
            bucket.give_back()
        self._reduced.clear()


def copied_parameters(
    stages: Stages, sharded: Collection[int], trained_by_loss: Sequence[nn.Parameter]
) -> dict[int, list[nn.Parameter]]:
    """Of each stage, the parameters that all data-parallel ranks have whole.

    Args:
        sharded: the identities of those that they have in parts.
        trained_by_loss: the parameters of `loss_fn`, which count for the last stage.
    """
    parameters = {
        index: [parameter for _, parameter in parameters_of(stage) if id(parameter) not in sharded]
        for index, stage in stages.items()
    }
    parameters[max(parameters)] += trained_by_loss
    return parameters


def make_equal(tensors: Sequence[Tensor], group: Group, first: int) -> None:
    """Overwrite tensors with those of the rank `first` of a group, which calls this together."""
    local_tensors = [local(tensor.detach()) for tensor in tensors]
    overwrite_together(local_tensors, lambda sent: group.broadcast(sent, first))


def trained_by(loss_fn: Any) -> list[nn.Parameter]:
    """The parameters that a loss function trains with the model: its own, and those of modules that it reads."""
    read = objects_held_by(loss_fn)
    parameters = [parameter for module in read if isinstance(module, nn.Module) for parameter in module.parameters()]
    parameters += [parameter for parameter in read if isinstance(parameter, nn.Parameter)]
    return [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
