"""The messages of one direction between two ranks.

The receiver knows the shapes of all messages of a step before it begins, from the sizes on which all ranks agreed. So
messages have no headers: each is received into memory of its shapes. Gloo ends a process whose message is longer than
that memory, which the agreement rules out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.transport.sends import PendingSend, SendQueue
from pipegraph.runtime.wiring import Transfer


class OutgoingMessages:
    """Messages to the rank `peer`."""

    def __init__(self, group: Group, peer: int, sends: SendQueue) -> None:
        self._group, self._peer, self._sends = group, peer, sends

    def send(self, tensors: Sequence[Tensor], transfer: Transfer | None = None) -> None:
        """Start sending a message."""
        self._sends.add(PendingSend(self._group, self._peer, tensors, transfer))


class IncomingMessage:
    """A message that is being received into tensors."""

    def __init__(self, tensors: Sequence[Tensor], works: Sequence[dist.Work]) -> None:
        self.tensors = tensors
        self.works = [*works]


class IncomingMessages:
    """Messages from the rank `peer`. They are waited for in any order.

    Args:
        sends: of this rank. What a message failed for may be why none comes.
    """

    def __init__(self, group: Group, peer: int, sends: SendQueue) -> None:
        self._group, self._peer, self._sends = group, peer, sends
        self._unfinished: set[IncomingMessage] = set()

    def receive(self, tensors: Sequence[Tensor]) -> IncomingMessage:
        """Start receiving a message into tensors."""
        message = IncomingMessage(tensors, [self._group.receive(tensor, self._peer) for tensor in tensors])
        self._unfinished.add(message)
        return message

    def wait(self, message: IncomingMessage) -> None:
        """Wait for a message.

        Raises ConnectionLost, or the error of a message of this rank if that ended the connection.
        """
        try:
            with lost_connections(self._peer):
                for work in message.works:
                    work.wait()
        except ConnectionLost:
            self._sends.check()
            raise
        message.works.clear()
        self._unfinished.discard(message)

    def drop(self) -> None:
        """Drop what is not done, because it keeps the connection open."""
        for message in self._unfinished:
            message.works.clear()
        self._unfinished.clear()
