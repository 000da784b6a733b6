"""What is measured of steps: times of actions, bytes that are saved, and both of a whole run."""

from __future__ import annotations

import statistics
import time
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipegraph.kernels.traced import held_tensors
from pipegraph.schedule import Action, Kind

COMPUTING = Kind.F, Kind.I, Kind.W, Kind.B


@dataclass(frozen=True)
class MeasuredRun:
    """What a run took.

    Attributes:
        steps: how many of them the times are of: all but the first, which compiles.
        times: medians, in seconds, by stage and kind; empty after a single step.
        step: of a whole step, the median; None after a single one.
        bubble: the part of a step in which even its busiest rank computed nothing, the median over steps; None after a
            single one.
        state: bytes of each rank: parameters, buffers, gradients, and what the optimizer holds.
        saved: bytes of each rank that were kept for backwards, at the most; None where autograd keeps them.
        allocated: of each process with a GPU, the most bytes that torch had allocated on it; else empty.
        processes: that ran it: one for each rank, or one for all.
        kernels: that were run.
    """

    steps: int
    times: Mapping[tuple[int, Kind], float]
    step: float | None
    state: tuple[int, ...]
    saved: tuple[int | None, ...]
    allocated: tuple[int, ...]
    processes: int
    kernels: str
    bubble: float | None = None


def moment(device: torch.device) -> Any:
    """Now: seconds by the host's clock on a CPU; on a GPU an event of the current stream, which it has yet to pass."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class ActionTimes:
    """Seconds of every action: by the clock of the host on a CPU, by events of the stream on a GPU.

    Nothing waits for a GPU until figures are asked for, or until `end_step`. An action keeps one number of 8 bytes; the
    events of a GPU are dropped as soon as they are read, which is when the GPU has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: dict[int, Any] = {}
        self._unread: deque[tuple[int, Action, Any, Any]] = deque()
        self._seconds: dict[tuple[int, Kind], array[float]] = defaultdict(lambda: array("d"))
        self._busy: dict[int, float] = defaultdict(float)

    def begin(self, rank: int, action: Action) -> None:
        self._begun[rank] = moment(self._device)

    def end(self, rank: int, action: Action, saved: Any) -> None:
        begun, ended = self._begun.pop(rank), moment(self._device)
        if self._device.type != "cuda":
            self._keep(rank, action, ended - begun)
            return
        self._unread.append((rank, action, begun, ended))
        while self._unread and self._unread[0][-1].query():
            self._read_first()

    def end_step(self) -> dict[int, float]:
        """Of each rank, the seconds that it computed, transfers apart, since this was last asked: between two steps."""
        self._read()
        busy, self._busy = dict(self._busy), defaultdict(float)
        return busy

    def seconds(self) -> dict[tuple[int, Kind], list[float]]:
        """Of each stage and kind of action, what every one of them took."""
        self._read()
        return {key: list(each) for key, each in self._seconds.items()}

    def medians(self) -> dict[tuple[int, Kind], float]:
        """Of each stage and kind of action, the median."""
        self._read()
        return {key: statistics.median(each) for key, each in self._seconds.items()}

    def _read(self) -> None:
        """Wait for the GPU, and take what its events tell."""
        if self._unread:
            torch.cuda.synchronize(self._device)
        while self._unread:
            self._read_first()

    def _read_first(self) -> None:
        rank, action, begun, ended = self._unread.popleft()
        self._keep(rank, action, begun.elapsed_time(ended) / 1000)

    def _keep(self, rank: int, action: Action, seconds: float) -> None:
        self._seconds[action.stage, action.kind].append(seconds)
        if not action.kind.is_transfer:
            self._busy[rank] += seconds


class SavedBytes:
    """The most bytes that each rank holds for backwards at one time; memory that several tensors share counts once.

    `apart` is memory that is held in any case, and not counted: parameters, buffers, the batch. Weighing takes time of
    its own, so that a step that is weighed tells no times.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self._apart = {_address(tensor) for tensor in apart}
        self._held: dict[int, dict[tuple[int, int], Mapping[int, int]]] = defaultdict(dict)
        self._most: dict[int, int] = defaultdict(int)
        self._unknown: set[int] = set()

    def begin(self, rank: int, action: Action) -> None:
        pass

    def end(self, rank: int, action: Action, saved: Any) -> None:
        if action.kind.is_transfer:
            return
        held, key = self._held[rank], (action.stage, action.microbatch)
        held.pop(key, None)
        tensors = () if saved is None else held_tensors(saved)
        if tensors is None:
            self._unknown.add(rank)
            return
        sizes = {_address(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}
        held[key] = {address: size for address, size in sizes.items() if address not in self._apart}
        together = {address: size for each in held.values() for address, size in each.items()}
        self._most[rank] = max(self._most[rank], sum(together.values()))

    def most(self, rank: int) -> int | None:
        """Bytes, over all steps seen; None where autograd keeps them, which does not say what it keeps."""
        return None if rank in self._unknown else self._most[rank]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
