"""A process group of a pipeline's own: made by its members alone, and closed without touching the user's groups.

Also how long a rank waits, and calls that may never return.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.arguments import argument
from pipegraph.errors import ArgumentError
from pipegraph.torch_private.distributed import make_backend

TIMEOUT: Final = 30 * 60.0
"""Seconds: torch's own default for gloo."""

LONGEST: Final = 1e8
"""Seconds: three years. Torch takes a timeout in milliseconds that fit into 64 bits."""

_SILENT: Final = re.compile(r"timed out waiting (\d+)\s*ms|timeout after (\d+)\s*ms|timeout|timed out", re.IGNORECASE)
_CLOSED: Final = re.compile(r"closed by peer|reset by peer|broken pipe|socket closed", re.IGNORECASE)
_LOST: Final = re.compile(r"gloo/transport/|connectFullMesh failed", re.IGNORECASE)
"""What gloo says of any other trouble with a connection. Its checks of what it is given begin with "enforce fail"."""
_MISUSED: Final = re.compile(r"ncclInvalidUsage|ncclInvalidArgument|enforce fail")

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.005, 0.25
_LAST_SECONDS: Final = 1.0

_T = TypeVar("_T")


class ConnectionLost(Exception):
    """A connection is closed, or silent for too long.

    Attributes:
        peer: the rank at the other end; None if it cannot be said which of several it is.
        silent: whether the connection is open, but nothing came within the timeout.
        where: what was being sent, if that is not what the current action does.
    """

    def __init__(self, peer: int | None, why: str, silent: bool = False, where: str = "") -> None:
        super().__init__(why)
        self.peer = peer
        self.silent = silent
        self.where = where


class Group:
    """Connections between `ranks`, numbered within the pipeline. `rank` is this process's.

    Attributes:
        ranks, rank: as given.

    Every method raises ConnectionLost if a connection is broken, was closed here, or is silent for `timeout` seconds
    while it is waited for.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], device: torch.device, timeout: float
    ) -> None:
        self.ranks, self.rank = tuple(ranks), rank
        place = self.ranks.index(rank)
        self._peer = self.ranks[1 - place] if len(self.ranks) == 2 else None  # who is lost in a collective
        with lost_connections(self._peer):
            self._backend: Any = interruptible(
                lambda: make_backend(store, place, len(self.ranks), device, timeout), device
            )

    def send(self, tensor: Tensor, receiver: int) -> dist.Work:
        """Start sending to a rank. The tensor must not change until the work is waited for."""
        with lost_connections(receiver):
            work: dist.Work = self._open().send([tensor], self.ranks.index(receiver), 0)
            return work

    def receive(self, tensor: Tensor, sender: int) -> dist.Work:
        """Start receiving from a rank, into the tensor."""
        with lost_connections(sender):
            work: dist.Work = self._open().recv([tensor], self.ranks.index(sender), 0)
            return work

    def all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> None:
        """Reduce the tensor in place over all ranks of the group."""
        self.wait(self.start_all_reduce(tensor, operation))

    def start_all_reduce(self, tensor: Tensor, operation: Any = dist.ReduceOp.SUM) -> dist.Work:
        """Start to reduce the tensor in place. It must not be used until `wait` has returned."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        with lost_connections(self._peer):
            work: dist.Work = self._open().allreduce([tensor], options)
            return work

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started; on a GPU the current stream waits."""
        with lost_connections(self._peer):
            work.wait()

    def greatest(self, number: Tensor) -> Tensor:
        """The greatest of one number of each rank of the group. A NaN is greater; a MAX of gloo or NCCL loses it."""
        table = number.new_zeros(len(self.ranks))
        table[self.ranks.index(self.rank)] = number
        self.all_reduce(table)
        return table.max()

    def start_all_gather(self, tensor: Tensor) -> PendingGather:
        """Start to gather the tensors of all ranks, which have one shape. This one must not change until `wait`."""
        table = tensor.new_empty((len(self.ranks), *tensor.shape))
        with lost_connections(self._peer):
            return PendingGather(table, self._open().allgather([list(table)], [tensor]), self._peer)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks of the group [ranks, …]."""
        return self.start_all_gather(tensor).wait()

    def broadcast(self, tensor: Tensor, sender: int) -> None:
        """Overwrite the tensor with that of a rank."""
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(sender)
        with lost_connections(self._peer):
            self._open().broadcast([tensor], options).wait()

    def agrees(self, text: str, device: torch.device) -> bool:
        """Return whether all ranks of the group pass the same `text`. Collective: every rank must call it."""
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        smallest, largest = torch.tensor(number, device=device), torch.tensor(number, device=device)
        self.all_reduce(smallest, dist.ReduceOp.MIN)
        self.all_reduce(largest, dist.ReduceOp.MAX)
        return bool(smallest == largest)

    def close(self, abort: bool = True) -> None:
        """Close the connections. Gloo closes each when its last unfinished transfer is dropped.

        NCCL closes them at once with `abort`, and loses what is on its way; without it, when that has arrived.
        """
        backend, self._backend = self._backend, None
        if backend is not None and backend.name() == "nccl":
            (backend.abort if abort else backend.shutdown)()

    def _open(self) -> Any:
        backend = self._backend  # read once, because another thread may close
        if backend is None:
            raise _ClosedHere("closed here")
        return backend


