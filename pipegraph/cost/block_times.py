"""Run the distinct blocks of a model on this machine and time F, I and W of each."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.arguments import argument
from pipegraph.cost.busy_ranks import busy_ranks, compute_threads
from pipegraph.cost.measurement_cache import Cache
from pipegraph.cost.segments.distinct_blocks import Block
from pipegraph.cost.segments.saved_memory import memory_of
from pipegraph.cost.segments.subgraph import SubgraphModule, random_input, random_state
from pipegraph.errors import PlanError
from pipegraph.graph.internals import pytree
from pipegraph.kernels import make
from pipegraph.kernels.cpu import keep_freed_memory
from pipegraph.progress import report_progress, track
from pipegraph.units import format_bytes, format_seconds
from pipegraph.version import __version__

# A stage runs several equal layers in turn, so that the weights of the next one are seldom in a core's cache. So many
# sets of weights are run in turn, at most; more than a few change nothing.
_WEIGHT_SETS = 4
_WARM_UP = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of one microbatch: medians."""

    forward: float
    input_grad: float
    weight_grad: float

    @property
    def times(self) -> tuple[float, float, float]:
        """F, I and W."""
        return self.forward, self.input_grad, self.weight_grad


@dataclass(frozen=True)
class MeasureOptions:
    """How blocks are run.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:1``.
        kernels: as ``pipegraph.kernels.registry`` takes them.
        threads: of one rank on a CPU; None takes torch's current number.
        ranks: how many share the CPU. The others compute meanwhile.
        seconds: the time for all rounds together. Compilation and the first rounds come on top.
    """

    device: str = "cpu"
    kernels: str = "inductor"
    threads: int | None = None
    ranks: int = 1
    seconds: float = 30.0

    @property
    def has_own_device(self) -> bool:
        """Return whether each rank has a device of its own, so that no rank slows another one down."""
        return not self.device.startswith("cpu")

    def key(self, block: Block) -> dict[str, Any]:
        """Return what a measurement of this block depends on: the key of its entry in the cache."""
        return {
            "block": block.key,
            "device": device_name(torch.device(self.device)),
            "torch": torch.__version__,
            "pipegraph": __version__,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "kernels": self.kernels,
            "recompute": str(block.regions.default.choice),
            "threads": self.threads or torch.get_num_threads(),
            "ranks": 1 if self.has_own_device else self.ranks,
        }


