"""The times of a step's collectives, for observers: from gloo on a CPU, from events of a separate stream on a GPU.

UNSHARD   started ─ … ─ its last message has come ─┐
                        REDUCE_GRAD    started, waits │ ─ … ─ its last message has come
lane      │ 0UNSHARD                               │ 0REDUCE_GRAD               │
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.distributed import Work

from pipegraph.collectives import CompositeWork
from pipegraph.runtime.measurements import CollectiveObserver, Message
from pipegraph.schedule import Collective

Sent = tuple[Work | CompositeWork, Message]
"""A message that is under way."""


@dataclass
class _Started:
    """A collective that was started, and the times at which its messages arrived."""

    collective: Collective
    begin: Any
    sent: list[Sent]
    arrivals: list[float] = field(default_factory=list)
    end: Any = None


class CollectiveTimer:
    """Takes the times of a rank's collectives in one step."""

    def __init__(self, rank: int, device: torch.device, observer: CollectiveObserver) -> None:
        self._rank, self._observer = rank, observer
        self._started: list[_Started] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def timed(self, collective: Collective) -> Iterator[list[Sent]]:
        """A context in which a collective is started. The caller puts its messages into the list."""
        started = _Started(collective, self._now(), [])
        yield started.sent
        self._started.append(started)
        if self._stream is not None:
            with torch.cuda.stream(self._stream):  # which alone waits for them
                for work, _ in started.sent:
                    work.wait()
            started.end = self._now()
        for work, _ in started.sent if self._stream is None else ():
            work.get_future().add_done_callback(partial(_note_arrival, started))
        if not started.sent:
            started.end = self._now()

    def report(self) -> None:
        """Tell the observer. Every message has come by now."""
        now = time.perf_counter()
        last = -float("inf")
        for span in self._started:
            begin, end = span.begin, span.end
            if self._stream is None:
                if end is None:  # a callback may come a moment after what waits for the message
                    end = max(span.arrivals) if len(span.arrivals) == len(span.sent) else now
                begin, end = max(begin, last), max(end, last)
                last = end
            self._observer.collective(self._rank, span.collective, begin, end, [message for _, message in span.sent])

    def _now(self) -> Any:
        """Return the CPU's time in seconds; on a GPU, an event of the stream after all work launched so far."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        event.record(self._stream)
        return event


def _note_arrival(started: _Started, _: object) -> None:
    started.arrivals.append(time.perf_counter())
