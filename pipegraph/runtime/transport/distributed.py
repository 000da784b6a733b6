"""The transport between processes: gloo for tensors on the CPU, NCCL for those on a GPU; or gloo there as well, through
CPU memory, if the default group was made for it.

Every direction of every pair of ranks that communicate has a separate group. NCCL runs the transfers of a group one
after the other: with a group per direction there is no order in which two ranks could wait for each other. And when a
rank closes its side, every rank that waits for it notices, also while other messages are pending.

With NCCL each group has a separate CUDA stream, so that transfers overlap with computation. A send or receive begins
after all work that the current stream holds at that moment: after the kernel that made the tensor, and after the last
one that read the buffer. Waiting for it makes the current stream wait, never the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.package import Value
from pipegraph.runtime.microbatches import StepInputs
from pipegraph.runtime.processes.faults import SendFailed
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.transport.protocol import overwrite, verifies_releases
from pipegraph.runtime.transport.sends import GlooSends, NcclSends, PendingSend, SendQueue
from pipegraph.runtime.wiring import Transfer, from_memory, in_memory, shape_in_memory

# ---- messages --------------------------------------------------------------------------------------------------------
# The messages of one direction between two ranks.
#
# The receiver knows the shapes of all messages of a step before it begins, from the sizes on which all ranks agreed. So
# messages have no headers: each is received into memory of its shapes. Gloo ends a process whose message is longer than
# that memory, which the agreement rules out.


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


# ---- distributed -----------------------------------------------------------------------------------------------------


Shapes = tuple[tuple[int, ...], ...]


class BufferPool:
    """Buffers for the messages of one direction of one edge, each with room for all values of a message.

    Args:
        dtypes: of the values. Their shapes are those in memory, as `shape_in_memory` returns them.

    take ─▶ a message is written ─▶ actions read it ─▶ release ─▶ taken again
                                                  └──▶ or never released, if something that left the executor shares it

    Buffers of shapes that a step has not used are dropped at the end of it.

    A buffer is used for one message until it is released, so that there is one buffer for each message that the
    schedule holds at one time. A buffer that is not released is never used again, and its memory lives as long as its
    tensors.

    On a GPU a released buffer may still be read by kernels that are enqueued. That is safe: a receive into it begins
    when everything is done that the current stream holds at that moment.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self._dtypes = tuple(dtypes)
        self._device = device
        self._free: dict[Shapes, list[tuple[Tensor, ...]]] = {}
        self._used: set[Shapes] = set()
        self._verifies = verifies_releases()

    def take(self, shapes: Shapes) -> tuple[Tensor, ...]:
        """A tensor of its shape for each value, with undefined content."""
        self._used.add(shapes)
        if free := self._free.get(shapes):
            return free.pop()
        with torch.inference_mode(False):  # `evaluate` may be called in it, and a later step needs gradients
            pairs = zip(shapes, self._dtypes, strict=True)
            return tuple(torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in pairs)

    def drop_unused(self) -> None:
        """Drop the buffers of other shapes than those that were taken since the last call, if any were."""
        if not self._used:  # an evaluation takes none for gradients
            return
        self._free = {shapes: free for shapes, free in self._free.items() if shapes in self._used}
        self._used.clear()

    def release(self, tensors: tuple[Tensor, ...]) -> None:
        """Take back what `take` gave. Nothing may read it any more."""
        if self._verifies:
            overwrite(tensors)
        self._free.setdefault(tuple(tensor.shape for tensor in tensors), []).append(tensors)


