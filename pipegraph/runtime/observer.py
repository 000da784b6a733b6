"""Who is told what a rank does, while it does it: the hook for times, memory and traces."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from pipegraph.kernels.traced import held_tensors
from pipegraph.schedule import Action, Kind


class Observer(Protocol):
    """Is told of every action of a step: its calls stand in the order of the rank's work, and never overlap on a rank.

    F, B, I and W last as long as the host takes to compute, or on a GPU to launch them; a SEND as long as it takes to
    hand a message over. A RECV is told of when its message is waited for, right before the action that uses it, and
    lasts as long as the wait. On a GPU all of it is on the current stream. An action that fails has no end.
    """

    def begin(self, rank: int, action: Action) -> None:
        """The rank turns to an action."""
        ...

    def end(self, rank: int, action: Action, saved: Any) -> None:
        """It is done, and holds `saved` for the backward of the action's stage and microbatch; None: nothing."""
        ...


class ActionTimes:
    """Seconds of every action: by the clock of the host on a CPU, by events of the stream on a GPU.

    Nothing waits for a GPU until the times are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begun: dict[int, Any] = {}
        self._done: list[tuple[Action, Any, Any]] = []

    def begin(self, rank: int, action: Action) -> None:
        self._begun[rank] = self._now()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self._done.append((action, self._begun.pop(rank), self._now()))

    def seconds(self) -> dict[tuple[int, Kind], list[float]]:
        """Of each stage and kind of action, what every one of them took."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
        for action, begun, ended in self._done:
            taken = begun.elapsed_time(ended) / 1000 if self._device.type == "cuda" else ended - begun
            found[action.stage, action.kind].append(taken)
        return dict(found)

    def medians(self) -> dict[tuple[int, Kind], float]:
        """Of each stage and kind of action, the median."""
        return {key: statistics.median(each) for key, each in self.seconds().items()}

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


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
