"""F, I and W of a stage against torch.compile's forward and backward; what F keeps; and CUDA graphs of each."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.stopwatch import Timing, in_turns
from pipegraph.kernels import StageKernels, maker
from pipegraph.kernels.cuda_graphs import CudaGraphRecorder, MakeRecorder
from pipegraph.kernels.stage_run import held_tensors

COMPILED = "torch.compile"
GRAPHS = "CUDA graphs"


class Contender:
    """A stage with its own kernels, and one microbatch."""

    def __init__(self, setting: Setting, stage: nn.Module, recorder: MakeRecorder | None = None) -> None:
        self.stage = stage
        self.x, self.gradient = setting.microbatch()
        self.kernels: StageKernels = maker("inductor", recorder=recorder)(stage, (True,), (True,), None)

    def forward(self) -> Any:
        return self.kernels.forward((self.x,)).saved

    def divided(self) -> None:
        saved = self.forward()
        self.kernels.input_backward(saved, (self.gradient,))
        self.kernels.weight_backward(saved)

    def undivided(self) -> None:
        self.kernels.backward(self.forward(), (self.gradient,))


def compare(setting: Setting) -> dict[str, Timing]:
    """Seconds of a microbatch: torch.compile, F with I and W, F with B. Each adds to `.grad`."""
    first = setting.stage()
    contenders = {name: Contender(setting, copy.deepcopy(first)) for name in ("F I W", "F B")}
    calls = {
        COMPILED: compiled(setting, first),
        "F I W": contenders["F I W"].divided,
        "F B": contenders["F B"].undivided,
    }
    stages = {COMPILED: first, **{name: contender.stage for name, contender in contenders.items()}}
    return in_turns(calls, setting.device, setting.rounds, {name: stage.zero_grad for name, stage in stages.items()})


def compiled(setting: Setting, stage: nn.Module) -> Callable[[], None]:
    """A microbatch of the stage under torch.compile, forward and backward. It is compiled here."""
    x, gradient = setting.microbatch()

    def call() -> None:
        module(x.detach().requires_grad_()).backward(gradient)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own, when it first compiles
        module = torch.compile(stage, dynamic=False)
        call()
    return call


@dataclass(frozen=True)
class SavedMemory:
    """Bytes that F keeps for the backward.

    Attributes:
        counted: the memory of the saved tensors.
        allocated: by how much torch's allocator grew on a GPU, without what F returns; None on a CPU.
    """

    predicted: int
    counted: int
    allocated: int | None


def saved_memory(setting: Setting) -> SavedMemory:
    """Compare what the plan says that F of the stage keeps with what it does."""
    contender = Contender(setting, setting.stage())
    contender.divided()
    bytes_before = torch.cuda.memory_allocated(setting.device) if setting.is_gpu else 0
    forward = contender.kernels.forward((contender.x,))
    bytes_after = torch.cuda.memory_allocated(setting.device) if setting.is_gpu else 0
    tensors = held_tensors(forward.saved)
    assert tensors is not None, "the stage was traced"
    state_addresses = {
        tensor.untyped_storage().data_ptr() for tensor in (*contender.stage.parameters(), *contender.stage.buffers())
    }
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    counted = sum(size for address, size in sizes.items() if address not in state_addresses)
    predicted = setting.plan.costs[1].saved_bytes
    assert predicted is not None, "the plan was priced"
    allocated = None
    if setting.is_gpu:
        returned = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in forward.outputs
        }
        # The input is kept, too, but was there before; an output is counted only if it is kept.
        input_storage = contender.x.untyped_storage()
        grown = bytes_after - bytes_before + (input_storage.nbytes() if input_storage.data_ptr() in sizes else 0)
        allocated = grown - sum(size for address, size in returned.items() if address not in sizes)
    return SavedMemory(predicted, counted, allocated)


def with_graphs(setting: Setting) -> dict[str, Timing] | None:
    """Seconds of F, I and W launched one kernel after the other, and recorded as CUDA graphs; and of torch.compile's
    forward and backward. None without a GPU.

    Each adds to `.grad`, which has memory before.
    """
    if not setting.is_gpu:
        return None
    calls = {
        "launched": Contender(setting, setting.stage()).divided,
        GRAPHS: Contender(setting, setting.stage(), partial(CudaGraphRecorder, setting.device)).divided,
        COMPILED: compiled(setting, setting.stage()),
    }
    return in_turns(calls, setting.device, setting.rounds)
