"""A process group of a pipeline's own: made by its members alone, and closed without touching the user's groups."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT: Final = 30 * 60.0
"""Seconds: torch's own default for gloo."""

_SILENT: Final = re.compile(r"timed out waiting (\d+)\s*ms|timeout after (\d+)\s*ms|timeout|timed out", re.IGNORECASE)


class ConnectionLost(Exception):
    """A connection to the rank `peer` is closed, or `silent`; None where it cannot be told to which of several.

    `where` is what was being sent, where the action that is named beside it is another one.
    """

    def __init__(self, peer: int | None, why: str, silent: bool = False, where: str = "") -> None:
        super().__init__(why)
        self.peer = peer
        self.silent = silent
        self.where = where


class Group:
    """Connections between `ranks`, which count within the pipeline; rank `rank` is here.

    Everything raises ConnectionLost where a connection is broken, was closed here, or is silent for `timeout` seconds
    while it is waited for.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], device: torch.device, timeout: float
    ) -> None:
        self._ranks = tuple(ranks)
        with lost_connections(None):
            self._backend: Any = _backend(store, self._ranks.index(rank), len(self._ranks), device, timeout)

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        """Start sending to a rank. The tensor stays as it is until the work is waited for."""
        with lost_connections(receiver):
            work: dist.Work = self._open().send([tensor], self._ranks.index(receiver), 0)
            return work

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        """Start receiving from a rank, into the tensor."""
        with lost_connections(sender):
            work: dist.Work = self._open().recv([tensor], self._ranks.index(sender), 0)
            return work

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce the tensor in place over all ranks of the group."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        with lost_connections(None):
            self._open().allreduce([tensor], options).wait()

    def broadcast(self, tensor: Tensor, sender: int) -> None:
        """Overwrite the tensor with that of a rank."""
        options = dist.BroadcastOptions()
        options.rootRank = self._ranks.index(sender)
        with lost_connections(None):
            self._open().broadcast([tensor], options).wait()

    def agrees(self, what: str, device: torch.device) -> bool:
        """Whether all ranks of the group bring the same `what`. They call this together."""
        number = int.from_bytes(hashlib.sha256(what.encode()).digest()[:7], "big")
        least, most = torch.tensor(number, device=device), torch.tensor(number, device=device)
        self.all_reduce(least, dist.ReduceOp.MIN)
        self.all_reduce(most, dist.ReduceOp.MAX)
        return bool(least == most)

    def close(self, abort: bool = True) -> None:
        """Let the connections go: gloo closes them when no unfinished transfer holds them.

        NCCL closes them at once with `abort`, and what is on its way is lost; else when that has arrived.
        """
        backend, self._backend = self._backend, None
        if backend is not None and backend.name() == "nccl":
            (backend.abort if abort else backend.shutdown)()

    def _open(self) -> Any:
        backend = self._backend  # read once, as another thread may close
        if backend is None:
            raise RuntimeError("closed here")
        return backend


@contextmanager
def lost_connections(peer: int | None, where: str = "") -> Iterator[None]:
    """Turn what gloo and NCCL raise into ConnectionLost to `peer`."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError is one too, and gloo raises no other
        text = str(error)
        if silent := _SILENT.search(text):
            milliseconds = silent[1] or silent[2]
            why = f"no answer within {int(milliseconds) / 1000:g} s" if milliseconds else "no answer in time"
        else:
            gone = any(part in text.lower() for part in ("closed by peer", "reset by peer", "broken pipe"))
            why = "its connection closed" if gone else text.splitlines()[0]
        raise ConnectionLost(peer, why, silent=silent is not None, where=where) from error


def _backend(store: dist.Store, rank: int, size: int, device: torch.device, timeout: float) -> Any:
    """A gloo or NCCL backend over `store`, by the classes ProcessGroupGloo and ProcessGroupNCCL.

    They are exported and not documented, and gloo's options are private. `new_group` does not serve: every process of
    the world has to call it, also those of other pipelines, and what it made stands in torch's global tables until all
    of them destroy it.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout)
    options._devices = _gloo_devices()
    return gloo(store, rank, size, options)


@cache
def _gloo_devices() -> list[Any]:
    """The process's gloo devices. Each has a thread that wakes a hundred times a second, so that all groups share them.

    They are chosen as torch does where none are given.
    """
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
    if interfaces:
        return [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
    return [dist.ProcessGroupGloo.create_default_device()]
