"""Sends on their way. Their tensors are kept until they are sent, and no computation waits for them."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.processes.faults import SendFailed
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.wiring import Transfer

_CLOSING_SECONDS: Final = 5.0
"""How long messages on their way are waited for when everything ends."""

_WAKING_SECONDS: Final = 5.0
"""How much longer than its timeout gloo may take to say that it is over."""

LARGE: Final = 256 * 1024
"""Bytes of a message from which on gloo's own `send` takes longer than handing it to a thread (0.4 ms per MiB)."""

SMALL_BYTES: Final = 2**20
"""Bytes of small messages that are kept together until the thread waits for them, which wakes it less often."""


@dataclass(slots=True)
class PendingSend:
    """One message to the rank `peer`."""

    group: Group
    peer: int
    tensors: Sequence[Tensor]
    transfer: Transfer | None = None
    works: list[dist.Work] = field(default_factory=list)

    def start(self) -> None:
        self.works.extend([self.group.send(tensor, self.peer) for tensor in self.tensors])

    def is_sent(self) -> bool:
        """Whether the message is sent. Only NCCL's works can say so."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        with lost_connections(self.peer, self.transfer or ""):
            for work in self.works:
                work.wait()


class SendQueue(Protocol):
    """Keeps messages until they are sent."""

    def add(self, send: PendingSend) -> None:
        """Send a message after those before. Raises as `check` does."""
        ...

    def check(self) -> None:
        """Raise ConnectionLost or SendFailed if an earlier message could not be sent."""
        ...

    def finish(self) -> None:
        """Return when all are sent; with NCCL at once. Raises as `check` does."""
        ...

    def drop(self) -> None:
        """Drop every message that can be dropped."""
        ...


class NcclSends:
    """For NCCL, whose works say when they are done.

    At the end of a step some messages may still be on their way. They are kept into the next step: to wait for them
    would make the computation that follows wait for the slowest receiver.
    """

    def __init__(self) -> None:
        self._pending: deque[PendingSend] = deque()

    def add(self, send: PendingSend) -> None:
        while self._pending and self._pending[0].is_sent():
            self._pending.popleft()
        send.start()
        self._pending.append(send)

    def check(self) -> None:
        pass  # `add` raises the error

    def finish(self) -> None:
        self._pending = deque(send for send in self._pending if not send.is_sent())

    def drop(self) -> None:
        self._pending.clear()


_Queue = SimpleQueue[PendingSend | threading.Event | None]


class SendFailures:
    """Errors of the threads that send. `report` is called at once with an error that no other rank can notice."""

    def __init__(self, report: Callable[[SendFailed], None]) -> None:
        self._report = report
        self._first: ConnectionLost | SendFailed | None = None

    def add(self, send: PendingSend, error: BaseException) -> None:
        """Keep the error and end the connection: otherwise the receiver would wait for the message forever."""
        failure = error if isinstance(error, ConnectionLost) else SendFailed(send.peer, str(send.transfer or ""))
        if failure is not error:
            failure.__cause__ = error
        is_first, self._first = self._first is None, self._first or failure
        if is_first and isinstance(failure, SendFailed):  # a lost connection wakes the ranks by itself
            self._report(failure)
        send.works.clear()  # each keeps its connection open
        send.group.close()

    def check(self) -> None:
        if self._first is not None:
            raise self._first


class GlooSends:
    """For gloo, in two threads.

    One thread starts large messages: if the receive is posted already, gloo's `send` returns only when most of the
    message is with the receiver. The other thread waits for each message, because a work learns that it is done only
    when it is waited for. One thread for both would let a message whose receiver is not ready hold up all others.

    Small messages are started at once, and waited for together: to wake the thread for each of them takes 30 µs of the
    main thread's time, where all else of an action takes 77. They keep less than `SMALL_BYTES` in memory meanwhile.

    Args:
        report: called at once, in the thread, if one failed for anything but a lost connection.
        timeout: after how many seconds gloo gives a message up.
    """

    def __init__(self, report: Callable[[SendFailed], None] = lambda failure: None, timeout: float = math.inf) -> None:
        self._to_start: _Queue = SimpleQueue()
        self._started: _Queue = SimpleQueue()
        self._failures = SendFailures(report)
        self._timeout = timeout
        self._large: set[tuple[Group, int]] = set()
        self._small: list[PendingSend] = []
        self._small_bytes = 0
        starting, awaiting = (self._to_start, self._started, self._failures), (self._started, self._failures)
        threads = [
            threading.Thread(target=_start_sends, args=starting, name="pipegraph-start-sends", daemon=True),
            threading.Thread(target=_await_sends, args=awaiting, name="pipegraph-await-sends", daemon=True),
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, threads, self._to_start)

    def add(self, send: PendingSend) -> None:
        self.check()
        receiver = send.group, send.peer
        if receiver in self._large or sum(tensor.nbytes for tensor in send.tensors) >= LARGE:
            self._large.add(receiver)  # and all that follow to this receiver, which keeps their order
            self._to_start.put(send)
        else:
            send.start()
            self._small.append(send)
            self._small_bytes += sum(tensor.untyped_storage().nbytes() for tensor in send.tensors)
            if self._small_bytes >= SMALL_BYTES:
                self._await_small()

    def finish(self) -> None:
        self._await_small()
        reached = threading.Event()
        self._to_start.put(reached)
        seconds = min(self._timeout + _WAKING_SECONDS, threading.TIMEOUT_MAX)
        is_reached = reached.wait(seconds)
        self.check()
        if not is_reached:
            why = f"no answer within {self._timeout:g} s"
            raise ConnectionLost(None, why, silent=True, where="what it sent last")

    def drop(self) -> None:
        self._small.clear()
        for queue in (self._to_start, self._started):
            try:
                while True:
                    queue.get_nowait()
            except Empty:
                pass
        self._to_start.put(None)

    def check(self) -> None:
        self._failures.check()

    def _await_small(self) -> None:
        """Let the thread wait for the small messages that were kept."""
        for send in self._small:
            self._started.put(send)
        self._small.clear()
        self._small_bytes = 0


def _end(threads: Sequence[threading.Thread], queue: _Queue) -> None:
    """End the threads before the process ends torch's own threads, which they must not outlive."""
    queue.put(None)
    for thread in threads:
        thread.join(_CLOSING_SECONDS / len(threads))


def _start_sends(queue: _Queue, started: _Queue, failures: SendFailures) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, PendingSend):
            try:
                item.start()
            except BaseException as error:  # a thread that ends would leave the step waiting for ever
                failures.add(item, error)
        started.put(item)
        del item  # or it would be kept until the next one comes
    started.put(None)


def _await_sends(queue: _Queue, failures: SendFailures) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        try:
            item.wait()
        except BaseException as error:
            failures.add(item, error)
        del item  # or it would be kept until the next one comes
