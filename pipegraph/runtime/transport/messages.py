"""The messages of one direction between two ranks. Those of a call begin with a header that says which call it is.

sent:      header ─ message ─ message ─ …
received:  header ─▶ checked ─▶ messages, each into memory of the shapes that this rank's call gives it

Gloo ends the process when a message is longer than what it is received into. So a receiver looks at the header before
it receives anything else: ranks that were given different batches are told so. With NCCL, where the host does not wait
for what comes, all is received at once, and the header is checked when it has come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.transport.headers import DeferredHeaders, ExpectedHeader, OngoingCall, PipelineCall
from pipegraph.runtime.transport.sends import PendingSend, SendQueue
from pipegraph.runtime.wiring import Transfer


class OutgoingMessages:
    """Messages to the rank `peer`, of tensors on the device `device`."""

    def __init__(self, group: Group, peer: int, device: torch.device, sends: SendQueue) -> None:
        self._group, self._peer, self._device, self._sends = group, peer, device, sends
        self._call = 0  # the number of the one whose header is sent

    def send(self, call: OngoingCall, tensors: Sequence[Tensor], transfer: Transfer | None = None) -> None:
        """Start sending a message of a call."""
        if call.number != self._call:
            self._call = call.number
            tensors = [*call.known().header(self._device), *tensors]
        self._sends.add(PendingSend(self._group, self._peer, tensors, transfer))


class IncomingMessage:
    """A message that is being received, or will be once the header before it has been checked."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.works: list[dist.Work] = []

    def start(self, group: Group, peer: int) -> None:
        self.works.extend([group.receive(tensor, peer) for tensor in self.tensors])


class IncomingMessages:
    """Messages from the rank `peer`. They are waited for in any order.

    Args:
        sends: of this rank. What a message failed for may be why none comes.
        deferred: takes the headers if the host is not to wait for them.
    """

    def __init__(
        self, group: Group, peer: int, device: torch.device, sends: SendQueue, deferred: DeferredHeaders | None
    ) -> None:
        self._group, self._peer, self._device, self._sends, self._deferred = group, peer, device, sends, deferred
        self._call = 0  # the number of the one whose header is, or was, expected
        self._header: ExpectedHeader | None = None
        self._held: list[IncomingMessage] = []  # behind the header, in their order
        self._unfinished: set[IncomingMessage] = set()

    def learn(self, call: OngoingCall) -> PipelineCall:
        """Wait for the first message of a call to begin, and return what its header says.

        Raises RuntimeFault if the peer is in another call, and ConnectionLost.
        """
        self._call = call.number
        try:
            with lost_connections(self._peer):
                return ExpectedHeader(self._group, self._peer, call.known(), self._device).wait()
        except ConnectionLost:
            self._sends.check()
            raise

    def receive(self, call: OngoingCall, tensors: Sequence[Tensor]) -> IncomingMessage:
        """Start receiving a message of a call into tensors."""
        message = IncomingMessage(tensors)
        self._unfinished.add(message)
        if call.number != self._call:
            self._call = call.number
            self._header = ExpectedHeader(self._group, self._peer, call.known(), self._device)
            if self._deferred is not None:
                self._header.receive_all()
        if self._header is None or self._deferred is not None:
            message.start(self._group, self._peer)
        else:
            self._held.append(message)
        return message

    def wait(self, message: IncomingMessage) -> None:
        """Wait for a message. Raises as `learn` does, or what a message of this rank failed for, if that ended it."""
        try:
            with lost_connections(self._peer):
                if self._header is not None:
                    header, self._header = self._header, None
                    self._check(header)
                for work in message.works:
                    work.wait()
        except ConnectionLost:
            self._sends.check()
            raise
        message.works.clear()
        self._unfinished.discard(message)

    def drop(self) -> None:
        """Drop what is not done, because it keeps the connection open."""
        self._header = None
        self._held.clear()
        for message in self._unfinished:
            message.works.clear()
        self._unfinished.clear()

    def _check(self, header: ExpectedHeader) -> None:
        """Check a header, and start to receive what was held behind it."""
        if self._deferred is not None:
            header.check_later(self._deferred)
            return
        header.wait()
        for each in self._held:
            each.start(self._group, self._peer)
        self._held.clear()
