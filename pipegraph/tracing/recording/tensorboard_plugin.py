"""A trace of torch.profiler, made such that everyone can read it who has to: torch-tb-profiler 0.4.3, Perfetto, and us.

What the plugin needs, by its source (`profiler/trace.py`, `profiler/event_parser.py`, `profiler/loader.py`):
- It lists under Operator what has the category `cpu_op`, and knows no annotation of a user's. So every action stands
  there twice, once under each category; the copy keeps the `External id`, by which GPU time is put down to it.
- It asks every complete event for its category, and every event for its name: one without ends the worker's page.
- It finds the kernels that a call launched by the category `runtime`, which torch calls `cuda_runtime` or
  `cuda_driver`.
- It counts the steps of a GPU's annotations as further steps. They get a category that it does not know.
- Its Distributed view needs equally many collectives on every worker, all of NCCL or all of gloo. Collectives that only
  some of the ranks make (a tied weight's) get another name: see `comparable`.

What Chrome's format needs: events of one thread nest. Receives that are posted ahead do not; they become async events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from pipegraph.schedule import Action
from pipegraph.tracing.action_names import parse_action_name

Event = dict[str, Any]
STEP: Final = "ProfilerStep#"
MARK: Final = "loss of all ranks"
"""The span of the one collective that every rank makes in every step that is recorded."""

LIBRARIES: Final = "nccl", "gloo"
_COLLECTIVES = frozenset(
    f"{library}:{name}"
    for library in LIBRARIES
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
)
_RUNTIME = {"cuda_runtime": "runtime", "cuda_driver": "runtime"}
_POSTED = "gloo:send", "gloo:recv"
_ANNOTATIONS = "user_annotation", "gpu_user_annotation"


class Steps:
    """The steps of a trace: `ProfilerStep#5` and its time, in microseconds."""

    def __init__(self, events: Sequence[Event]) -> None:
        found = [
            (float(event["ts"]), int(event["name"].removeprefix(STEP)))
            for event in events
            if event.get("cat") == "user_annotation" and event.get("name", "").startswith(STEP)
        ]
        self._starts, self._numbers = map(list, zip(*sorted(found), strict=True)) if found else ([], [])

    def at(self, time: float) -> int | None:
        """The step that had begun last, at a time."""
        index = bisect_right(self._starts, time)
        return self._numbers[index - 1] if index else None

    def start(self, number: int) -> float:
        """Infinity for one that has not begun."""
        return self._starts[self._numbers.index(number)] if number in self._numbers else float("inf")


def until(events: Sequence[Event], step: int) -> list[Event]:
    """The events of the steps up to this one. What torch had begun behind it is left out."""
    end = Steps(events).start(step + 1)
    return [event for event in events if event.get("ph") == "M" or float(event.get("ts", 0)) < end]


def repaired(events: Sequence[Event], arguments: Callable[[Action], Mapping[str, Any]]) -> list[Event]:
    """The events of a process as everyone can read them.

    `arguments` are what is said of an action beside its step: its stage, kind, microbatch, rank, and of a transfer the
    peer and the bytes.
    """
    steps = Steps(events)
    return [made for event in events for made in _repaired(event, arguments, steps)]


def _repaired(event: Event, arguments: Callable[[Action], Mapping[str, Any]], steps: Steps) -> Iterator[Event]:
    event = {"name": "unnamed", **event}
    if event.get("ph") != "X":
        yield event
        return
    category = event.setdefault("cat", "uncategorized")
    event["cat"] = _RUNTIME.get(category, category)
    if category == "gpu_user_annotation" and event["name"].startswith(STEP):
        event["cat"] = "gpu_step"
    action = parse_action_name(event["name"]) if category in _ANNOTATIONS else None
    if action is not None:
        event["args"] = {**event.get("args", {}), **arguments(action), "step": steps.at(float(event["ts"]))}
        yield event
        if category == "user_annotation":
            yield {**event, "cat": "cpu_op"}
    elif event["name"] in _POSTED:
        yield from _as_async(event)
    else:
        yield event


def _as_async(event: Event) -> Iterator[Event]:
    begin = {key: value for key, value in event.items() if key != "dur"}
    begin |= {"ph": "b", "id": f"{event['pid']}.{event.get('args', {}).get('External id')}"}
    yield begin
    yield {**begin, "ph": "e", "ts": round(float(event["ts"]) + float(event["dur"]), 3)}


def collectives(events: Sequence[Event]) -> list[int]:
    """How many collectives there are of each of `LIBRARIES`."""
    names = [event["name"] for event in events if _is_collective(event)]
    return [sum(name.startswith(library) for name in names) for library in LIBRARIES]


def comparable(events: Sequence[Event], counts: Sequence[Sequence[float]]) -> list[Event]:
    """The events, such that all processes show the plugin equally many collectives, of one library.

    `counts` are the `collectives` of every process. Of the first library that all of them used equally often, all
    remain; where there is none, those that mark the steps. What does not remain gets another name.
    """
    by_library = zip(LIBRARIES, zip(*counts, strict=True), strict=True)
    kept = next((library for library, each in by_library if len(set(each)) == 1 and each[0]), None)
    marks = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e["name"] == MARK]

    def remains(event: Event) -> bool:
        if kept is not None:
            return bool(event["name"].startswith(kept))
        return any(start <= float(event["ts"]) <= end for start, end in marks)

    return [
        {**event, "name": f"{event['name']} of some ranks"} if _is_collective(event) and not remains(event) else event
        for event in events
    ]


def _is_collective(event: Event) -> bool:
    return event.get("ph") == "X" and event["name"] in _COLLECTIVES


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
