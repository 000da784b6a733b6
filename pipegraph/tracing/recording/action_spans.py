"""Spans of actions and collectives in a trace of torch's profiler, and the arguments of their events.

main thread   │ F stage 1 microbatch 0 │ UNSHARD stage 0 │ B stage 1 microbatch 0 │      UNSHARD is started
collectives                             │ UNSHARD stage 0      │                         … and done
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.profiler import record_function

from pipegraph.runtime.measurements import Message
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.wiring import stage_wirings, torch_dtype, transfer_of
from pipegraph.schedule import Action, Collective
from pipegraph.tracing import COLLECTIVE_EVENT, action_name, collective_name

_LANE: Final = 10**9
"""The thread of a process in which a trace shows its collectives: beyond those of the system."""


class ActionSpans:
    """An observer that opens a span in torch's profiler when an action begins, and closes it when the action ends.

    Collectives have spans of the profiler's own while they are started; on a GPU that shows when they ran. On a CPU
    their times are kept, for events in a lane of their own.

    Attributes:
        messages: of each collective, by its text, what was sent for it the last time.
    """

    def __init__(self, device: torch.device) -> None:
        self._open: dict[int, record_function] = {}
        self._keeps = device.type != "cuda"
        self._collectives: list[tuple[Collective, float, float, int]] = []
        self.messages: dict[str, Sequence[Message]] = {}

    def begin(self, rank: int, action: Action) -> None:
        self._open[rank] = span = record_function(action_name(action))
        span.__enter__()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self._open.pop(rank).__exit__(None, None, None)

    def collective(self, rank: int, collective: Collective, begin: Any, end: Any, messages: Sequence[Message]) -> None:
        self.messages[str(collective)] = messages
        if self._keeps:
            self._collectives.append((collective, begin, end, sum(message.size for message in messages)))

    def close(self) -> None:
        """Close the spans of actions that failed."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def take_collectives(self, base: int | None) -> Iterator[dict[str, Any]]:
        """Give away the events of the collectives that were seen, with their lane.

        Args:
            base: from when the trace's times count, in nanoseconds.
        """
        collectives, self._collectives = self._collectives, []
        if not collectives:
            return
        shift = _ahead_of_perf_counter() - (base or 0)
        place = {"pid": os.getpid(), "tid": _LANE}
        for name, value in (("thread_name", {"name": "collectives"}), ("thread_sort_index", {"sort_index": _LANE})):
            yield {"ph": "M", "name": name, "ts": 0, **place, "args": value}
        for collective, begin, end, size in collectives:
            yield {
                "ph": "X",
                "cat": COLLECTIVE_EVENT,
                "name": collective_name(collective),
                **place,
                "ts": (round(begin * 1e9) + shift) / 1000,
                "dur": (end - begin) * 1e6,
                "args": {"bytes": size},
            }


def _ahead_of_perf_counter() -> int:
    """Return how far `time.time_ns` is ahead of `time.perf_counter_ns`, by the quickest of a few readings.

    One figure serves all spans of a window: a process that is interrupted between two readings would otherwise change
    the order of spans.
    """
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(9)]
    start, now, end = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (start + end) // 2


def action_arguments(pipe: Pipeline) -> Callable[[Action | Collective], dict[str, Any]]:
    """Return what gives the arguments of the event of an action or a collective in a trace.

    They are `stage`, `kind` and `rank`, by its number in the mesh; of an action also `microbatch`; of a transfer also
    `peer` (the stage at its other end), `peer_rank` and `bytes`, which are those of the sizes at capture.
    """
    manifest, placement = pipe.package.manifest, [pipe.mesh_ranks[rank] for rank in pipe.schedule.placement]
    wiring, sizes = stage_wirings(manifest), manifest.captured_sizes

    @cache
    def arguments(action: Action | Collective) -> dict[str, Any]:
        stage = action.stage
        event_arguments: dict[str, Any] = {"stage": stage, "kind": action.kind.value, "rank": placement[stage]}
        if isinstance(action, Collective):
            return event_arguments
        event_arguments["microbatch"] = action.microbatch
        if action.peer is not None:
            values = transfer_of(action, wiring, placement).values
            size = sum(math.prod(value.shape_at(sizes)) * torch_dtype(value).itemsize for value in values)
            event_arguments |= {"peer": action.peer, "peer_rank": placement[action.peer], "bytes": size}
        return event_arguments

    return arguments
