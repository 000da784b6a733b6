"""The events of a process, each given to the rank that it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from pipegraph.tracing.repair import STEP, Event


def by_rank(events: Sequence[Event], ranks: Sequence[int]) -> dict[int, list[Event]]:
    """The events of every rank that this process runs, which take turns in it.

    A rank's are those that lie in one of its actions, and what a GPU did for them. Those of the whole process, such as
    its name and the steps, are given to every rank; and what lies in no action, such as the optimizer, to the first.
    """
    if len(ranks) == 1:
        return {ranks[0]: list(events)}
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(event["args"]["rank"]))
        for event in events
        if event.get("cat") == "user_annotation" and _is_action(event)
    )
    starts = [start for start, _, _ in spans]

    def within(event: Event) -> int | None:
        index = bisect_right(starts, float(event.get("ts", 0))) - 1
        if index < 0 or float(event["ts"]) > spans[index][1]:
            return None
        return spans[index][2]

    launched = {_correlation(event): within(event) for event in events if event.get("cat") == "runtime"}
    found: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in events:
        if _is_of_all(event):
            for each in found.values():
                each.append(event)
            continue
        if _is_action(event):
            rank = event["args"]["rank"]
        elif _correlation(event) is not None:
            rank = launched.get(_correlation(event))
        else:
            rank = within(event)
        found[ranks[0] if rank is None else rank].append(event)
    return found


def _is_action(event: Event) -> bool:
    return "microbatch" in event.get("args", {}) and "rank" in event["args"]


def _is_of_all(event: Event) -> bool:
    return event.get("ph") in ("M", "i") or event.get("cat") == "Trace" or event["name"].startswith(STEP)


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