class DistributedReceive:
    """A message that is being received into a buffer of a pool."""

    is_pooled = True

    def __init__(
        self,
        messages: IncomingMessages,
        values: Sequence[Value],
        shapes: Shapes,
        pool: BufferPool,
        device: torch.device,
    ) -> None:
        self._device = device
        self._messages = messages
        self._pool = pool
        self._values = values
        self._tensors = pool.take(tuple(map(shape_in_memory, values, shapes)))
        self._message = messages.receive([tensor for tensor in self._tensors if tensor.numel()])

    def ready(self) -> bool:
        return True  # no other executor of this process can make a difference

    def wait(self) -> Sequence[Tensor]:
        self._messages.wait(self._message)
        return tuple(map(from_memory, self._values, [tensor.to(self._device) for tensor in self._tensors]))

    def release(self) -> None:
        self._pool.release(self._tensors)


class DistributedTransport:
    """This rank's connections.

    Args:
        pairs: the (sender, receiver) ranks between which anything is sent at all.
        report: called at once, in a thread, with what became of a message that this rank could not send.
    """

    def __init__(self, world: World, pairs: Iterable[tuple[int, int]], report: Callable[[SendFailed], None]) -> None:
        self._device = world.device
        self._message_device = world.device if world.uses_nccl else torch.device("cpu")  # gloo sends from the host
        self._pools: dict[tuple[int, int, tuple[torch.dtype, ...]], BufferPool] = {}
        self._sends: SendQueue = NcclSends() if world.uses_nccl else GlooSends(report, world.timeout)
        self._outgoing: dict[int, OutgoingMessages] = {}  # by the receiver
        self._incoming: dict[int, IncomingMessages] = {}  # by the sender
        groups = {
            pair: world.connect(f"{pair[0]}-{pair[1]}", pair, self._message_device)
            for pair in sorted(pairs)
            if world.rank in pair
        }
        # NCCL connects at a group's first transfer, and blocks until the other side comes. Here all come in one order.
        for (sender, receiver), group in groups.items():
            byte = torch.zeros(1, dtype=torch.uint8, device=self._message_device)
            peer = receiver if sender == world.rank else sender
            with lost_connections(peer):
                (group.send if sender == world.rank else group.receive)(byte, peer).wait()
            if sender == world.rank:
                self._outgoing[peer] = OutgoingMessages(group, peer, self._sends)
            else:
                self._incoming[peer] = IncomingMessages(group, peer, self._sends)

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        pairs = zip(transfer.values, tensors, strict=True)
        sent = [in_memory(value, tensor).to(self._message_device) for value, tensor in pairs if tensor.numel()]
        self._outgoing[transfer.ranks[1]].send(sent, transfer)

    def send_numbers(self, ranks: tuple[int, int], numbers: Sequence[int]) -> None:
        """Send whole numbers to the second rank, before the messages of the call."""
        sent = torch.tensor(numbers, dtype=torch.int64, device=self._message_device)
        self._outgoing[ranks[1]].send([sent])

    def receive_numbers(self, ranks: tuple[int, int], count: int) -> list[int]:
        """Wait for the numbers that the first rank sends, and return them."""
        numbers = torch.zeros(count, dtype=torch.int64, device=self._message_device)
        messages = self._incoming[ranks[0]]
        messages.wait(messages.receive([numbers]))
        return numbers.tolist()

    def receive(self, transfer: Transfer, step_inputs: StepInputs) -> DistributedReceive:
        dtypes = tuple(map(step_inputs.dtype, transfer.values))
        message = transfer.sender, transfer.receiver, dtypes
        if message not in self._pools:
            self._pools[message] = BufferPool(dtypes, self._message_device)
        shapes = tuple(step_inputs.shape(value, transfer.microbatch) for value in transfer.values)
        incoming = self._incoming[transfer.ranks[0]]
        return DistributedReceive(incoming, transfer.values, shapes, self._pools[message], self._device)

    def start(self) -> None:
        pass  # a failure ends the connections

    def finish(self) -> None:
        self._sends.finish()
        for pool in self._pools.values():
            pool.drop_unused()

    def close(self) -> None:
        """Drop every transfer that is not done, because each keeps its connection open. The world closes the groups."""
        self._sends.drop()
        for incoming in self._incoming.values():
            incoming.drop()
