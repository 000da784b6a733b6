"""What kernels take: seconds, processor seconds and page faults, within a step and run alone."""

from __future__ import annotations

import mmap
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import pipegraph

Kernel = tuple[int, str]
"""(stage, kind)"""


@dataclass(frozen=True)
class Cost:
    """What something took on the thread that called it. The kernels of a rank with one thread run on that thread."""

    seconds: float = 0.0
    processor: float = 0.0
    """seconds in which the thread had the core"""
    faults: float = 0.0
    """minor page faults: pages that the system gave to the process when it first touched them"""

    @classmethod
    def now(cls) -> Cost:
        faults = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        return cls(time.perf_counter(), time.thread_time(), faults)

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.processor + other.processor, self.faults + other.faults)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.seconds - other.seconds, self.processor - other.processor, self.faults - other.faults)

    def without_faults(self, seconds_of_fault: float) -> float:
        """Return the processor's seconds without those of page faults."""
        return self.processor - self.faults * seconds_of_fault


def total(costs: Iterable[Cost]) -> Cost:
    """Return the sum."""
    return sum(costs, Cost())


def cost_of(call: Callable[[], Any]) -> Cost:
    """Return what a call takes."""
    start = Cost.now()
    call()
    return Cost.now() - start


def seconds_of_fault(pages: int = 8192) -> float:
    """Measure the processor's seconds of one page fault: what it takes to touch new memory − to touch it again."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:

        def touch() -> None:
            for page in range(0, len(memory), mmap.PAGESIZE):
                memory[page] = 1

        first, second = cost_of(touch), cost_of(touch)
    return max(0.0, first.processor - second.processor) / max(1.0, first.faults - second.faults)


@dataclass
class _Call:
    """The arguments of one microbatch's kernels."""

    inputs: list[Any]
    target: Any
    with_loss: bool
    gradients: list[Tensor | None] | None = None


class Stopwatch:
    """Times the kernels of a pipeline in this process until it is detached, and runs them alone.

    Args:
        pipe: the pipeline.
        keeps: whether the arguments of a microbatch are kept, which takes time that counts as the interpreter's.
    """

    def __init__(self, pipe: pipegraph.Pipeline, keeps: bool = False) -> None:
        self.kernels: dict[Kernel, list[Cost]] = defaultdict(list)
        self.calls: dict[int, _Call] = {}
        """the arguments of the first microbatch, by stage"""
        self.keeps = keeps
        # Private, because an observer sees actions, which contain more than their kernels.
        (self._executor,) = pipe._runner.executors.training_executors
        self._kernels = self._executor._kernels
        self._executor._kernels = {stage: _TimedKernels(inner, stage, self) for stage, inner in self._kernels.items()}
        self._parameters = pipe.parameters

    def detach(self) -> None:
        self._executor._kernels = self._kernels

    def sums(self) -> dict[Kernel, Cost]:
        """Return what each kernel took in all."""
        return {key: total(costs) for key, costs in self.kernels.items()}

    def boundary_bytes(self) -> int:
        """Return the bytes of the largest boundary into a stage of this process."""
        sizes = [
            sum(tensor.nbytes for tensor in call.inputs if isinstance(tensor, Tensor))
            for stage, call in self.calls.items()
            if stage > 0
        ]
        return max(sizes, default=0)

    @property
    def has_loss(self) -> bool:
        """Whether a stage here computes the loss."""
        return any(call.with_loss for call in self.calls.values())

    def alone(self, divided: bool, with_loss: bool = True) -> Cost:
        """Return what the kernels of all stages here take for a step's microbatches, one stage after the other.

        Args:
            divided: whether I and W run for the microbatches that the step divides; otherwise B runs for all.
            with_loss: False leaves the loss out; the outputs are given a gradient in place of it.
        """
        return total(self._stage_alone(stage, divided, with_loss) for stage in self.calls)

    def _stage_alone(self, stage: int, divided: bool, with_loss: bool) -> Cost:
        kernels, call = self._kernels[stage], self.calls[stage]
        loss = call.with_loss and with_loss
        kernels.begin()

        def run(apart: bool) -> None:
            forward = kernels.forward(call.inputs, target=call.target if loss else None, with_loss=loss)
            gradients = call.gradients or []
            if call.with_loss and not loss:
                gradients = [output.new_ones(output.shape) for output in forward.outputs]
            if apart:
                kernels.input_backward(forward.saved, gradients)
                kernels.weight_backward(forward.saved)
            else:
                kernels.backward(forward.saved, gradients)

        order = [divided] * len(self.kernels[stage, "I"]) + [False] * len(self.kernels[stage, "B"])
        for apart in set(order):  # compiles what the schedule does not use
            run(apart)
        self._clear()
        cost = cost_of(lambda: [run(apart) for apart in order])
        self._clear()
        return cost

    def _clear(self) -> None:
        for parameter in self._parameters():
            parameter.grad = None


class _TimedKernels:
    def __init__(self, kernels: Any, stage: int, watch: Stopwatch) -> None:
        self.begin: Any = kernels.begin
        self.prepare: Any = kernels.prepare
        self._kernels, self._stage, self._watch = kernels, stage, watch

    def forward(self, inputs: Any, **options: Any) -> Any:
        if self._watch.keeps and self._stage not in self._watch.calls:
            clones = [
                value.clone() if isinstance(value, Tensor) else value for value in inputs
            ]  # buffers are used again
            self._watch.calls[self._stage] = _Call(clones, options["target"], options["with_loss"])
        return self._timed("F", self._kernels.forward, inputs, **options)

    def backward(self, saved: Any, gradients: Any) -> Any:
        self._keep(gradients)
        return self._timed("B", self._kernels.backward, saved, gradients)

    def input_backward(self, saved: Any, gradients: Any) -> Any:
        self._keep(gradients)
        return self._timed("I", self._kernels.input_backward, saved, gradients)

    def weight_backward(self, saved: Any) -> Any:
        return self._timed("W", self._kernels.weight_backward, saved)

    def _keep(self, gradients: Any) -> None:
        call = self._watch.calls.get(self._stage)
        if call is not None and call.gradients is None:
            call.gradients = [None if gradient is None else gradient.clone() for gradient in gradients]

    def _timed(self, kind: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = Cost.now()
        try:
            return call(*args, **options)
        finally:
            self._watch.kernels[self._stage, kind].append(Cost.now() - start)
