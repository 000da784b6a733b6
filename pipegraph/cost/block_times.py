"""Run the distinct blocks of a model on this machine and time F, I and W of each."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor, nn

from pipegraph.arguments import argument
from pipegraph.cost.busy_ranks import busy_ranks, compute_threads
from pipegraph.cost.segments.distinct_blocks import Block, memory_of
from pipegraph.cost.segments.subgraph import SubgraphModule, random_input, random_state
from pipegraph.device import Device
from pipegraph.errors import PlanError
from pipegraph.kernels import make
from pipegraph.kernels.cpu.process import keep_freed_memory
from pipegraph.progress import report_progress, track
from pipegraph.torch_private.pytrees import pytree
from pipegraph.units import format_bytes, format_seconds
from pipegraph.version import __version__

# ---- measurement cache -----------------------------------------------------------------------------------------------
# Measurements are kept in the user's cache folder, in one small JSON file per key.


def default_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/pipegraph``, or ``~/.cache/pipegraph`` if that variable is not an absolute path."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "pipegraph"


class Cache:
    """Entries by key. A key is a mapping of plain values.

    A cache never fails: an entry that cannot be read counts as missing, one that cannot be written is lost.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = (default_folder() if folder is None else folder) / "measured"

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the entry of ``key``; None if it is missing or its file is damaged."""
        try:
            record = json.loads(self._file(key).read_text())
        except (OSError, ValueError):
            return None
        sound = isinstance(record, dict) and record.get("key") == dict(key) and isinstance(record.get("entry"), dict)
        return record["entry"] if sound else None

    def store(self, key: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        """Keep an entry. Another process sees the old file or the new one, never a part."""
        text = json.dumps({"key": dict(key), "entry": dict(entry)}, indent=1, sort_keys=True)
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "w") as file:
                    file.write(text)
                os.replace(name, self._file(key))
            except OSError:
                os.unlink(name)
                raise

    def _file(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


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


# ---- block times -----------------------------------------------------------------------------------------------------


_WARM_UP = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 200
_COMPILING = 0.7  # the part of a limited time after which no other block is compiled


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
        """Return whether each rank has its own device, so that no rank slows another one down."""
        return not self.device.startswith("cpu")

    def key(self, block: Block) -> dict[str, Any]:
        """Return what a measurement of this block depends on: the key of its entry in the cache."""
        return {
            "block": block.key,
            "device": Device(self.device).name,
            "torch": torch.__version__,
            "pipegraph": __version__,
            "matmul_precision": torch.get_float32_matmul_precision(),
            "kernels": self.kernels,
            "recompute": str(block.regions.default.choice),
            "threads": self.threads or torch.get_num_threads(),
            "ranks": 1 if self.has_own_device else self.ranks,
        }


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
    times = _measure_missing(blocks, setting, cache or Cache())
    return tuple(times[block.key] for block in blocks)


def measure_first(
    blocks: Sequence[Block], possible: Sequence[Block], setting: MeasureOptions, cache: Cache, seconds: float
) -> dict[str, BlockTimes]:
    """Measure the first of the blocks that are ``possible``, for about ``seconds`` seconds.

    At least one is measured, if one is possible. ``cache`` also keeps which ones were measured: another call for the
    same blocks returns the same times, even if other blocks are possible then.
    """
    key = {**setting.key(blocks[0]), "block": "the first of several", "of": [block.key for block in blocks]}
    measured_keys = (cache.get(key) or {}).get("measured")
    measured_blocks = [block for block in blocks if isinstance(measured_keys, list) and block.key in measured_keys]
    if measured_blocks:
        return _measure_missing(measured_blocks, setting, cache)
    times = _measure_missing(possible, setting, cache, seconds)
    if times:
        cache.store(key, {"measured": list(times)})
    return times


def _measure_missing(
    blocks: Sequence[Block], setting: MeasureOptions, cache: Cache, within: float | None = None
) -> dict[str, BlockTimes]:
    """Return the times of blocks from the cache, and run the others; with a limit ``within``, only the first ones."""
    times_by_key: dict[str, BlockTimes] = {}
    for block in blocks:
        cache_entry = cache.get(setting.key(block))
        times = None if cache_entry is None else _read(cache_entry)
        if times is not None:
            times_by_key[block.key] = times
    missing = [block for block in blocks if block.key not in times_by_key]
    if missing:
        with compute_threads(setting.threads):
            for block, times in zip(missing, _run(missing, setting, within), strict=False):
                times_by_key[block.key] = times
                cache.store(setting.key(block), asdict(times))
    return times_by_key


def _read(entry: dict[str, Any]) -> BlockTimes | None:
    """Return the times in an entry of the cache; None if it is damaged."""
    names = BlockTimes.__dataclass_fields__
    figures = [entry.get(name) for name in names]
    if set(entry) != set(names) or not all(isinstance(value, float) and 0 <= value < float("inf") for value in figures):
        return None
    return BlockTimes(**entry)


def _run(blocks: Sequence[Block], setting: MeasureOptions, within: float | None = None) -> list[BlockTimes]:
    """Return the times of the blocks; with a limit of ``within`` seconds, of the first ones compiled in time."""
    begun = time.perf_counter()
    device = torch.device(setting.device)
    _check_memory(blocks, device)
    if device.type == "cpu":
        keep_freed_memory()  # as a rank does
    report_progress(f"measuring {len(blocks)} distinct blocks on {Device(device).name}")
    runs = _runs(blocks, setting, device, None if within is None else begun + _COMPILING * within)
    rounds = Rounds(runs, device)
    seconds = setting.seconds
    if within is not None:
        seconds = min(seconds, max(0.0, begun + within - time.perf_counter()))
    other_ranks = 0 if setting.has_own_device else setting.ranks - 1
    with busy_ranks(other_ranks, torch.get_num_threads()):
        for _ in range(_WARM_UP):
            rounds.next()
        start = time.perf_counter()
        rounds.next()
        once = time.perf_counter() - start
        count = min(max(int(seconds / max(once, 1e-9)), _LEAST_ROUNDS), _MOST_ROUNDS)
        rounds.clock.readings.clear()
        for _ in track(f"measuring {len(runs)} distinct blocks, {format_seconds(round(count * once))}", range(count)):
            rounds.next()
    return [BlockTimes(*(rounds.clock.median(index, kind) for kind in "FIW")) for index in range(len(runs))]


def _runs(
    blocks: Sequence[Block], setting: MeasureOptions, device: torch.device, deadline: float | None
) -> list[BlockRun]:
    """Return the blocks, ready to run. With a deadline they are compiled one after the other, the first one in any
    case, and another one if it would be done by then, taking as long as the longest one before."""
    generator = torch.Generator(device).manual_seed(0)
    runs: list[BlockRun] = []
    longest = 0.0
    for block in blocks:
        started = time.perf_counter()
        if deadline is not None and runs and started + longest > deadline:
            break
        run = BlockRun.from_block(block, setting.kernels, device, generator)
        if deadline is not None:
            run.once()
        runs.append(run)
        longest = max(longest, time.perf_counter() - started)
    return runs


def _check_memory(blocks: Sequence[Block], device: torch.device) -> None:
    required, free = sum(map(bytes_to_run, blocks)), Device(device).free_bytes
    if free is not None and required > free:
        raise PlanError(
            f"To measure {len(blocks)} distinct blocks takes {format_bytes(required)}, and {format_bytes(free)} are "
            f"free on {device}.",
            f"{argument('balance', 'time')}, which runs nothing, or a smaller microbatch.",
        )
