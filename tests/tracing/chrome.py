"""A strict reader of the Chrome trace format: what Perfetto would complain of, or silently drop, is an error here."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]


def read_strictly(file: Path) -> dict[str, Any]:
    """The trace. AssertionError where an event is malformed, slices of a thread do not nest, or a flow lacks an end or
    does not stand in a slice there."""
    data = file.read_bytes()
    trace = json.loads(gzip.decompress(data) if file.suffix == ".gz" else data)
    assert isinstance(trace, dict) and isinstance(trace["traceEvents"], list)
    slices: dict[Thread, list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, dict[str, Event]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        assert event["ph"] in "XMsf", event
        assert isinstance(event["name"], str) and type(event["pid"]) is type(event["tid"]) is int, event
        assert event["ts"] >= 0, event
        thread = (event["pid"], event["tid"])
        if event["ph"] == "X":
            assert event["cat"] and event["dur"] >= 0, event
            start = round(event["ts"] * 1000)
            slices[thread].append((start, start + round(event["dur"] * 1000)))
        elif event["ph"] in "sf":
            assert event["ph"] not in flows[event["id"]], f"flow {event['id']} has two ends of a kind"
            flows[event["id"]][event["ph"]] = event
    for thread, intervals in slices.items():
        _nest(thread, intervals)
    for number, ends in flows.items():
        assert set(ends) == {"s", "f"}, f"flow {number} has one end"
        assert ends["f"]["bp"] == "e"
        for end in ends.values():
            at = round(end["ts"] * 1000)
            around = slices[end["pid"], end["tid"]]
            assert any(start <= at < max(until, start + 1) for start, until in around), (
                f"flow {number} ends in no slice"
            )
    return trace


def _nest(thread: Thread, slices: list[tuple[int, int]]) -> None:
    assert [start for start, _ in slices] == sorted(start for start, _ in slices), f"{thread}: not in order"
    around: list[tuple[int, int]] = []
    for start, end in sorted(slices, key=lambda interval: (interval[0], -interval[1])):
        while around and around[-1][1] <= start:
            around.pop()
        assert not around or end <= around[-1][1], f"{thread}: {start} to {end} crosses {around[-1]}"
        around.append((start, end))


def slices(trace: dict[str, Any], process: int, thread: int) -> list[Event]:
    """The complete events of a thread."""
    events = trace["traceEvents"]
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (process, thread)]
