"""The observer that lets torch's profiler record every action under its label."""

from __future__ import annotations

from typing import Any

from torch.profiler import record_function

from pipegraph.schedule import Action
from pipegraph.tracing.labels import label


class Spans:
    """Opens a span in torch's profiler where an action begins, and closes it where it ends."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}

    def begin(self, rank: int, action: Action) -> None:
        self._open[rank] = span = record_function(label(action))
        span.__enter__()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self._open.pop(rank).__exit__(None, None, None)

    def close(self) -> None:
        """End what an action has left open that failed."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)
