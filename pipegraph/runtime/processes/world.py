"""The processes that share a pipeline: joined, and connected. A plain process is a world by itself."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from pipegraph.errors import PipegraphError, RuntimeFault, ScheduleError
from pipegraph.runtime import internals
from pipegraph.runtime.processes.clock import ClockOffset, measure_offset
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.processes.timeouts import call_within

_CLOSING_SECONDS: Final = 10.0
"""How long NCCL may take for what is on its way when everything ends."""

_pipelines: Final[Counter[tuple[int, ...]]] = Counter()
"""Pipelines made so far over the same processes: each has names of its own in the store."""


class LoneProcess:
    """The world of a plain process, which holds all stages. It has the methods of `World` that `Pipeline` offers."""

    def gather(self, figures: Sequence[float]) -> list[list[float]]:
        return [list(figures)]

    def broadcast_text(self, text: str) -> str:
        return text

    def clock_offset(self) -> ClockOffset:
        return ClockOffset()

    def everyone(self) -> None:
        return None


class World:
    """This process among those of one pipeline, and its connections to them. Ranks are numbered within the pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        processes = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size, self.device = dist.get_rank(group), len(processes), device
        self._timeout = timeout
        _pipelines[processes] += 1
        name = f"pipegraph/{'-'.join(map(str, processes))}/{_pipelines[processes]}"
        self.store: dist.Store = dist.PrefixStore(name, internals.default_store())
        self._groups: list[Group] = []
        self._everyone: Group | None = None
        self._control = self.connect("control", range(self.size), torch.device("cpu"))

    def connect(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """Connect `ranks`, of which this is one, for tensors on `device`. All of them call this with the same `name`.

        Returns when all of them are connected: a rank that failed and left before would take the others with it before
        they know why, or leave them waiting.
        """
        store = dist.PrefixStore(name, self.store)
        group = Group(store, self.rank, ranks, device or self.device, self._timeout)
        self._groups.append(group)
        with lost_connections(None):
            if store.add("connected", 1) == len(ranks):
                store.set("all connected", "")
            store.wait(["all connected"], timedelta(seconds=self._timeout))
        return group

    def check_agreement(self, text: str) -> None:
        """Wait until every rank is here. Raises ScheduleError unless all of them pass the same `text`."""
        if not self._control.agrees(text, torch.device("cpu")):
            raise ScheduleError(
                "the ranks were given different packages, schedules or numbers of microbatches, or parallelize_fn made "
                "stages of different dtypes. Give every rank the same. If the package lies on several machines, copy "
                "it anew."
            )

    def gather(self, figures: Sequence[float]) -> list[list[float]]:
        """The figures of every rank, by rank. Collective: every rank must call it, with equally many."""
        table = torch.zeros(self.size, len(figures), dtype=torch.float64)
        table[self.rank] = torch.tensor(figures, dtype=torch.float64)
        self._control.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def broadcast_text(self, text: str) -> str:
        """Broadcast rank 0's text. Collective: every rank must call it."""
        length = int(self.gather([len(text.encode())])[0][0])
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0 and text:
            letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if length:
            self._control.broadcast(letters, 0)
        return bytes(letters.tolist()).decode()

    def clock_offset(self) -> ClockOffset:
        """Measure this process's clock against that of rank 0. Collective: every rank must call it."""
        return measure_offset(self._control, self.rank, self.size)

    def everyone(self) -> Group:
        """All ranks of the pipeline. Collective: every rank must call it."""
        if self._everyone is None:
            self._everyone = self.connect("everyone", range(self.size))
        return self._everyone

    def close(self, abort: bool) -> None:
        """End every connection. That wakes every rank that waits for this one.

        Without `abort`, what a GPU has yet to send or receive is given some time first.
        """
        if self.device.type == "cuda" and not abort:
            # Two steps: after the first nothing is on its way, and if the first fails all can still be aborted.
            abort = not _succeeds_in_time(lambda: torch.cuda.synchronize(self.device))
            if not abort:
                _succeeds_in_time(lambda: self._close_groups(abort=False))
                return
        self._close_groups(abort)

    def _close_groups(self, abort: bool) -> None:
        for group in self._groups:
            group.close(abort)


def join_world(group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> World | None:
    """The world of `group`, or of the default group; None in a plain process, which holds all stages.

    The default group is made if the environment is that of a launcher such as torchrun. `timeout` is how many seconds a
    rank waits for another one.
    """
    if not dist.is_initialized():
        if group is None and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_destroy_default_group)
    members = dist.group.WORLD if group is None else group
    assert members is not None, "the default group was there, or was made above"
    try:
        return World(members, device, timeout)
    except ConnectionLost as error:
        raise RuntimeFault(f"the processes of the pipeline could not all be connected: {error}.") from error


def local_device(device: str | torch.device) -> torch.device:
    """Return `device`. Plain "cuda" under a launcher is the GPU of this process's local rank."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise PipegraphError(f"{device!r} is no device of torch: {error}.\nTry: cpu or cuda.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise PipegraphError(f"device {str(device)!r} was asked for, and torch finds no GPU.\nTry: device='cpu'.")
    if str(device) == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _succeeds_in_time(function: Callable[[], None]) -> bool:
    try:
        call_within(_CLOSING_SECONDS, function)
    except Exception:
        return False
    return True
