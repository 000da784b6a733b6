"""Sends on their way: their tensors are kept until they are sent and then let go, and no computation waits for them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.group import lost_connections
from pipegraph.runtime.transport import ConnectionLost

_PATIENCE = 5.0
"""Seconds to wait for messages on their way when everything ends."""


@dataclass(frozen=True, slots=True)
class Sending:
    """One message that has been started."""

    peer: int
    works: Sequence[dist.Work]
    tensors: Sequence[Tensor]


class Sends(Protocol):
    """What keeps messages until they are sent."""

    def add(self, sending: Sending) -> None:
        """Keep a message. Raises ConnectionLost if an earlier one could not be sent."""
        ...

    def finish(self) -> None:
        """Return when all are sent, or with NCCL in the stream's order. Raises ConnectionLost."""
        ...

    def drop(self) -> None:
        """Let go of all that can be let go."""
        ...


class PolledSends:
    """For NCCL, whose works say when they are done."""

    def __init__(self) -> None:
        self._sending: deque[Sending] = deque()

    def add(self, sending: Sending) -> None:
        while self._sending and all(work.is_completed() for work in self._sending[0].works):
            self._sending.popleft()
        self._sending.append(sending)

    def finish(self) -> None:
        for sending in self._sending:
            with lost_connections(sending.peer):
                for work in sending.works:
                    work.wait()
        self._sending.clear()

    def drop(self) -> None:
        self._sending.clear()


class AwaitedSends:
    """For gloo, whose works learn that they are done only when they are waited for: a thread does."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Sending | threading.Event | None] = SimpleQueue()
        self._lost: list[ConnectionLost] = []
        arguments = (self._queue, self._lost)
        thread = threading.Thread(target=_await_sends, args=arguments, name="pipegraph-sends", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._queue)

    def add(self, sending: Sending) -> None:
        self._raise_lost()
        self._queue.put(sending)

    def finish(self) -> None:
        reached = threading.Event()
        self._queue.put(reached)
        reached.wait()
        self._raise_lost()

    def drop(self) -> None:
        try:
            while True:
                self._queue.get_nowait()
        except Empty:
            self._queue.put(None)

    def _raise_lost(self) -> None:
        if self._lost:
            raise self._lost[0]


def _end(thread: threading.Thread, queue: SimpleQueue[Sending | threading.Event | None]) -> None:
    """End the thread before the process takes torch's own threads down, which it must not outlive."""
    queue.put(None)
    thread.join(_PATIENCE)


def _await_sends(queue: SimpleQueue[Sending | threading.Event | None], lost: list[ConnectionLost]) -> None:
    while (item := queue.get()) is not None:
        if isinstance(item, threading.Event):
            item.set()
            continue
        try:
            with lost_connections(item.peer):
                for work in item.works:
                    work.wait()
        except ConnectionLost as error:
            lost.append(error)
        del item  # not to be kept until the next one comes
