"""A process group of a pipeline's own: made by its members alone, and closed without touching the user's groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.transport import ConnectionLost

_TIMEOUT: Final = timedelta(minutes=30)
"""torch's own default for gloo."""


class Group:
    """Connections between `ranks`, which count within the pipeline; rank `rank` is here.

    Everything raises ConnectionLost where a connection is broken, or was closed here.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = tuple(ranks)
        with lost_connections(None):
            self._backend: Any = _backend(store, self._ranks.index(rank), len(self._ranks), device)

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

    def close(self) -> None:
        """Let the connections go: gloo closes them when no unfinished transfer holds them, NCCL at once."""
        backend, self._backend = self._backend, None
        if backend is not None and backend.name() == "nccl":
            backend.abort()

    def _open(self) -> Any:
        if self._backend is None:
            raise RuntimeError("closed here")
        return self._backend


@contextmanager
def lost_connections(peer: int | None) -> Iterator[None]:
    """Turn what gloo and NCCL raise into ConnectionLost to `peer`."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError is one too, and gloo raises no other
        text = str(error)
        known = {"closed by peer": "its connection closed", "timed out": f"no answer within {_TIMEOUT}"}
        why = next((said for part, said in known.items() if part in text.lower()), text.splitlines()[0])
        raise ConnectionLost(peer, why) from error


def _backend(store: dist.Store, rank: int, size: int, device: torch.device) -> Any:
    """A gloo or NCCL backend over `store`, by the classes ProcessGroupGloo and ProcessGroupNCCL.

    They are exported and not documented. `new_group` does not serve: every process of the world has to call it, also
    those of other pipelines, and what it made stands in torch's global tables until all of them destroy it.
    """
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    return dist.ProcessGroupGloo(store, rank, size, _TIMEOUT)