class PendingGather:
    """Tensors that are being gathered from all ranks of a group. `peer` is the other rank of two."""

    def __init__(self, table: Tensor, work: dist.Work, peer: int | None) -> None:
        self._table, self._peer = table, peer
        self._work: dist.Work | None = work

    def wait(self) -> Tensor:
        """Return the tensors [ranks, …]."""
        assert self._work is not None, "waited for once"
        try:
            with lost_connections(self._peer):
                self._work.wait()
        finally:
            self.drop()
        return self._table

    def drop(self) -> None:
        """Drop what is not done, because it keeps the connection open."""
        self._work = None


class _ClosedHere(RuntimeError):
    """Another thread of this process has closed the connection."""


class lost_connections:
    """A context that turns what gloo, NCCL and stores raise for a connection into ConnectionLost to `peer`.

    Any other error, such as one about what was to be sent, stays as it is; a ConnectionLost of a context inside this
    one gets its `where`, if it has none. Every message enters such a context, and a class takes a third of the time of
    a generator.

    Args:
        where: what was being sent, if that is not what the current action does, or the call that every rank has to
            make, such as ``save()``; printed if it fails.
    """

    __slots__ = ("_peer", "_where")

    def __init__(self, peer: int | None, where: object = "") -> None:
        self._peer, self._where = peer, where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):  # gloo raises nothing else, and torch.distributed's classes are of this one
            why, silent = _reason(error), _SILENT.search(str(error)) is not None
            if why is not None:
                raise ConnectionLost(self._peer, why, silent=silent, where=str(self._where)) from error
        elif isinstance(error, ConnectionLost):
            error.where = error.where or str(self._where)


def _reason(error: RuntimeError) -> str | None:
    """Why a connection is lost, or None if the error is about something else."""
    text = str(error)
    if _MISUSED.search(text):
        return None
    if silent := _SILENT.search(text):
        milliseconds = silent[1] or silent[2]
        return f"no answer within {int(milliseconds) / 1000:g} s" if milliseconds else "no answer in time"
    if _CLOSED.search(text):
        return "its connection closed"
    is_lost = isinstance(error, (_ClosedHere, dist.DistError)) or _LOST.search(text)
    return text.splitlines()[0] if is_lost else None


def check_timeout(seconds: object) -> None:
    """Raise ArgumentError unless this is a number of seconds for which a rank can wait."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.001 <= seconds <= LONGEST:
        raise ArgumentError(
            f"{argument('timeout')} cannot be {seconds!r}: give the seconds that a rank waits for another one, from "
            f"0.001 to {LONGEST:g}.",
            f"{argument('timeout', 1800)}, which is longer than any step.",
        )


def interruptible(function: Callable[[], _T], device: torch.device | None = None) -> _T:
    """Return what `function` returns, or raise what it raises, or what a signal's handler raises meanwhile.

    torch waits for other processes in C++, where Python handles no signal: Ctrl-C would be handled after the timeout.
    A GPU is chosen for each thread, so that what needs one is called here, and not in a new thread.
    """
    on_gpu = device is not None and device.type != "cpu"
    if on_gpu or threading.current_thread() is not threading.main_thread():
        return function()
    call = _ThreadCall(function)
    try:
        call.join()
    except BaseException:
        call.join(_LAST_SECONDS)  # a thread that returns from C++ while the interpreter ends would abort the process
        raise
    return call.result()


def wait_for_key(store: dist.Store, key: str, seconds: float, check: Callable[[], None] = lambda: None) -> None:
    """Wait until a store has a key, and handle signals meanwhile. Raises as ``store.wait`` does.

    Args:
        check: called again and again, to raise an error that ends the wait.
    """
    end, pause = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS
    while time.monotonic() < end:  # a wait of the store that ends early would print a warning of torch's
        if store.check([key]):
            return
        check()
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)  # one store answers all ranks
    store.wait([key], timedelta(milliseconds=1))


def call_within(seconds: float, function: Callable[[], _T]) -> _T:
    """Return what `function` returns, or raise what it raises.

    Raises TimeoutError after `seconds`; the call then continues in its thread, which does not keep the process alive.
    """
    call = _ThreadCall(function)
    call.join(seconds)
    if call.is_alive():
        raise TimeoutError(f"no answer within {seconds} s")
    return call.result()


class _ThreadCall(threading.Thread, Generic[_T]):
    """A function that runs in a new thread."""

    def __init__(self, function: Callable[[], _T]) -> None:
        super().__init__(name="pipegraph-call", daemon=True)
        self._function = function
        self._results: list[_T] = []
        self._failure: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._failure = error

    def result(self) -> _T:
        """Return or raise what the call did. It has ended."""
        if self._failure is not None:
            raise self._failure
        return self._results[0]
