"""The transport between processes: gloo for tensors on the CPU, NCCL for those on a GPU.

Every direction of every pair of ranks that talk has a group of its own. So NCCL, which works off the transfers of a
group one after the other, has no order in which two ranks could wait for each other; and a rank that closes its side is
noticed by all that wait for it, whatever else is still on its way to others.

With NCCL each group has a CUDA stream of its own, so that transfers run beside computation. A send or receive begins
when what the current stream holds at that moment is done: behind the kernel that made the tensor, and behind the last
one that read the buffer. Waiting for it makes the current stream wait, never the host.

The first message of a step in each direction is headed by the step that it belongs to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipegraph.runtime.processes.group import Group, lost_connections
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.transport.buffer_pool import Buffers
from pipegraph.runtime.transport.call_agreement import Call, LateChecks
from pipegraph.runtime.transport.sends import AwaitedSends, PolledSends, Sending, Sends
from pipegraph.runtime.wiring import Transfer


@dataclass(frozen=True)
class Head:
    """What heads a message that is to come, and the call that it should name. On a GPU that is looked at `late`."""

    tensor: Tensor
    call: Call
    late: LateChecks | None

    def check(self, peer: int) -> None:
        if self.late is None:
            self.call.check(self.tensor, peer)
        else:
            self.late.add(self.tensor, self.call, peer)


class DistributedReceive:
    """Buffers that are being filled. It stands among `unfinished` until it has been waited for."""

    def __init__(
        self,
        group: Group,
        peer: int,
        tensors: Sequence[Tensor],
        head: Head | None,
        unfinished: set[DistributedReceive],
    ) -> None:
        self._peer = peer
        self._tensors = tensors
        self._head = head
        self._head_work = None if head is None else group.receive(head.tensor, peer)
        self._works = [group.receive(tensor, peer) for tensor in tensors if tensor.numel()]
        self._unfinished = unfinished
        unfinished.add(self)

    def ready(self) -> bool:
        return True  # nothing else in this process could make it so

    def wait(self) -> Sequence[Tensor]:
        if self._head is not None and self._head_work is not None:
            with lost_connections(self._peer):
                self._head_work.wait()
            self._head.check(self._peer)  # before the rest, which might never come
        with lost_connections(self._peer):
            for work in self._works:
                work.wait()
        self.drop()
        return self._tensors

    def drop(self) -> None:
        self._head_work = None
        self._works.clear()
        self._unfinished.discard(self)


class DistributedTransport:
    """This rank's connections.

    `pairs` are the (sender, receiver) ranks between which anything is sent at all; `buffers` how many messages are
    held at one time, at most, of what a stage receives from another: by (from stage, to stage).
    """

    def __init__(self, world: World, pairs: Iterable[tuple[int, int]], buffers: Mapping[tuple[int, int], int]) -> None:
        self._device = world.device
        self._most = buffers
        self._buffers: dict[tuple[int, int], list[Buffers]] = {}
        self._unfinished: set[DistributedReceive] = set()
        self._call = Call()
        self._headed: set[tuple[int, int]] = set()
        self._late = LateChecks() if world.device.type == "cuda" else None
        self._sends: Sends = PolledSends() if world.device.type == "cuda" else AwaitedSends()
        self._groups = {
            pair: world.connect(f"{pair[0]}-{pair[1]}", pair) for pair in sorted(pairs) if world.rank in pair
        }
        # NCCL connects at a group's first transfer, and blocks until the other side comes. Here all come in one order.
        for (sender, receiver), group in self._groups.items():
            byte = torch.zeros(1, dtype=torch.uint8, device=world.device)
            peer = receiver if sender == world.rank else sender
            with lost_connections(peer):
                (group.send if sender == world.rank else group.receive)(byte, peer).wait()

    def send(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        sent = [tensor.contiguous() for tensor in tensors if tensor.numel()]
        if self._is_first(transfer):
            sent.insert(0, self._call.head(self._device))
        self._sends.add(Sending(self._groups[transfer.ranks], transfer.ranks[1], sent, transfer))

    def receive(self, transfer: Transfer) -> DistributedReceive:
        stages = transfer.sender, transfer.receiver
        if stages not in self._buffers:
            most = self._most.get(stages, 1)
            self._buffers[stages] = [Buffers(value, self._device, most) for value in transfer.values]
        tensors = [buffers.take() for buffers in self._buffers[stages]]
        head = Head(self._call.head(self._device), self._call, self._late) if self._is_first(transfer) else None
        return DistributedReceive(self._groups[transfer.ranks], transfer.ranks[0], tensors, head, self._unfinished)

    def start(self, kind: str) -> None:
        if self._late is not None:
            self._late.check()
        self._call = self._call.next(kind)
        self._headed.clear()

    def finish(self) -> None:
        self._sends.finish()

    def _is_first(self, transfer: Transfer) -> bool:
        """Whether this is the first message of the call from its sender to its receiver."""
        first = transfer.ranks not in self._headed
        self._headed.add(transfer.ranks)
        return first

    def close(self) -> None:
        """Let go of every transfer that is not done, as each keeps its connection open. The groups are the world's."""
        self._sends.drop()
        for receive in tuple(self._unfinished):
            receive.drop()
