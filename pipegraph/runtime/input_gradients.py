"""Gradients of the caller's inputs: from the microbatches of all stages that read an input, to its `.grad`.

    rank 0, stage 0 ─ microbatch 0 … m ─┐
    rank 0, stage 2 ─ microbatch 0 … m ─┴─ sum ─┐
    rank 1, stage 1 ─ microbatch 0 … m ─── sum ─┴─ p2p, to the rank of the first stage ─▶ x.grad

An input cut into microbatches gets their gradients in the order of its rows, and an input without rows their sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import BatchError
from pipegraph.package import CALLER, Value
from pipegraph.runtime.batch import bind_arguments
from pipegraph.runtime.processes.rank_grid import PIPELINE
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.wiring import torch_dtype

_UNREAD, _CONSTANT, _UNUSED, _COMPUTED = range(4)
"""What a rank knows of an input: it does not read it; its tensor needs no gradient, or needs one and got none; it has
one."""


class StepInputGradients:
    """The gradients of the inputs of one step, on one process.

    Args:
        inputs: by name, as the caller passed them: a tensor, or a list with a tensor for each microbatch.
        values: the inputs in the manifest.
    """

    def __init__(self, inputs: Mapping[str, Any], values: Mapping[str, Value]) -> None:
        self.tensors: dict[str, list[Tensor]] = {}
        self._is_list: set[str] = set()
        for name, passed in inputs.items():
            tensors = passed if isinstance(passed, list) else [passed]
            if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
                self.tensors[name] = tensors
                self._is_list |= {name} if isinstance(passed, list) else set()
        self._values = values
        self._sums: dict[tuple[str, int], Tensor] = {}
        self._shapes: dict[tuple[str, int], torch.Size] = {}

    def __bool__(self) -> bool:
        return bool(self.tensors)

    def leaf(self, name: str, microbatch: int, tensor: Tensor) -> Tensor:
        """The tensor of a microbatch for a stage, which requires a gradient if the caller's does."""
        tensors = self.tensors.get(name)
        if tensors is None or not tensors[microbatch if name in self._is_list else 0].requires_grad:
            return tensor
        self._shapes[name, microbatch] = tensor.shape
        return tensor.detach().requires_grad_()

    def add(self, name: str, microbatch: int, gradient: Tensor) -> None:
        """Add the gradient of a microbatch."""
        if name not in self.tensors:
            return
        is_cut = name in self._is_list or self._values[name].batch_dim is not None
        key = name, microbatch if is_cut else 0
        if key in self._sums:
            self._sums[key] = self._sums[key] + gradient
        else:
            self._sums[key] = gradient.clone()  # its memory may be used again for the next microbatch

    def gradients(self, name: str) -> list[Tensor | None]:
        """The gradient of each tensor that the caller passed for an input; None if nothing depends on it."""
        if name in self._is_list:
            return [self._sums.get((name, microbatch)) for microbatch in range(len(self.tensors[name]))]
        dim = self._values[name].batch_dim
        if dim is None:
            return [self._sums.get((name, 0))]
        sums = {at: gradient for (key, at), gradient in self._sums.items() if key == name}
        if not sums:
            return [None]
        like = next(iter(sums.values()))
        shapes = sorted((at, shape) for (key, at), shape in self._shapes.items() if key == name)
        parts = [sums[at] if at in sums else like.new_zeros(shape) for at, shape in shapes]
        return [torch.cat(parts, dim)]


