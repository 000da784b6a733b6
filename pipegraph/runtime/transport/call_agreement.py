"""The check that ranks make the same calls. Ranks that make different ones would take each other's messages for theirs.

The first message of a call between two ranks begins with a header: the number of the call. That costs one small
message per pair of ranks and call, which travels with the others and needs no answer.
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
class PipelineCall:
    """The call `number` of a pipeline, a "step" or an "eval"."""

    number: int = 0
    kind: str = "step"

    def next(self, kind: str) -> PipelineCall:
        return PipelineCall(self.number + 1, kind)

    def header(self, device: torch.device) -> Tensor:
        """A tensor [1] that says which call this is."""
        number = self.number * len(_KINDS) + _KINDS.index(self.kind)
        return torch.full((1,), number, device=device)  # filled on the device: a copy from the host would be waited for

    def check(self, header: Tensor, peer: int) -> None:
        """Raise RuntimeFault unless the header that came from rank `peer` is that of this call. Waits for a GPU."""
        number, kind = divmod(int(header), len(_KINDS))
        if (other := PipelineCall(number, _KINDS[kind])) != self:
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