def device_name(device: torch.device) -> str:
    """Return the name under which a device is sold."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def measure(
    blocks: Sequence[Block],
    setting: MeasureOptions | None = None,
    cache: Cache | None = None,
) -> tuple[BlockTimes, ...]:
    """Measure the seconds of every block, or take them from ``cache`` if such a device measured them before.

    All blocks run forward, then all backward, round after round: other work on the machine hits all of them equally,
    and caches hold what they would hold in a step.

    Raises:
        PlanError: the blocks do not fit the device's memory. It says by how much.
    """
    setting = setting or MeasureOptions()
    cache = cache or Cache()
    found: dict[str, BlockTimes] = {}
    for block in blocks:
        held = cache.get(setting.key(block))
        times = None if held is None else _read(held)
        if times is not None:
            found[block.key] = times
    missing = [block for block in blocks if block.key not in found]
    if missing:
        with compute_threads(setting.threads):
            for block, times in zip(missing, _run(missing, setting), strict=True):
                found[block.key] = times
                cache.put(setting.key(block), asdict(times))
    return tuple(found[block.key] for block in blocks)


def _read(entry: dict[str, Any]) -> BlockTimes | None:
    """Return the times in an entry of the cache; None if it is damaged."""
    names = BlockTimes.__dataclass_fields__
    figures = [entry.get(name) for name in names]
    if set(entry) != set(names) or not all(isinstance(each, float) and 0 <= each < float("inf") for each in figures):
        return None
    return BlockTimes(**entry)


def _run(blocks: Sequence[Block], setting: MeasureOptions) -> list[BlockTimes]:
    device = torch.device(setting.device)
    _check_memory(blocks, device)
    if device.type == "cpu":
        keep_freed_memory()  # as a rank does
    report_progress(f"measuring {len(blocks)} distinct blocks on {device_name(device)}")
    generator = torch.Generator(device).manual_seed(0)
    rounds = _Rounds([_BlockRun.of(block, setting, device, generator) for block in blocks], device)
    others = 0 if setting.has_own_device else setting.ranks - 1
    with busy_ranks(others, torch.get_num_threads()):
        for _ in range(_WARM_UP):
            rounds.next()
        start = time.perf_counter()
        rounds.next()
        once = time.perf_counter() - start
        count = min(max(int(setting.seconds / max(once, 1e-9)), _LEAST_ROUNDS), _MOST_ROUNDS)
        rounds.clock.readings.clear()
        for _ in track(f"measuring {len(blocks)} distinct blocks, {format_seconds(round(count * once))}", range(count)):
            rounds.next()
    return [BlockTimes(*(rounds.clock.median(index, kind) for kind in "FIW")) for index in range(len(blocks))]


class _Rounds:
    """Rounds of all blocks: F of each, and I and W of each for the microbatch of the round before.

    Two microbatches at a time, as in the middle of a step: were all memory given back after each round, the next one
    would wait for the operating system to clear its pages.
    """

    def __init__(self, runs: Sequence[_BlockRun], device: torch.device) -> None:
        self.clock = _Clock(device)
        self._runs = list(enumerate(runs))
        self._turn = 0
        self._saved: dict[int, Any] = {}

    def next(self) -> None:
        """Run one round. The first one has no backward."""
        before, self._saved = self._saved, {}
        for index, run in self._runs:
            run.take_weights(self._turn)
            with self.clock.timed(index, "F"):
                forward = run.kernels.forward(run.inputs, target=run.target, with_loss=run.with_loss)
            self._saved[index] = forward.saved
            del forward
        for index, run in reversed(self._runs if before else []):
            run.take_weights(self._turn - 1)
            with self.clock.timed(index, "I" if run.has_input_grad else "W"):
                run.kernels.input_backward(before[index], run.gradients)
        for index, run in reversed(self._runs if before else []):
            with self.clock.timed(index, "W"):
                run.kernels.weight_backward(before.pop(index))
        self.clock.wait()
        self._turn += 1


@dataclass(eq=False)
class _BlockRun:
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
    def of(cls, block: Block, setting: MeasureOptions, device: torch.device, generator: torch.Generator) -> _BlockRun:
        subgraph, captured = block.subgraph, block.subgraph.captured

        def state() -> list[Tensor]:
            return [random_state(captured, node, device, generator) for node in subgraph.state]

        module = SubgraphModule(subgraph, state(), device)
        sets = [dict(module._parameters)]
        sets += [dict(SubgraphModule(subgraph, state(), device)._parameters) for _ in range(_weight_sets(block) - 1)]
        gradients: list[Tensor | None] = [
            torch.randn(node.meta["val"].shape, generator=generator, device=device).to(node.meta["val"].dtype)
            if comes and block.loss is None
            else None
            for node, comes in zip(subgraph.outputs, subgraph.output_gradients, strict=True)
        ]
        return cls(
            module=module,
            kernels=make(
                setting.kernels,
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
        self._device = device
        self._events: list[tuple[tuple[int, str], torch.cuda.Event, torch.cuda.Event]] = []
        self._round: dict[tuple[int, str], float] = {}
        self.readings: dict[tuple[int, str], list[float]] = {}

    @contextmanager
    def timed(self, block: int, kind: str) -> Iterator[None]:
        if self._device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            stop.record()
            self._events.append(((block, kind), start, stop))
        else:
            begun = time.perf_counter()
            yield
            self._add((block, kind), time.perf_counter() - begun)

    def _add(self, key: tuple[int, str], seconds: float) -> None:
        """Add a reading. A second one of the same kind in a round adds to the first."""
        self._round[key] = self._round.get(key, 0.0) + seconds

    def wait(self) -> None:
        """Wait until the device has finished the round."""
        if self._events:
            torch.cuda.synchronize(self._device)
        for key, start, stop in self._events:
            self._add(key, start.elapsed_time(stop) / 1000)
        self._events.clear()
        for key, seconds in self._round.items():
            self.readings.setdefault(key, []).append(seconds)
        self._round.clear()

    def median(self, block: int, kind: str) -> float:
        """Return the median over all rounds, in seconds; 0 if nothing was timed."""
        return statistics.median(self.readings.get((block, kind), [0.0]))


def _check_memory(blocks: Sequence[Block], device: torch.device) -> None:
    needed, free = sum(map(_bytes, blocks)), _free_bytes(device)
    if free is not None and needed > free:
        raise PlanError(
            f"To measure {len(blocks)} distinct blocks takes {format_bytes(needed)}, and {format_bytes(free)} are "
            f"free on {device}.\nTry: {argument('balance', 'time')}, which runs nothing, or a smaller microbatch."
        )


def _bytes(block: Block) -> int:
    """Return the bytes of all sets of weights with gradients, two microbatches' activations and one's gradients."""
    sizes = [memory_of(node.meta["val"]) for node in block.subgraph.state]
    values = [memory_of(node.meta["val"]) for node in (*block.subgraph.inputs, *block.subgraph.outputs)]
    return 2 * _weight_sets(block) * sum(sizes) + 2 * sum(values) + 3 * block.saved.bytes


def _free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU or of the machine; None if the machine does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
