"""How far the clocks of two processes are apart: the exchange of times that NTP makes (RFC 5905, section 8).

rank r   sent ──────────────▶ received        offset = told − (sent + received) / 2
                 told                         error ≤ (received − sent) / 2
rank 0   ─────────▲─────────
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from pipegraph.runtime.processes.group import Group, lost_connections

ROUNDS: Final = 16


@dataclass(frozen=True)
class Clock:
    """Rank 0's clock is this rank's clock (`time.time_ns`) + `offset_ns`, by `error_ns` at most; both nanoseconds."""

    offset_ns: int = 0
    error_ns: int = 0

    def until(self, later: Clock) -> Clock:
        """For the time between this measurement and a later one: the mean, where what it drifted adds to the error."""
        drift = abs(later.offset_ns - self.offset_ns)
        return Clock((self.offset_ns + later.offset_ns) // 2, max(self.error_ns, later.error_ns) + drift)


def measure(group: Group, rank: int, size: int, now: Callable[[], int] = time.time_ns) -> Clock:
    """This rank's clock against rank 0's, by the quickest of several exchanges. All ranks of `group` call this.

    `now` is the clock in nanoseconds. A rank waits until rank 0 has answered those before it.
    """
    if rank == 0:
        for other in range(1, size):
            _answer(group, other, now)
        return Clock()
    return min((_ask(group, now) for _ in range(ROUNDS)), key=lambda clock: clock.error_ns)


def _answer(group: Group, other: int, now: Callable[[], int]) -> None:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(other):
        for _ in range(ROUNDS):
            group.receive(question, other).wait()
            answer[0] = now()
            group.send(answer, other).wait()


def _ask(group: Group, now: Callable[[], int]) -> Clock:
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with lost_connections(0):
        answered = group.receive(answer, 0)
        sent = now()
        group.send(question, 0).wait()
        answered.wait()
        received = now()
    return Clock(int(answer) - (sent + received) // 2, (received - sent + 1) // 2)
