"""Distinct blocks with their kernels, run round after round and timed by F, I and W."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.cost.segments.distinct_blocks import Block, memory_of
from pipegraph.cost.segments.subgraph import SubgraphModule, random_input, random_state
from pipegraph.device import Device
from pipegraph.kernels import make
from pipegraph.torch_private.pytrees import pytree

# ---- gpu queue -------------------------------------------------------------------------------------------------------
# Work that a GPU does while the host launches what is timed: none of that then waits for its launch.


_SIDE: Final = 4096  # of a product of two matrices of float32, which takes a GPU some milliseconds
_SAFETY: Final = 1.5  # the host may take longer than the last time


class GpuQueueFiller:
    """A context for each round of launches, which first fills the queue of a GPU.

    The work in the queue takes the GPU at least the time that the host needed for the launches of the last round. On a
    CPU, which computes at once, the context does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = Device(device)
        self._launching = 0.0  # seconds of the host in the last round
        if not self._device.is_cpu:
            self._matrix = torch.zeros(_SIDE, _SIDE, device=device)
            self._result = torch.empty_like(self._matrix)
            self._product = self._time_product()

    def __enter__(self) -> None:
        if not self._device.is_cpu:
            for _ in range(self.products(self._launching, self._product)):
                torch.mm(self._matrix, self._matrix, out=self._result)
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launching = time.perf_counter() - self._began

    @staticmethod
    def products(launching: float, product: float) -> int:
        """The number of products, of ``product`` seconds each, that last as long as the host launches."""
        return math.ceil(_SAFETY * launching / product)

    def _time_product(self) -> float:
        for _ in range(2):  # the first one loads its kernel
            self._device.synchronize()
            began = time.perf_counter()
            torch.mm(self._matrix, self._matrix, out=self._result)
            self._device.synchronize()
        return time.perf_counter() - began


# ---- block runs ------------------------------------------------------------------------------------------------------


# A stage runs several equal layers in turn, so that the weights of the next one are seldom in a core's cache. At most
# this number of sets of weights are run in turn; more make no difference.
_WEIGHT_SETS = 4


class Rounds:
    """Rounds of all blocks: F of each, and I and W of each for the microbatch of the round before.

    Two microbatches at a time, as in the middle of a step: were all memory given back after each round, the next one
    would wait for the operating system to clear its pages.
    """

    def __init__(self, runs: Sequence[BlockRun], device: torch.device) -> None:
        self.clock = _Clock(device)
        self._head_start = GpuQueueFiller(device)
        self._runs = list(enumerate(runs))
        self._turn = 0
        self._saved: dict[int, Any] = {}

    def next(self) -> None:
        """Run one round. The first one has no backward."""
        with self._head_start:
            self._launch()
        self.clock.wait()
        self._turn += 1

    def _launch(self) -> None:
        previous_saved, self._saved = self._saved, {}
        for index, run in self._runs:
            run.take_weights(self._turn)
            with self.clock.timed(index, "F"):
                forward = run.kernels.forward(run.inputs, target=run.target, with_loss=run.with_loss)
            self._saved[index] = forward.saved
            del forward
        for index, run in reversed(self._runs if previous_saved else []):
            run.take_weights(self._turn - 1)
            with self.clock.timed(index, "I" if run.has_input_grad else "W"):
                run.kernels.input_backward(previous_saved[index], run.gradients)
        for index, run in reversed(self._runs if previous_saved else []):
            with self.clock.timed(index, "W"):
                run.kernels.weight_backward(previous_saved.pop(index))


@dataclass(eq=False)
class BlockRun:
    """A block with its kernels, and everything that they are called with."""

    module: nn.Module
    kernels: Any
    weights: list[dict[str, nn.Parameter | None]]
    inputs: list[Tensor]
    gradients: list[Tensor | None]
    target: Any
    with_loss: bool
    has_input_grad: bool

    @classmethod
    def from_block(cls, block: Block, kernels: str, device: torch.device, generator: torch.Generator) -> BlockRun:
        subgraph, captured = block.subgraph, block.subgraph.captured

        def state() -> list[Tensor]:
            return [random_state(captured, node, device, generator) for node in subgraph.state]

        module = SubgraphModule(subgraph, state(), device)
        sets = [dict(module._parameters)]
        sets += [dict(SubgraphModule(subgraph, state(), device)._parameters) for _ in range(_weight_sets(block) - 1)]
        gradients: list[Tensor | None] = [
            torch.randn(node.meta["val"].shape, generator=generator, device=device).to(node.meta["val"].dtype)
            if has_gradient and block.loss is None
            else None
            for node, has_gradient in zip(subgraph.outputs, subgraph.output_gradients, strict=True)
        ]
        return cls(
            module=module,
            kernels=make(
                kernels,
                module,
                subgraph.input_gradients,
                subgraph.output_gradients,
                block.loss,
                block.regions,
            ),
            weights=sets,
            inputs=[random_input(node, device, generator) for node in subgraph.inputs],
            gradients=gradients if block.loss is None else [*gradients, torch.ones((), device=device)],
            target=_on(block.target, device),
            with_loss=block.loss is not None,
            has_input_grad=block.has_input_grad,
        )

    def once(self) -> None:
        """Run F, I and W, which compiles them."""
        saved = self.kernels.forward(self.inputs, target=self.target, with_loss=self.with_loss).saved
        self.kernels.input_backward(saved, self.gradients)
        self.kernels.weight_backward(saved)

    def take_weights(self, turn: int) -> None:
        """Put the next set of weights into the module, where the kernels look for them at every call."""
        self.module._parameters.update(self.weights[turn % len(self.weights)])


def _on(target: Any, device: torch.device) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.to(device), target)


def _weight_sets(block: Block) -> int:
    return min(block.count, _WEIGHT_SETS)


class _Clock:
    """Times by block and kind. On a GPU the device's own, so that the queue of kernels is not interrupted."""

    def __init__(self, device: torch.device) -> None:
        self._device = Device(device)
        self._unread: list[tuple[tuple[int, str], Any, Any]] = []
        self.readings: dict[tuple[int, str], list[float]] = {}

    @contextmanager
    def timed(self, block: int, kind: str) -> Iterator[None]:
        begin = self._device.now()
        yield
        self._unread.append(((block, kind), begin, self._device.now()))

    def wait(self) -> None:
        """Wait until the device has finished the round."""
        self._device.synchronize()
        seconds: dict[tuple[int, str], float] = defaultdict(float)  # a block of a round may be run in several parts
        for key, begin, end in self._unread:
            seconds[key] += self._device.seconds_between(begin, end)
        self._unread.clear()
        for key, total in seconds.items():
            self.readings.setdefault(key, []).append(total)

    def median(self, block: int, kind: str) -> float:
        """Return the median over all rounds, in seconds; 0 if nothing was timed."""
        return statistics.median(self.readings.get((block, kind), [0.0]))


def bytes_to_run(block: Block) -> int:
    """Return the bytes of a block that is run: all sets of weights with gradients, two microbatches' activations and
    one's gradients."""
    sizes = [memory_of(node.meta["val"]) for node in block.subgraph.state]
    values = [memory_of(node.meta["val"]) for node in (*block.subgraph.inputs, *block.subgraph.outputs)]
    return 2 * _weight_sets(block) * sum(sizes) + 2 * sum(values) + 3 * block.saved.bytes
