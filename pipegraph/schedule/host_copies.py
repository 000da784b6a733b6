"""The copies of a rank to the memory of its host and back, in simulated time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.offload_windows import offload_windows

_Key = tuple[int, int]  # stage, microbatch


class HostCopies:
    """When a rank waits for copies. Those in one direction come one after the other; those in the other, beside them.

    A copy out starts when its F has ended, and the action behind that F ends when it is done; a copy in starts when the
    action before its I or B begins, and that one waits for it. Calls come in the order of the rank's work.
    """

    def __init__(self, actions: Sequence[Action], seconds: Sequence[float]) -> None:
        """``seconds`` are those of a copy of a microbatch of each stage; 0 where nothing is offloaded."""
        self._seconds, self._position = seconds, 0
        self._out_free = self._in_free = 0.0
        self._leaving: set[_Key] = set()
        self._departures: dict[int, list[_Key]] = defaultdict(list)
        self._come: dict[int, list[_Key]] = defaultdict(list)
        self._copied: dict[_Key, float] = {}
        self._arrived: dict[_Key, float] = {}
        for window in offload_windows(actions):
            if seconds[window.stage]:
                key = window.stage, window.microbatch
                self._leaving.add(key)
                self._departures[window.departure].append(key)
                self._come[window.back].append(key)

    def begin(self, action: Action, start: float) -> float:
        """Return when an action begins that could at ``start``."""
        if action.kind in (Kind.I, Kind.B):
            start = max(start, self._arrived.pop((action.stage, action.microbatch), start))
        for key in self._come.get(self._position, ()):
            begin = max(start, self._in_free, self._copied.pop(key))
            self._in_free = self._arrived[key] = begin + self._seconds[key[0]]
        return start

    def end(self, action: Action, end: float) -> float:
        """Return when the rank continues after an action that took until ``end``."""
        for key in self._departures.get(self._position, ()):
            end = max(end, self._copied[key])
        key = action.stage, action.microbatch
        if action.kind is Kind.F and key in self._leaving:
            self._out_free = self._copied[key] = max(end, self._out_free) + self._seconds[action.stage]
        self._position += 1
        return end
