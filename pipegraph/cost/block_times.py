"""Run the distinct blocks of a model on this machine and time F, I and W of each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipegraph.arguments import argument
from pipegraph.cost.block_runs import BlockRun, Rounds, bytes_to_run
from pipegraph.cost.busy_ranks import busy_ranks, compute_threads
from pipegraph.cost.measurement_cache import Cache
from pipegraph.cost.segments.distinct_blocks import Block
from pipegraph.device import Device
from pipegraph.errors import PlanError
from pipegraph.kernels.cpu.process import keep_freed_memory
from pipegraph.progress import report_progress, track
from pipegraph.units import format_bytes, format_seconds
from pipegraph.version import __version__

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
