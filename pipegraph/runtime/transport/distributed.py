"""The transport between processes: gloo for tensors on the CPU, NCCL for those on a GPU.

Every direction of every pair of ranks that talk has a group of its own. NCCL works off the transfers of a group one
after the other: with a group per direction there is no order in which two ranks could wait for each other. And when a
rank closes its side, every rank that waits for it notices, whatever else is on its way to others.

With NCCL each group has a CUDA stream of its own, so that transfers run beside computation. A send or receive begins
when everything is done that the current stream holds at that moment: after the kernel that made the tensor, and after
the last one that read the buffer. Waiting for it makes the current stream wait, never the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from pipegraph.errors import RuntimeFault
from pipegraph.package import Value
from pipegraph.runtime.processes.faults import SendFailed
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.step_data import StepInputs
from pipegraph.runtime.transport.protocol import overwrite, verifies_releases
from pipegraph.runtime.transport.sends import GlooSends, NcclSends, PendingSend, SendQueue
from pipegraph.runtime.wiring import Transfer, torch_dtype

_KINDS: Final = ("step", "evaluate")

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PipelineCall:
    """The call `number` of a pipeline, a "step" or an "evaluate".

    Attributes:
        microbatches: how many were asked for.
        sizes: of the batch; −1 for one that is not known.
    """

    number: int = 0
    kind: str = "step"
    microbatches: int = 1
    sizes: tuple[int, ...] = ()

    def header(self, device: torch.device) -> Tensor:
        """A tensor [2 + sizes] that says which call this is."""
        number = self.number * len(_KINDS) + _KINDS.index(self.kind)
        # Filled on the device: a copy from the host would be waited for.
        return torch.stack([torch.full((), each, device=device) for each in (number, self.microbatches, *self.sizes)])

    @classmethod
    def of(cls, header: Tensor) -> PipelineCall:
        """The call that a header names. Waits for a GPU."""
        first, microbatches, *sizes = header.tolist()
        number, kind = divmod(first, len(_KINDS))
        return cls(number, _KINDS[kind], microbatches, tuple(sizes))

    def check(self, header: Tensor, peer: int) -> None:
        """Raise RuntimeFault unless the header that came from rank `peer` is that of this call. Waits for a GPU."""
        other = PipelineCall.of(header)
        sizes = zip(self.sizes, other.sizes, strict=True)
        if any(-1 not in pair and pair[0] != pair[1] for pair in sizes):
            raise RuntimeFault(
                f"rank {peer} takes a batch of the sizes {list(other.sizes)}, and this rank one of {list(self.sizes)}. "
                "All ranks take the same batch."
            )
        if other.microbatches != self.microbatches:
            raise RuntimeFault(
                f"rank {peer} was asked for {other.microbatches} microbatches, and this rank for {self.microbatches}. "
                "All ranks are asked for the same number."
            )
        if (other.number, other.kind) != (self.number, self.kind):
            raise RuntimeFault(
                f"rank {peer} is in {other}, and this rank in {self}. All ranks make the same calls of a pipeline, in "
                f"the same order: look for one that only some of them make."
            )

    def __str__(self) -> str:
        return f"its call {self.number}, {self.kind}"


class DeferredHeaders:
    """Headers on a GPU, each checked once it has reached the host by itself, so that nothing waits for it."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, torch.cuda.Event, PipelineCall, int]] = deque()

    def add(self, header: Tensor, call: PipelineCall, peer: int) -> None:
        """Copy a header that the current stream has received. A later `check` compares it with `call`."""
        copy = torch.empty_like(header, device="cpu", pin_memory=True).copy_(header, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append((copy, event, call, peer))

    def check(self) -> None:
        """Raise RuntimeFault if a header that has arrived by now is wrong."""
        while self._copies and self._copies[0][1].query():
            copy, _, call, peer = self._copies.popleft()
            call.check(copy, peer)


@contextmanager
def _expected(peer: int, sends: SendQueue) -> Iterator[None]:
    """A context in which a message of `peer` is waited for. It raises what a message of this rank failed for, if that
    ended the wait."""
    try:
        with lost_connections(peer):
            yield
    except ConnectionLost:
        sends.check()
        raise


class ReceivedHeader:
    """The header that is expected before a message, and the call that it must name. On a GPU it is checked later."""

    def __init__(self, group: Group, peer: int, call: PipelineCall, device: torch.device, sends: SendQueue) -> None:
        self._peer, self._call, self._sends = peer, call, sends
        self._tensor = call.header(device)
        self._work = group.receive(self._tensor, peer)

    def wait(self) -> PipelineCall:
        """The call that the peer is in."""
        with _expected(self._peer, self._sends):
            self._work.wait()
        self._call.check(self._tensor, self._peer)
        return PipelineCall.of(self._tensor)

    def check(self, deferred: DeferredHeaders | None) -> None:
        with _expected(self._peer, self._sends):
            self._work.wait()
        if deferred is None:
            self._call.check(self._tensor, self._peer)
        else:
            deferred.add(self._tensor, self._call, self._peer)


class BufferPool:
    """Buffers for the messages of one direction of one edge, each with room for all `values` of a message.

    take ─▶ a message is written ─▶ actions read it ─▶ release ─▶ taken again
                                                  └──▶ or never released, if something that left the executor shares it

    Buffers of shapes that a step has not used are dropped at the end of it.

    A buffer belongs to whoever took it until it is released, so that there are as many as the schedule holds messages
    at one time. One that is not released is never used again, and its memory lives as long as its tensors.

    On a GPU a released buffer may still be read by kernels that are enqueued. That is safe: a receive into it begins
    when everything is done that the current stream holds at that moment.
    """

    def __init__(self, values: Sequence[Value], device: torch.device) -> None:
        self._dtypes = list(map(torch_dtype, values))
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
    """A message that is being received into a buffer of its pool. It is `unfinished` until it has been waited for."""

    is_pooled = True

    def __init__(
        self,
        group: Group,
        peer: int,
        pool: BufferPool,
        shapes: Shapes,
        header: ReceivedHeader | None,
        deferred: DeferredHeaders | None,
        unfinished: set[DistributedReceive],
        sends: SendQueue,
    ) -> None:
        self._peer = peer
        self._sends = sends
        self._pool = pool
        self._header = header
        self._deferred = deferred
        self._tensors = pool.take(shapes)
        self._works = [group.receive(tensor, peer) for tensor in self._tensors if tensor.numel()]
        self._unfinished = unfinished
        unfinished.add(self)

    def ready(self) -> bool:
        return True  # no other executor of this process can make a difference

    def wait(self) -> Sequence[Tensor]:
        if self._header is not None:
            self._header.check(self._deferred)  # before the rest, which might never come
        with _expected(self._peer, self._sends):
            for work in self._works:
                work.wait()
        self.drop()
        return self._tensors

    def drop(self) -> None:
        """Let go of the connection."""
        self._header = None
        self._works.clear()
        self._unfinished.discard(self)

    def release(self) -> None:
        self._pool.release(self._tensors)


class DistributedTransport:
    """This rank's connections.

    Args:
        pairs: the (sender, receiver) ranks between which anything is sent at all.
        report: is told at once, in a thread, of a message that this rank could not send.
    """

    def __init__(self, world: World, pairs: Iterable[tuple[int, int]], report: Callable[[SendFailed], None]) -> None:
        self._device = world.device
        self._pools: dict[tuple[int, int], BufferPool] = {}
        self._unfinished: set[DistributedReceive] = set()
        self._call = PipelineCall()
        self._given: StepInputs | None = None
        self._headed: set[tuple[int, int]] = set()
        is_gpu = world.device.type == "cuda"
        self._deferred = DeferredHeaders() if is_gpu else None
        self._sends: SendQueue = NcclSends() if is_gpu else GlooSends(report, world.timeout)
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
            call = replace(self._call, sizes=self._given.numbers) if self._given is not None else self._call
            sent.insert(0, call.header(self._device))
        self._sends.add(PendingSend(self._groups[transfer.ranks], transfer.ranks[1], sent, transfer))

    def learn(self, ranks: tuple[int, int], given: StepInputs) -> None:
        call = replace(self._call, sizes=given.numbers)
        header = ReceivedHeader(self._groups[ranks], ranks[0], call, self._device, self._sends)
        self._headed.add(ranks)
        given.learn_numbers(header.wait().sizes)

    def receive(self, transfer: Transfer, given: StepInputs) -> DistributedReceive:
        stages = transfer.sender, transfer.receiver
        if stages not in self._pools:
            self._pools[stages] = BufferPool(transfer.values, self._device)
        group, peer = self._groups[transfer.ranks], transfer.ranks[0]
        call = replace(self._call, sizes=given.numbers)
        is_first = self._is_first(transfer)
        header = ReceivedHeader(group, peer, call, self._device, self._sends) if is_first else None
        shapes = tuple(given.shape(value, transfer.microbatch) for value in transfer.values)
        pool = self._pools[stages]
        return DistributedReceive(group, peer, pool, shapes, header, self._deferred, self._unfinished, self._sends)

    def start(self, kind: str, given: StepInputs) -> None:
        if self._deferred is not None:
            self._deferred.check()
        self._call, self._given = PipelineCall(self._call.number + 1, kind, given.microbatches), given
        self._headed.clear()

    def finish(self) -> None:
        self._sends.finish()
        self._given = None
        for pool in self._pools.values():
            pool.drop_unused()

    def close(self) -> None:
        """Drop every transfer that is not done, because each keeps its connection open. The world closes the groups."""
        self._sends.drop()
        for receive in tuple(self._unfinished):
            receive.drop()

    def _is_first(self, transfer: Transfer) -> bool:
        """Whether this is the first message of the call from its sender to its receiver."""
        first = transfer.ranks not in self._headed
        self._headed.add(transfer.ranks)
        return first
