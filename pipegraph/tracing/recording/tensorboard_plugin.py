"""The support of torch-tb-profiler: changes to a trace of torch.profiler that its plugin for TensorBoard needs.

What torch-tb-profiler 0.4.3 does (`profiler/trace.py`, `profiler/event_parser.py`, `profiler/loader.py`), and the
change that follows:
- It lists events of the category `cpu_op` as operators, and no annotation of a user. Every action is written twice,
  once under each category; the copy keeps the `External id`, by which the plugin assigns GPU time to it.
- It reads the category of every complete event and the name of every event, and fails without. Both are filled in.
- It finds the kernels that a call launched by the category `runtime`; torch writes `cuda_runtime` or `cuda_driver`.
- It counts the steps of a GPU's annotations as further steps. They get a category that it does not know.
- Its Distributed view needs equally many collectives on every worker, all of NCCL or all of gloo. Collectives that only
  some of the ranks make (a tied weight's) get another name (`match_collectives`).

Chrome's format needs events of one thread to nest. Receives that are posted ahead do not, nor do the messages of
collectives that a schedule has; they become async events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from pipegraph.schedule import Action, Collective
from pipegraph.tracing import COLLECTIVE_EVENT, parse_action_name, parse_collective_name

Event = dict[str, Any]
LOSS_SPAN: Final = "loss of all ranks"
"""The name of the span around the one collective that every rank makes in every recorded step."""

_STEP = "ProfilerStep#"
LIBRARIES: Final = "nccl", "gloo"
_COLLECTIVES = frozenset(
    f"{library}:{name}"
    for library in LIBRARIES
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter")
)
_RUNTIME = {"cuda_runtime": "runtime", "cuda_driver": "runtime"}
_POSTED = "gloo:send", "gloo:recv"
_HOST: Final = "user_annotation"
_ANNOTATIONS = _HOST, "gpu_user_annotation"
_OF_COLLECTIVES = COLLECTIVE_EVENT, "gpu_user_annotation"


class _StepStarts:
    """When each step of a trace, such as `ProfilerStep#5`, starts, in microseconds."""

    def __init__(self, events: Sequence[Event]) -> None:
        step_starts = [
            (float(event["ts"]), int(event["name"].removeprefix(_STEP)))
            for event in events
            if event.get("cat") == _HOST and event.get("name", "").startswith(_STEP)
        ]
        self._starts, self._numbers = map(list, zip(*sorted(step_starts), strict=True)) if step_starts else ([], [])

    def at(self, time: float) -> int | None:
        """Return the step that was running at a time; None before the first one."""
        index = bisect_right(self._starts, time)
        return self._numbers[index - 1] if index else None

    def start(self, number: int) -> float:
        """Return when a step starts; infinity if it is not in the trace."""
        return self._starts[self._numbers.index(number)] if number in self._numbers else float("inf")


def events_until(events: Sequence[Event], step: int) -> list[Event]:
    """Return the events up to the end of a step. Torch has begun the next one when it writes a trace."""
    end = _StepStarts(events).start(step + 1)
    return [event for event in events if event.get("ph") == "M" or float(event.get("ts", 0)) < end]


def adapt_events(events: Sequence[Event], arguments: Callable[[Action | Collective], Mapping[str, Any]]) -> list[Event]:
    """Return the events of a process as the plugin and Chrome's format need them.

    Args:
        events: as torch wrote them.
        arguments: action or collective → its arguments in a trace, without the step, which is added.
    """
    steps = _StepStarts(events)
    started = _Intervals(
        event for event in events if event.get("cat") == _HOST and parse_collective_name(str(event.get("name")))
    )
    return [adapted for event in events for adapted in _adapt(event, arguments, steps, started)]


class _Intervals:
    """When events ran that do not overlap."""

    def __init__(self, events: Iterable[Event]) -> None:
        intervals = sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events)
        self._starts, self._ends = map(list, zip(*intervals, strict=True)) if intervals else ([], [])

    def start_and_leave(self, event: Event) -> bool:
        """Whether an event starts in one of them, and ends after it."""
        start = float(event["ts"])
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and start <= self._ends[index] < start + float(event["dur"])


def _adapt(
    event: Event,
    arguments: Callable[[Action | Collective], Mapping[str, Any]],
    steps: _StepStarts,
    started: _Intervals,
) -> Iterator[Event]:
    event = {"name": "unnamed", **event}
    if event.get("ph") != "X":
        yield event
        return
    category = event.setdefault("cat", "uncategorized")
    event["cat"] = _RUNTIME.get(category, category)
    if category == "gpu_user_annotation" and event["name"].startswith(_STEP):
        event["cat"] = "gpu_step"
    action = parse_action_name(event["name"]) if category in _ANNOTATIONS else None
    collective = parse_collective_name(event["name"]) if category in _OF_COLLECTIVES else None
    if collective is not None:
        step = steps.at(float(event["ts"]))
        if step is not None:
            yield {**event, "args": {**event.get("args", {}), **arguments(collective), "step": step}}
    elif action is not None:
        event["args"] = {**event.get("args", {}), **arguments(action), "step": steps.at(float(event["ts"]))}
        yield event
        if category == _HOST:
            yield {**event, "cat": "cpu_op"}
    elif event["name"] in _POSTED or (event["name"] in _COLLECTIVES and started.start_and_leave(event)):
        yield from _as_async(event)
    else:
        yield event


def _as_async(event: Event) -> Iterator[Event]:
    begin = {key: value for key, value in event.items() if key != "dur"}
    begin |= {"ph": "b", "id": f"{event['pid']}.{event.get('args', {}).get('External id')}"}
    yield begin
    yield {**begin, "ph": "e", "ts": round(float(event["ts"]) + float(event["dur"]), 3)}


def count_collectives(events: Sequence[Event]) -> list[int]:
    """Return how many collectives there are of each of `LIBRARIES`."""
    names = [event["name"] for event in events if _is_collective(event)]
    return [sum(name.startswith(library) for name in names) for library in LIBRARIES]


def match_collectives(events: Sequence[Event], counts: Sequence[Sequence[float]]) -> list[Event]:
    """Rename collectives so that the plugin sees the same number, of one library, in all processes.

    The collectives of the first library that every process used equally often keep their names; without such a library,
    those in `LOSS_SPAN` do.

    Args:
        events: of this process.
        counts: process → its `count_collectives`.
    """
    by_library = zip(LIBRARIES, zip(*counts, strict=True), strict=True)
    common_library = next((library for library, numbers in by_library if len(set(numbers)) == 1 and numbers[0]), None)
    marks = [(float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events if e["name"] == LOSS_SPAN]

    def remains(event: Event) -> bool:
        if common_library is not None:
            return bool(event["name"].startswith(common_library))
        return any(start <= float(event["ts"]) <= end for start, end in marks)

    return [
        {**event, "name": f"{event['name']} of some ranks"} if _is_collective(event) and not remains(event) else event
        for event in events
    ]


def _is_collective(event: Event) -> bool:
    return event.get("ph") == "X" and event["name"] in _COLLECTIVES


def events_by_rank(events: Sequence[Event], ranks: Sequence[int]) -> dict[int, list[Event]]:
    """Divide the events of a process among the ranks that share it.

    A rank gets the events that lie in one of its actions, and what a GPU did for them. Every rank gets those of the
    whole process, such as its name and the steps. The first rank gets what lies in no action, such as the optimizer.
    """
    if len(ranks) == 1:
        return {ranks[0]: list(events)}
    spans = sorted(
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(event["args"]["rank"]))
        for event in events
        if event.get("cat") == _HOST and _is_action(event)
    )
    starts = [start for start, _, _ in spans]

    def within(event: Event) -> int | None:
        index = bisect_right(starts, float(event.get("ts", 0))) - 1
        if index < 0 or float(event["ts"]) > spans[index][1]:
            return None
        return spans[index][2]

    launched = {_correlation(event): within(event) for event in events if event.get("cat") == "runtime"}
    divided_events: dict[int, list[Event]] = {rank: [] for rank in ranks}
    for event in events:
        if _is_of_all(event):
            for rank_events in divided_events.values():
                rank_events.append(event)
            continue
        if _is_action(event):
            rank = event["args"]["rank"]
        elif _correlation(event) is not None:
            rank = launched.get(_correlation(event))
        else:
            rank = within(event)
        divided_events[ranks[0] if rank is None else rank].append(event)
    return divided_events


def _is_action(event: Event) -> bool:
    return "microbatch" in event.get("args", {}) and "rank" in event["args"]


def _is_of_all(event: Event) -> bool:
    return event.get("ph") in ("M", "i") or event.get("cat") == "Trace" or event["name"].startswith(_STEP)


def _correlation(event: Event) -> Any:
    return event.get("args", {}).get("correlation")
