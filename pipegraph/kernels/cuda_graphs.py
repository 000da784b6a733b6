"""Kernels recorded as CUDA graphs, which a GPU starts at once.

A GPU waits for the CPU if kernels take less time than the CPU needs to launch the next one. A recorded graph is
launched as a whole, but reads and writes the places in memory that it was recorded with. So each microbatch in flight
has its own graphs:

inputs ─ copied ─▶ ┌ MicrobatchGraphs: F ─▶ saved ─▶ I ─▶ W ┐ ─ copied ─▶ outputs, gradients of inputs
                   └──────────── its own memory ────────────┘
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from pipegraph.kernels.trace_guard import gradient_in_place
from pipegraph.torch_private.tensors import is_held_elsewhere, zero_all

# ---- recorder --------------------------------------------------------------------------------------------------------
# What records the kernels that a call launches, and launches all of them at once later on.


Result = TypeVar("Result")

Replay = Callable[[], None]
"""Computes again what was recorded, from the same memory into the same memory"""


class Recorder(Protocol):
    """Records calls that always run one after the other, in the order in which they were recorded.

    Attributes:
        device: what is computed elsewhere is not recorded.
    """

    device: torch.device

    def record(self, call: Callable[[], Result]) -> tuple[Result, Replay]:
        """Return what the call returns, and what computes that. Nothing is computed before.

        Raises:
            Exception: whatever the call raises; RuntimeError for one that cannot be recorded.
        """
        ...


MakeRecorder = Callable[[], Recorder]
"""makes what records the kernels of one microbatch at a time"""


class CudaGraphRecorder:
    """Records CUDA graphs, which share the memory that they use in between."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _recording_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, call: Callable[[], Result]) -> tuple[Result, Replay]:
        graph = torch.cuda.CUDAGraph()
        # `torch.cuda.graph` would first wait for all that the GPU has to do: for a receive, too, of what another rank
        # sends only once it has got what this one is about to compute. Threads of NCCL may continue.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = call()
            except BaseException:
                with suppress(RuntimeError):  # the first error says more
                    graph.capture_end()
                raise
            graph.capture_end()
        return result, graph.replay


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which all graphs are recorded: memory that is free again is found by its stream."""
    return torch.cuda.Stream(device)


# ---- kept gradients --------------------------------------------------------------------------------------------------
# Gradients of parameters in memory that stays in its place, because graphs that add to them are recorded with it.


Places = tuple[int, ...]
"""The addresses of gradients"""


class KeptGradients:
    """The memory of gradients, kept for the next step when an optimizer sets `.grad` to None."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def places(self, parameters: Mapping[int, Tensor]) -> Places | None:
        """Give each parameter a `.grad`, zeros if it has none, and return the addresses of the gradients.

        Memory that other code still holds, such as a gradient from before `.grad` was set to None, is not used again.

        Args:
            parameters: by number; a parameter always has the same number.

        Returns:
            None if a gradient cannot be added to in place.
        """
        new = []
        for number, parameter in parameters.items():
            if parameter.grad is None:
                memory = self._memory.get(number)
                if memory is None or is_held_elsewhere(memory):
                    memory = self._memory[number] = torch.empty_like(parameter, requires_grad=False)
                parameter.grad = memory.detach()
                new.append(memory)
        if new:
            zero_all(new)
        gradients = [gradient_in_place(parameter) for parameter in parameters.values()]
        places = tuple(0 if gradient is None else gradient.data_ptr() for gradient in gradients)
        return None if 0 in places else places


# ---- microbatch graphs -----------------------------------------------------------------------------------------------


Values = dict[str, Tensor]
"""Tensors by name: what the backward reads"""

Backward = Callable[[Values], tuple[Sequence[Tensor | None], Values]]
"""What a kernel of the backward reads, which it empties → gradients of the stage's inputs, and what W reads after it"""


@dataclass(frozen=True)
class _RecordedBackward:
    """One of I, W and B.

    Attributes:
        output_gradients: the gradients of outputs that it reads.
        gradients: those of inputs.
        values: what W reads.
    """

    output_gradients: Values
    gradients: Sequence[Tensor | None]
    values: Values
    replay: Replay


class MicrobatchGraphs:
    """The graphs of a microbatch, for one variant of a stage and one set of sizes. The next microbatch uses them again.

    F is recorded when this is made, each kernel of the backward when it is first asked for. What F returns to the
    backward is not freed, so that I and W as well as B can be recorded for it.

    Args:
        forward: F of (the tensors of a call), which returns what the stage does, and what the backward reads by name.
        inputs: an example of the tensors of a call.
        recorder: of these graphs alone.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Tensor]], tuple[Sequence[Tensor], Values]],
        inputs: Sequence[Tensor],
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._inputs = [_copy(tensor) for tensor in inputs]
        (self._outputs, self._saved), self._replay = recorder.record(lambda: forward(self._inputs))
        self._backwards: dict[Any, _RecordedBackward] = {}
        self._user: Callable[[], object] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no microbatch in flight uses this memory."""
        return self._user() is None

    @property
    def recorded(self) -> int:
        """How many kernels of the backward are recorded."""
        return len(self._backwards)

    def used_by(self, user: object) -> None:
        """Keep the memory for a microbatch as long as `user` lives."""
        self._user = weakref.ref(user)

    def forward(self, inputs: Sequence[Tensor]) -> tuple[list[Tensor], Values]:
        """Run F. Returns what the stage does, in new memory, and what the backward reads."""
        for recorded_input, new_input in zip(self._inputs, inputs, strict=True):
            _write(recorded_input, new_input)
        self._replay()
        return [_copy(output) for output in self._outputs], dict(self._saved)

    def is_recorded(self, key: object) -> bool:
        """Whether a kernel of the backward is recorded."""
        return key in self._backwards

    def record(self, key: object, values: Values, output_gradients: Values, backward: Backward) -> None:
        """Record a kernel of the backward.

        Args:
            key: under which it is found.
            values: what it reads, all in the memory of this microbatch, but for `output_gradients`.
            output_gradients: gradients of outputs, which it reads as well.
            backward: the kernel.
        """
        recorded_gradients = {name: _copy(gradient) for name, gradient in output_gradients.items()}
        results, replay = self._recorder.record(lambda: backward({**values, **recorded_gradients}))
        self._backwards[key] = _RecordedBackward(recorded_gradients, *results, replay)

    def backward(self, key: object, output_gradients: Values) -> tuple[tuple[Tensor | None, ...], Values]:
        """Run a recorded kernel. Returns the gradients of inputs, in new memory, and what W reads after it."""
        recorded = self._backwards[key]
        for name, gradient in output_gradients.items():
            _write(recorded.output_gradients[name], gradient)
        recorded.replay()
        gradients = (None if input_gradient is None else _copy(input_gradient) for input_gradient in recorded.gradients)
        return tuple(gradients), dict(recorded.values)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides: kernels are traced for them."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _write(copy, tensor)
    return copy


def _write(to: Tensor, tensor: Tensor) -> None:
    """Write what a tensor has to one of its shape. Elements that share memory, as after `expand`, are written once."""
    shape = [1 if stride == 0 else length for length, stride in zip(to.shape, to.stride(), strict=True)]
    if shape != [*to.shape] and tensor.numel():
        to = to.as_strided(shape, to.stride())
        tensor = tensor[tuple(slice(length) for length in shape)]
    to.copy_(tensor)
