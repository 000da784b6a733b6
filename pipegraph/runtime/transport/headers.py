"""Headers: what goes before the first message of a call between two ranks, to say which call it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pipegraph.errors import RuntimeFault
from pipegraph.runtime.processes.group import ConnectionLost, Group, lost_connections
from pipegraph.runtime.transport.sends import SendQueue

_KINDS: Final = ("step", "evaluate")
_ROOM: Final = 64


@dataclass(frozen=True)
class PipelineCall:
    """The call `number` of a pipeline, a "step" or an "evaluate".

    Attributes:
        microbatches: how many were asked for.
        sizes: of the batch; −1 for one that is not known.
        rows: those of each microbatch; empty if the batch is cut evenly; None if they are not known.
        autocast: a number for the state of autocast that it is made in; 0 for none.
    """

    number: int = 0
    kind: str = "step"
    microbatches: int = 1
    sizes: tuple[int, ...] = ()
    rows: tuple[int, ...] | None = ()
    autocast: int = 0

    def header(self, device: torch.device) -> Tensor:
        """A tensor [4 + sizes + rows] that says which call this is.

        Rows have the room of a multiple of `_ROOM`, so that headers for other numbers of microbatches arrive as well.
        """
        number = self.number * len(_KINDS) + _KINDS.index(self.kind)
        cut = -1 if self.rows is None else len(self.rows)
        numbers = number, self.microbatches, self.autocast, cut, *self.sizes, *(self.rows or ())
        room = math.ceil(self.microbatches / _ROOM) * _ROOM
        header = torch.zeros(4 + len(self.sizes) + room, dtype=torch.int64, device=device)
        for index, each in enumerate(numbers):
            header[index].fill_(each)  # on the device: a copy from the host would be waited for
        return header

    def received(self, header: Tensor) -> PipelineCall:
        """The call that a header names which came for this one. Waits for a GPU."""
        first, microbatches, autocast, cut, *rest = header.tolist()
        number, kind = divmod(first, len(_KINDS))
        sizes, rows = rest[: len(self.sizes)], rest[len(self.sizes) :]
        of_each = None if cut < 0 else (*rows[:cut],)
        return PipelineCall(number, _KINDS[kind], microbatches, (*sizes,), of_each, autocast)

    def check(self, header: Tensor, peer: int) -> None:
        """Raise RuntimeFault unless the header that came from rank `peer` is that of this call. Waits for a GPU."""
        other = self.received(header)
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
        if None not in (self.rows, other.rows) and other.rows != self.rows:
            raise RuntimeFault(
                f"rank {peer} has microbatches of other rows than this rank: {_listed(other.rows)} there, "
                f"{_listed(self.rows)} here. All ranks are given the same microbatches."
            )
        if (other.number, other.kind) != (self.number, self.kind):
            raise RuntimeFault(
                f"rank {peer} is in {other}, and this rank in {self}. All ranks make the same calls of a pipeline, in "
                f"the same order: look for one that only some of them make."
            )
        if other.autocast != self.autocast:
            raise RuntimeFault(
                f"rank {peer} makes this call in another region of torch.autocast than this rank. All ranks make it in "
                "the same one, with the same dtype, or outside of any."
            )

    def __str__(self) -> str:
        return f"its call {self.number}, {self.kind}"


def _listed(rows: Sequence[int] | None) -> str:
    return str([*rows]) if rows else "cut evenly"


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
def expected(peer: int, sends: SendQueue) -> Iterator[None]:
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
        with expected(self._peer, self._sends):
            self._work.wait()
        self._call.check(self._tensor, self._peer)
        return self._call.received(self._tensor)

    def check(self, deferred: DeferredHeaders | None) -> None:
        with expected(self._peer, self._sends):
            self._work.wait()
        if deferred is None:
            self._call.check(self._tensor, self._peer)
        else:
            deferred.add(self._tensor, self._call, self._peer)
