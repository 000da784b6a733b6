"""What stands in for CUDA graphs on a CPU: it computes again, from the same memory into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipegraph.kernels import StageKernels, maker
from pipegraph.kernels.cuda_graphs import Replay

Result = TypeVar("Result")


class CallRecorder:
    """Records calls on the tensors of a stage.

    As on a GPU, nothing is computed while a call is recorded: what it has written is written back. What it returned
    then holds nothing that is right until it is replayed.
    """

    def __init__(self, stage: nn.Module, recorded: list[str] | None = None, fails: Callable[[int], bool] | None = None):
        self._stage, self._recorded = stage, [] if recorded is None else recorded
        self._fails = fails
        self.device = torch.device("cpu")

    def record(self, call: Callable[[], Result]) -> tuple[Result, Replay]:
        self._recorded.append("recorded")
        if self._fails is not None and self._fails(len(self._recorded)):
            raise RuntimeError("operation not permitted when stream is capturing\nand a second line")
        state = [*self._stage.buffers(), *(leaf.grad for leaf in self._stage.parameters() if leaf.grad is not None)]
        state_before = [tensor.detach().clone() for tensor in state]
        generator = torch.get_rng_state()
        result = call()
        outputs = _memory(result)
        torch.set_rng_state(generator)
        with torch.no_grad():
            for target, value in zip(state, state_before, strict=True):
                target.copy_(value)
        outside = {*map(_address, state), *map(_address, self._stage.parameters())}

        def replay() -> None:
            self._recorded.append("replayed")
            for to, value in zip(outputs, _memory(call()), strict=True):
                if _address(to) not in outside:
                    to.untyped_storage().copy_(value.untyped_storage())

        return result, replay


def recorded_kernels(stage: nn.Module, *arguments: Any) -> StageKernels:
    """A maker of kernels for a `Pipeline`."""
    return maker("eager", recorder=partial(CallRecorder, stage))(stage, *arguments)


def _memory(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
