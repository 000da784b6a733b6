"""How far the clocks of two processes are apart, measured by the exchange of times that NTP uses (RFC 5905, section 8):

rank r   sent ──────────────▶ received        offset = answer − (sent + received) / 2
                answer                        error ≤ (received − sent) / 2
rank 0   ─────────▲─────────
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from pipegraph.runtime.processes.group import Group, lost_connections

ROUNDS: Final = 16
"""How often times are exchanged to measure a clock."""


@dataclass(frozen=True)
class ClockOffset:
    """Rank 0's clock is this rank's clock (`time.time_ns`) + `offset_ns`, to within `error_ns`, both in nanoseconds."""

    offset_ns: int = 0
    error_ns: int = 0

    def until(self, later_offset: ClockOffset) -> ClockOffset:
        """The offset between this measurement and a later one: their mean. What the clock drifted adds to the error."""
        drift = abs(later_offset.offset_ns - self.offset_ns)
        return ClockOffset(
            (self.offset_ns + later_offset.offset_ns) // 2, max(self.error_ns, later_offset.error_ns) + drift
        )


def measure_offset(group: Group, rank: int, ranks: Sequence[int], now: Callable[[], int] = time.time_ns) -> ClockOffset:
    """Measure this rank's clock against that of the first of `ranks`, by the quickest of `ROUNDS` exchanges.

    Collective: every rank of `group` must call it. The first one answers one rank after the other. `now` is the clock,
    in nanoseconds.
    """
    first, *other_ranks = ranks
    if rank == first:
        for peer in other_ranks:
            _answer(group, peer, now)
        return ClockOffset()
    return min((_ask(group, first, now) for _ in range(ROUNDS)), key=lambda offset: offset.error_ns)


def _answer(group: Group, peer: int, now: Callable[[], int]) -> None:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(peer):
        for _ in range(ROUNDS):
            group.receive(question, peer).wait()
            answer[0] = now()
            group.send(answer, peer).wait()


def _ask(group: Group, first: int, now: Callable[[], int]) -> ClockOffset:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(first):
        answered = group.receive(answer, first)
        sent = now()
        group.send(question, first).wait()
        answered.wait()
        received = now()
    return ClockOffset(int(answer) - (sent + received) // 2, (received - sent + 1) // 2)
