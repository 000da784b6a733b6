"""What stands in for CUDA graphs on a CPU: it computes again, from the same memory into the same memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipegraph.kernels import StageKernels, maker
from pipegraph.kernels.cuda_graphs.recorder import Replay

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
        held = [*self._stage.buffers(), *(each.grad for each in self._stage.parameters() if each.grad is not None)]
        before = [each.detach().clone() for each in held]
        generator = torch.get_rng_state()
        result = call()
        own = _memory(result)
        torch.set_rng_state(generator)
        with torch.no_grad():
            for each, value in zip(held, before, strict=True):
                each.copy_(value)
        outside = {*map(_address, held), *map(_address, self._stage.parameters())}

        def replay() -> None:
            self._recorded.append("replayed")
            for to, value in zip(own, _memory(call()), strict=True):
                if _address(to) not in outside:
                    to.untyped_storage().copy_(value.untyped_storage())

        return result, replay


def recorded_kernels(stage: nn.Module, *given: Any) -> StageKernels:
    """A maker of kernels for a `Pipeline`."""
    return maker("eager", recorder=partial(CallRecorder, stage))(stage, *given)


def _memory(result: Any) -> list[Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
