"""Which call a rank is in. Ranks that make different ones would take each other's messages for their own.

So the first message of a call that goes from one rank to another is headed by a number that says which call it is. It
costs one small message for each pair of ranks and step, on the way of the others, and no answer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from pipegraph.errors import RuntimeFault

_KINDS: Final = ("step", "eval")


@dataclass(frozen=True)
class Call:
    """The call `number` of a pipeline, a "step" or an "eval"."""

    number: int = 0
    kind: str = "step"

    def next(self, kind: str) -> Call:
        return Call(self.number + 1, kind)

    def head(self, device: torch.device) -> Tensor:
        number = self.number * len(_KINDS) + _KINDS.index(self.kind)
        return torch.full((1,), number, device=device)  # filled there: a copy from the host would be waited for

    def check(self, head: Tensor, peer: int) -> None:
        """Raise RuntimeFault unless the head that came from rank `peer` is that of this call. Waits for a GPU."""
        number, kind = divmod(int(head), len(_KINDS))
        if (other := Call(number, _KINDS[kind])) != self:
            raise RuntimeFault(
                f"rank {peer} is in {other}, and this rank in {self}. All ranks make the same calls of a pipeline, in "
                f"the same order: look for one that only some of them make."
            )

    def __str__(self) -> str:
        return f"its call {self.number}, {self.kind}"


class LateChecks:
    """Heads that came to a GPU, checked when they are on the host by themselves: nothing waits for them."""

    def __init__(self) -> None:
        self._copies: deque[tuple[Tensor, torch.cuda.Event, Call, int]] = deque()

    def add(self, head: Tensor, call: Call, peer: int) -> None:
        """Check a head that the current stream has received, in time."""
        copy = torch.empty_like(head, device="cpu", pin_memory=True).copy_(head, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._copies.append((copy, event, call, peer))

    def check(self) -> None:
        """Raise RuntimeFault if one of those that have arrived is wrong."""
        while self._copies and self._copies[0][1].query():
            copy, _, call, peer = self._copies.popleft()
            call.check(copy, peer)