class InputGradients:
    """Collects the gradients of inputs in each step, and brings them to the rank of the first stage that reads one."""

    def __init__(self, context: RankContext) -> None:
        manifest, ranks = context.manifest, context.placement
        self._manifest, self._world, self._rank = manifest, context.world, context.rank
        inputs = [value for value in manifest.values.values() if value.producer == CALLER and not value.is_constant]
        floats = [value for value in inputs if torch_dtype(value).is_floating_point or torch_dtype(value).is_complex]
        self._readers = {
            value.name: sorted({ranks[stage] for stage in value.consumers}) for value in floats if value.consumers
        }
        self._first = {value.name: ranks[min(value.consumers)] for value in floats if value.consumers}
        # The same on all ranks: without such an input, no message is ever sent.
        shared = sorted(name for name, readers in self._readers.items() if len(readers) > 1)
        self._shared = shared if context.world else []

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any], trains: bool) -> StepInputGradients:
        """Return where the gradients of a step with these arguments are collected."""
        if not trains:
            return StepInputGradients({}, {})
        inputs = bind_arguments(self._manifest, args, kwargs)
        if self._world is not None:
            inputs = {name: passed for name, passed in inputs.items() if self._rank in self._readers.get(name, ())}
        return StepInputGradients(inputs, self._manifest.values)

    def finish(self, step: StepInputGradients) -> None:
        """Add the gradients of a step to `.grad` of the caller's tensors, as `Tensor.backward` does.

        Collective over a pipeline if stages of several ranks read an input of floats. Raises BatchError on all ranks
        if a tensor requires a gradient on some of them alone.
        """
        gradients = {name: step.gradients(name) for name in step.tensors}
        if self._shared:
            self._add_from_other_ranks(step, gradients)
        for name, of_tensors in gradients.items():
            if self._world is None or self._first[name] == self._rank:
                for tensor, gradient in zip(step.tensors[name], of_tensors, strict=True):
                    if gradient is not None and tensor.requires_grad:
                        _accumulate(tensor, gradient)

    def _add_from_other_ranks(self, step: StepInputGradients, gradients: dict[str, list[Tensor | None]]) -> None:
        assert self._world is not None
        world = self._world
        states = [self._state(name, gradients) for name in self._shared]
        pipeline = list(world.pipeline)
        table = dict(zip(pipeline, world.gather(states), strict=True))
        for place, name in enumerate(self._shared):
            of_rank = {rank: table[rank][place] for rank in self._readers[name]}
            if _CONSTANT in of_rank.values() and len(set(of_rank.values())) > 1:
                constant = [world.grid.text(rank) for rank, state in of_rank.items() if state == _CONSTANT]
                raise BatchError(
                    f"{name} requires a gradient, and not on {', '.join(constant)}, which reads it as well.",
                    f"{name}.requires_grad_() on every rank of the pipeline, or on none.",
                )
            for sender, state in of_rank.items():
                if state == _COMPUTED and sender != self._first[name]:
                    self._move(name, sender, step, gradients)

    def _state(self, name: str, gradients: Mapping[str, list[Tensor | None]]) -> int:
        if self._rank not in self._readers[name]:
            return _UNREAD
        if name not in gradients:
            return _CONSTANT
        return _UNUSED if all(gradient is None for gradient in gradients[name]) else _COMPUTED

    def _move(
        self, name: str, sender: int, step: StepInputGradients, gradients: dict[str, list[Tensor | None]]
    ) -> None:
        """Add the gradient of one rank to that of the rank of the first stage."""
        assert self._world is not None
        receiver, dtype = self._first[name], torch_dtype(self._manifest.values[name])
        group = self._world.along(PIPELINE)  # collective at the first call, and all ranks have the same table
        if self._rank not in (sender, receiver):
            return
        for place, tensor in enumerate(step.tensors[name]):
            if not tensor.requires_grad:
                continue
            gradient = gradients[name][place]
            if self._rank == sender:
                message = (
                    torch.zeros_like(tensor, dtype=dtype, device=self._world.device) if gradient is None else gradient
                )
                group.wait(group.send(message.detach().to(dtype).contiguous(), receiver))
            else:
                arrived = torch.empty(tensor.shape, dtype=dtype, device=self._world.device)
                group.wait(group.receive(arrived, sender))
                gradients[name][place] = arrived if gradient is None else gradient + arrived.to(gradient.dtype)


def _accumulate(tensor: Tensor, gradient: Tensor) -> None:
    gradient = gradient.to(tensor.device, tensor.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a tensor that is not a leaf, whose `.grad` has no value yet
        present = tensor.grad
    tensor.grad = gradient if present is None else present + gradient
