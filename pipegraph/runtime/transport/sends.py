"""Sends on their way. Their tensors are kept until they are sent, no longer, and no computation waits for them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.wiring import Transfer

_CLOSING_SECONDS: Final = 5.0
"""How long messages on their way are waited for when everything ends."""

LARGE: Final = 256 * 1024
"""Bytes of a message from which on gloo's own `send` takes longer than handing it to a thread (0.4 ms per MiB)."""


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
        with lost_connections(self.peer, str(self.transfer or "")):
            for work in self.works:
                work.wait()


class SendQueue(Protocol):
    """Keeps messages until they are sent."""

    def add(self, send: PendingSend) -> None:
        """Send a message after those before. Raises ConnectionLost if an earlier one could not be sent."""
        ...

    def finish(self) -> None:
        """Return when all are sent; with NCCL at once. Raises ConnectionLost."""
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

    def finish(self) -> None:
        self._pending = deque(send for send in self._pending if not send.is_sent())

    def drop(self) -> None:
        self._pending.clear()


_Queue = SimpleQueue[PendingSend | threading.Event | None]


class GlooSends:
    """For gloo, in two threads.

    One thread starts large messages: if the receive is posted already, gloo's `send` returns only when most of the
    message is with the receiver. The other thread waits for each message, because a work learns that it is done only
    when it is waited for. One thread for both would let a message whose receiver is not ready hold up all others.
    """

    def __init__(self) -> None:
        self._to_start: _Queue = SimpleQueue()
        self._started: _Queue = SimpleQueue()
        self._lost: list[ConnectionLost] = []
        self._large: set[tuple[Group, int]] = set()
        starting, awaiting = (self._to_start, self._started, self._lost), (self._started, self._lost)
        threads = [
            threading.Thread(target=_start_sends, args=starting, name="pipegraph-start-sends", daemon=True),
            threading.Thread(target=_await_sends, args=awaiting, name="pipegraph-await-sends", daemon=True),
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, threads, self._to_start)

    def add(self, send: PendingSend) -> None:
        self._raise_lost()
        receiver = send.group, send.peer
        if receiver in self._large or sum(tensor.nbytes for tensor in send.tensors) >= LARGE:
            self._large.add(receiver)  # and all that follow to this receiver, which keeps their order
            self._to_start.put(send)
        else:
            send.start()
            self._started.put(send)

    def finish(self) -> None:
        reached = threading.Event()
        self._to_start.put(reached)
        reached.wait()
        self._raise_lost()

    def drop(self) -> None:
        for queue in (self._to_start, self._started):
            try:
                while True:
                    queue.get_nowait()
            except Empty:
                pass
        self._to_start.put(None)

    def _raise_lost(self) -> None:
        if self._lost:
            raise self._lost[0]


def _end(threads: Sequence[threading.Thread], queue: _Queue) -> None:
    """End the threads before the process ends torch's own threads, which they must not outlive."""
    queue.put(None)
    for thread in threads:
        thread.join(_CLOSING_SECONDS / len(threads))


def _start_sends(queue: _Queue, started: _Queue, lost: list[ConnectionLost]) -> None:
    while (item := queue.get()) is not None:
        try:
            if isinstance(item, PendingSend):
                item.start()
        except ConnectionLost as error:
            lost.append(error)
        started.put(item)
        del item  # or it would be kept until the next one comes
    started.put(None)


def _await_sends(queue: _Queue, lost: list[ConnectionLost]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        try:
            item.wait()
        except ConnectionLost as error:
            lost.append(error)
        del item  # or it would be kept until the next one comes
