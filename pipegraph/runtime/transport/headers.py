"""Headers: what goes before the first message of a call between two ranks, to say which call it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from pipegraph.errors import RuntimeFault
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.step_data import StepInputs

_KINDS: Final = ("step", "evaluate")
_CUT: Final = 3
"""Where a header says how many rows it lists, before the sizes."""
_ROOM: Final = 64
"""For how many rows a header has room. More of them follow it."""


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

    def header(self, device: torch.device) -> list[Tensor]:
        """What says which call this is, in tensors to send: one [4 + sizes + 64 rows], of one length in all calls, so
        that it arrives whatever call the receiver is in; and the rest of the rows, if there are more.
        """
        number = self.number * len(_KINDS) + _KINDS.index(self.kind)
        cut = -1 if self.rows is None else len(self.rows)
        numbers = number, self.microbatches, self.autocast, cut, *self.sizes, *(self.rows or ())
        first = _header_length(self)
        header = [torch.zeros(first, dtype=torch.int64, device=device)]
        if len(numbers) > first:
            header.append(torch.zeros(len(numbers) - first, dtype=torch.int64, device=device))
        for index, each in enumerate(numbers):  # on the device: a copy from the host would be waited for
            (header[0][index] if index < first else header[1][index - first]).fill_(each)
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


class OngoingCall:
    """The call that this rank is in. What is known of its batch may grow until its first message.

    Attributes:
        number: how many calls were begun with it.
    """

    def __init__(self, number: int, kind: str, given: StepInputs, autocast: int) -> None:
        self.number = number
        self._kind, self._given, self._autocast = kind, given, autocast

    def known(self) -> PipelineCall:
        """The call as far as it is known by now."""
        given = self._given
        return PipelineCall(
            self.number, self._kind, given.microbatches, given.numbers, given.known_rows, self._autocast
        )


class ExpectedHeader:
    """The header that is expected from a rank before its messages of a call. It is being received from the start."""

    def __init__(self, group: Group, peer: int, call: PipelineCall, device: torch.device) -> None:
        self._group, self._peer, self._call, self._device = group, peer, call, device
        self._parts: list[Tensor] = []
        self._works: list[dist.Work] = []
        self._receive(_header_length(call))

    def wait(self) -> PipelineCall:
        """Return the call that the peer is in. Raises RuntimeFault if it is another one than this rank's."""
        self._wait()
        self._receive(int(self._parts[0][_CUT]) - _ROOM)
        self._wait()
        header = torch.cat(self._parts)
        self._call.check(header, self._peer)
        return self._call.received(header)

    def receive_all(self) -> None:
        """Receive what follows the header of a call like this rank's, without waiting for what the header says."""
        self._receive(len(self._call.rows or ()) - _ROOM)

    def check_later(self, deferred: DeferredHeaders) -> None:
        """Let the current stream wait for the header, which is checked once it is on the host."""
        self._wait()
        deferred.add(torch.cat(self._parts), self._call, self._peer)

    def _receive(self, count: int) -> None:
        if count > 0:
            self._parts.append(torch.zeros(count, dtype=torch.int64, device=self._device))
            self._works.append(self._group.receive(self._parts[-1], self._peer))

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


def _header_length(call: PipelineCall) -> int:
    """The length of the first tensor of a header."""
    return _CUT + 1 + len(call.sizes) + _ROOM
