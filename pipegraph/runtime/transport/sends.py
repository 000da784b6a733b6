"""Sends on their way: their tensors are kept until they are sent and then let go, and no computation waits for them."""

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

_PATIENCE = 5.0
"""Seconds to wait for messages on their way when everything ends."""

LARGE: Final = 256 * 1024
"""Bytes of a message from which on gloo's own `send` takes longer than handing it to a thread (0.4 ms per MiB)."""


@dataclass(slots=True)
class Sending:
    """One message, to the rank `peer`."""

    group: Group
    peer: int
    tensors: Sequence[Tensor]
    transfer: Transfer | None = None
    works: list[dist.Work] = field(default_factory=list)

    def start(self) -> None:
        self.works.extend([self.group.send(tensor, self.peer) for tensor in self.tensors])

    def is_sent(self) -> bool:
        """With NCCL; a work of gloo does not say so."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        with lost_connections(self.peer, str(self.transfer or "")):
            for work in self.works:
                work.wait()


class Sends(Protocol):
    """What keeps messages until they are sent."""

    def add(self, sending: Sending) -> None:
        """Send a message, behind those before. Raises ConnectionLost if an earlier one could not be sent."""
        ...

    def finish(self) -> None:
        """Return when all are sent; with NCCL at once. Raises ConnectionLost."""
        ...

    def drop(self) -> None:
        """Let go of all that can be let go."""
        ...


class PolledSends:
    """For NCCL, whose works say when they are done.

    At the end of a step some may still be on their way. They are kept into the next one, as waiting would make the
    computation that follows wait for the slowest receiver.
    """

    def __init__(self) -> None:
        self._sending: deque[Sending] = deque()

    def add(self, sending: Sending) -> None:
        while self._sending and self._sending[0].is_sent():
            self._sending.popleft()
        sending.start()
        self._sending.append(sending)

    def finish(self) -> None:
        self._sending = deque(sending for sending in self._sending if not sending.is_sent())

    def drop(self) -> None:
        self._sending.clear()


_Queue = SimpleQueue[Sending | threading.Event | None]


class AwaitedSends:
    """For gloo, in two threads.

    One starts what is large: where the receive is posted already, gloo's `send` returns when most of the message is
    with the receiver. The other waits for each, as a work learns that it is done only when it is waited for. They are
    two, because a message whose receiver is not ready must not hold up one to another rank.
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

    def add(self, sending: Sending) -> None:
        self._raise_lost()
        way = sending.group, sending.peer
        if way in self._large or sum(tensor.nbytes for tensor in sending.tensors) >= LARGE:
            self._large.add(way)  # and so are all that follow on this way, which keeps their order
            self._to_start.put(sending)
        else:
            sending.start()
            self._started.put(sending)

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
    """End the threads before the process takes torch's own threads down, which they must not outlive."""
    queue.put(None)
    for thread in threads:
        thread.join(_PATIENCE / len(threads))


def _start_sends(queue: _Queue, started: _Queue, lost: list[ConnectionLost]) -> None:
    while (item := queue.get()) is not None:
        try:
            if isinstance(item, Sending):
                item.start()
        except ConnectionLost as error:
            lost.append(error)
        started.put(item)
        del item  # not to be kept until the next one comes
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
        del item  # not to be kept until the next one comes
