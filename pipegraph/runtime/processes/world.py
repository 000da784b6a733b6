"""The processes that share a pipeline: found, or made, and connected."""

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
from pipegraph.runtime.processes.clock import Clock, measure
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.processes.timeouts import within

_PATIENCE: Final = 10.0
"""Seconds that NCCL has for what is on its way when everything ends."""

_made: Final[Counter[tuple[int, ...]]] = Counter()
"""Pipelines made so far over the same processes: each has names of its own in the store."""


class World:
    """This process among those of one pipeline, and its connections to them. Ranks count within the pipeline."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        processes = tuple(dist.get_process_group_ranks(group))
        self.rank, self.size, self.device = dist.get_rank(group), len(processes), device
        self._timeout = timeout
        _made[processes] += 1
        name = f"pipegraph/{'-'.join(map(str, processes))}/{_made[processes]}"
        self.store: dist.Store = dist.PrefixStore(name, _default_store())
        self._groups: list[Group] = []
        self._everyone: Group | None = None
        self._control = self.connect("control", range(self.size), torch.device("cpu"))

    def connect(self, name: str, ranks: Sequence[int], device: torch.device | None = None) -> Group:
        """A group of `ranks`, of which this is one, for tensors on `device`. All of them call this with one `name`.

        Returns when all of them are connected: one that failed and left before would take the others with it while they
        cannot yet tell why, or leave them waiting.
        """
        store = dist.PrefixStore(name, self.store)
        group = Group(store, self.rank, ranks, device or self.device, self._timeout)
        self._groups.append(group)
        with lost_connections(None):
            if store.add("connected", 1) == len(ranks):
                store.set("all connected", "")
            store.wait(["all connected"], timedelta(seconds=self._timeout))
        return group

    def agree(self, what: str) -> None:
        """Wait until every rank is here. ScheduleError unless all of them bring the same `what`."""
        if not self._control.agrees(what, torch.device("cpu")):
            raise ScheduleError(
                "the ranks were given different packages, schedules or numbers of microbatches, or parallelize_fn made "
                "stages of different dtypes. Give every rank the same, and copy the package anew where it lies on "
                "several machines."
            )

    def gather(self, figures: Sequence[float]) -> list[list[float]]:
        """The figures of every rank, by rank. They call this together, with equally many."""
        table = torch.zeros(self.size, len(figures), dtype=torch.float64)
        table[self.rank] = torch.tensor(figures, dtype=torch.float64)
        self._control.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def told(self, text: str) -> str:
        """Rank 0's text, on every rank. They call this together."""
        length = int(self.gather([len(text.encode())])[0][0])
        letters = torch.zeros(length, dtype=torch.uint8)
        if self.rank == 0 and text:
            letters = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        if length:
            self._control.broadcast(letters, 0)
        return bytes(letters.tolist()).decode()

    def clock(self) -> Clock:
        """This process's clock against that of rank 0. They call this together."""
        return measure(self._control, self.rank, self.size)

    def everyone(self) -> Group:
        """All ranks of the pipeline. They ask for it together."""
        if self._everyone is None:
            self._everyone = self.connect("everyone", range(self.size))
        return self._everyone

    def close(self, abort: bool) -> None:
        """End every connection: whoever waits for this rank is woken by that.

        Without `abort` what a GPU has yet to send or receive is given some time for it first.
        """
        if self.device.type == "cuda" and not abort:
            # Two steps: what is past the first has nothing on its way, and what is not can still be aborted.
            abort = not _in_time(lambda: torch.cuda.synchronize(self.device))
            if not abort:
                _in_time(lambda: self._close_groups(abort=False))
                return
        self._close_groups(abort)

    def _close_groups(self, abort: bool) -> None:
        for group in self._groups:
            group.close(abort)


def find(group: dist.ProcessGroup | None, device: torch.device, timeout: float) -> World | None:
    """The world of `group`, else of the default group, which is made where a launcher's environment asks for one.

    `timeout` is how many seconds a rank waits for another one.
    None in a plain process: all stages are then this process's.
    """
    if not dist.is_initialized():
        if group is None and not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return None
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_destroy_default_group)
    found = dist.group.WORLD if group is None else group
    assert found is not None, "the default group was found, or made, above"
    try:
        return World(found, device, timeout)
    except ConnectionLost as error:
        raise RuntimeFault(f"the processes of the pipeline could not all be connected: {error}.") from error


def local_device(device: str | torch.device) -> torch.device:
    """`device`; plain "cuda" under a launcher is the device of this process's local rank."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise PipegraphError(f"{device!r} is no device of torch: {error}.\nTry: cpu or cuda.") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise PipegraphError(f"device {str(device)!r} was asked for, and torch finds no GPU.\nTry: device='cpu'.")
    if str(device) == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', torch.cuda.current_device())}"
    found = torch.device(device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def _destroy_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _in_time(do: Callable[[], None]) -> bool:
    """Whether this is done within seconds, without an error."""
    try:
        within(_PATIENCE, do)
    except Exception:
        return False
    return True


def _default_store() -> dist.Store:
    """The default group's store, by `distributed_c10d._get_default_store`.

    Private, as torch has no public way to it. A store of our own would need an address that every rank knows.
    """
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store
