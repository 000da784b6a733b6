"""All ranks of a run in one Chrome trace, for Perfetto: a process per rank, and what was predicted beside it.

rank 1: stages 1, 2    compute   │ F stage 1 microbatch 0 │ …     with the operations of torch below, if they are wanted
                       sends     │ SEND_F … │                     ┐ a flow arrow from each SEND
                       receives          │ RECV_F … │             ┘ to its RECV
predicted rank 1       compute   │ F stage 1 microbatch 0 │ …     each step from where the measured one starts
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipegraph.errors import PipegraphError
from pipegraph.schedule import Timeline
from pipegraph.tracing.action_names import action_name
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_steps
from pipegraph.tracing.analysis.measured_times import messages
from pipegraph.tracing.reading.recorded_run import RankTrace, RecordedRun, Span

COMPUTE, SENDS, RECEIVES, HOST = 1, 2, 3, 4
_LATER = 16  # threads of predicted steps that overlap, and then those of the GPU's streams
_BELOW = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
_DEVICE = _BELOW[2:]

Event = dict[str, Any]


@dataclass(frozen=True)
class Merged:
    """What was written: numbers of measured slices and of arrows; of operations that cross others and were left out;
    and of messages that arrive, by these clocks, before they were sent."""

    slices: int
    flows: int
    left_out: int
    early: int


def merge(run: RecordedRun, file: Path, expected: Timeline | None = None, operations: bool = False) -> Merged:
    """Write a run as one Chrome trace, compressed if the name ends in ``.gz``, whole or not at all.

    ``expected`` is the predicted step; ``operations`` keeps what torch recorded besides the actions. Times are
    microseconds of rank 0's clock from the first event on. Raises PipegraphError where the file cannot be written.
    """
    steps = measured_steps(run)
    counts = {"X": 0, "s": 0, "left out": 0, "early": 0}
    first = _first(run, operations)

    def events() -> Iterator[Event]:
        yield from _names(run, expected)
        for trace in run.ranks.values():
            yield from _rank(trace, first, counts, operations)
        yield from _flows(run, first, counts)
        if expected is not None:
            yield from _predicted(expected, steps, run, first)

    _write(file, events(), _metadata(run))
    return Merged(counts["X"], counts["s"], counts["left out"], counts["early"])


def stages_of(run: RecordedRun, rank: int) -> str:
    """``rank 1: stages 1, 2``"""
    held = [str(stage) for stage, place in enumerate(run.schedule.placement) if place == rank]
    return f"rank {rank}: stage{'s' if len(held) > 1 else ''} {', '.join(held)}"


def _first(run: RecordedRun, operations: bool) -> float:
    """The time that becomes 0."""
    firsts = [trace.spans[0].start for trace in run.ranks.values() if trace.spans]
    firsts += [start for trace in run.ranks.values() for start, _ in trace.steps.values()]
    if operations:
        firsts += [start for trace in run.ranks.values() for file in trace.files for start, _, _ in file.events()]
    return min(firsts, default=0.0)


def _names(run: RecordedRun, expected: Timeline | None) -> Iterator[Event]:
    ranks = run.schedule.ranks
    for rank in range(ranks):
        trace = run.ranks.get(rank)
        yield _meta(rank, "process_name", name=stages_of(run, rank))
        yield _meta(rank, "process_sort_index", sort_index=rank)
        yield _meta(rank, "process_labels", labels=_clock(trace) if trace else "no trace")
        threads = {COMPUTE: "compute", SENDS: "sends", RECEIVES: "receives"}
        for thread, name in threads.items():
            yield _meta(rank, "thread_name", thread, name=name)
            yield _meta(rank, "thread_sort_index", thread, sort_index=thread)
        if expected is not None:
            yield _meta(ranks + rank, "process_name", name=f"predicted {stages_of(run, rank)}")
            yield _meta(ranks + rank, "process_sort_index", sort_index=ranks + rank)
            yield _meta(ranks + rank, "thread_name", COMPUTE, name="compute")


def _meta(process: int, what: str, thread: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _clock(trace: RankTrace) -> str:
    clock = trace.clock
    if trace.rank == 0:
        return "rank 0's clock"
    if clock.error is None:
        return "clock not compared with rank 0's"
    return f"clock {clock.offset * 1e6:+.1f} µs, ± {clock.error * 1e6:.1f} µs"


def _rank(trace: RankTrace, first: float, counts: dict[str, int], operations: bool) -> Iterator[Event]:
    slices: dict[int, list[tuple[int, int, Event]]] = {COMPUTE: [], SENDS: [], RECEIVES: []}
    for span in trace.spans:
        args: Event = {"step": span.step, "stage": span.action.stage, "microbatch": span.action.microbatch}
        if span.action.peer is not None:
            args |= {"peer": span.action.peer, "bytes": span.bytes}
        thread = _thread(span)
        slices[thread].append(
            _slice(trace.rank, thread, action_name(span.action), "action", span.start, span.end, first, args)
        )
    if operations:
        for thread, name, found in _operations(trace, first):
            if thread not in slices:
                slices[thread] = []
                yield _meta(trace.rank, "thread_name", thread, name=name)
                yield _meta(trace.rank, "thread_sort_index", thread, sort_index=thread)
            slices[thread].append(found)
    for found_on in slices.values():
        yield from _nested(found_on, counts)


def _thread(span: Span) -> int:
    if not span.action.kind.is_transfer:
        return COMPUTE
    return SENDS if span.action.sends else RECEIVES


def _slice(
    process: int, thread: int, name: str, category: str, start: float, end: float, first: float, args: Event
) -> tuple[int, int, Event]:
    """(start, end, event) with times in nanoseconds."""
    began, ended = round((start - first) * 1e9), round((end - first) * 1e9)
    event: Event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": thread}
    return began, ended, {**event, "ts": began / 1000, "dur": (ended - began) / 1000, "args": args}


def _operations(trace: RankTrace, first: float) -> Iterator[tuple[int, str, tuple[int, int, Event]]]:
    """(thread, its name, slice) of what torch recorded besides the actions. On a GPU the actions are the device's, and
    the host's operations stand on threads of their own."""
    threads: dict[tuple[bool, Any], tuple[int, str]] = {}
    for file in trace.files:
        main = _main_thread(file.events())
        for start, end, event in file.events():
            args = event.get("args") or {}
            if event.get("cat") not in _BELOW or ("kind" in args and "microbatch" in args):
                continue
            device, own = event["cat"] in _DEVICE, event.get("tid")
            if not device and not trace.on_gpu and (event.get("pid"), own) == main:
                place = (COMPUTE, "compute")
            else:
                number = len(threads)
                what = f"stream {own}" if device else f"host thread {own}"
                place = threads.setdefault((device, own), (HOST + number, what))
            kept = {key: args[key] for key in ("Input Dims", "device", "stream") if key in args}
            made = _slice(trace.rank, place[0], str(event.get("name")), str(event["cat"]), start, end, first, kept)
            yield *place, made


def _main_thread(events: Iterable[tuple[float, float, Event]]) -> tuple[Any, Any] | None:
    """(pid, tid) of the thread whose actions a file holds."""
    for _, _, event in events:
        if event.get("cat") == "user_annotation" and "microbatch" in (event.get("args") or {}):
            return event.get("pid"), event.get("tid")
    return None


def _nested(slices: Sequence[tuple[int, int, Event]], counts: dict[str, int]) -> Iterator[Event]:
    """The slices of a thread, outer before inner, without operations that begin in one and end behind it.

    An action is never left out: where clocks or files give two that overlap, the first ends where the second starts.
    """
    actions = sorted((each for each in slices if each[2]["cat"] == "action"), key=lambda each: each[:2])
    for at, (start, end, event) in enumerate(actions[:-1]):
        following = actions[at + 1][0]
        if end > following:
            actions[at] = (start, following, {**event, "dur": (following - start) / 1000})
    others = [each for each in slices if each[2]["cat"] != "action"]
    starts = [start for start, _, _ in actions]
    open_until: list[int] = []
    for start, end, event in sorted(
        [*actions, *others], key=lambda each: (each[0], -each[1], each[2]["cat"] != "action")
    ):
        while open_until and open_until[-1] <= start:
            open_until.pop()
        if event["cat"] != "action":
            last = bisect_left(starts, end) - 1  # the last action that begins before it ends
            cuts = last >= 0 and start < starts[last] and actions[last][1] > end
            if cuts or (open_until and end > open_until[-1]):
                counts["left out"] += 1
                continue
        open_until.append(end)
        counts["X"] += 1
        yield event


def _flows(run: RecordedRun, first: float, counts: dict[str, int]) -> Iterator[Event]:
    """An arrow from the start of each SEND to the end of its RECV: within both slices, for that is what ties it."""
    number = 0
    for step in measured_steps(run):
        for send, receive in messages(step):
            number += 1
            start = round((step.start + send.start - first) * 1e9)
            begin, end = (round((step.start + time - first) * 1e9) for time in (receive.start, receive.end))
            arrives = max(begin, end - 1)
            counts["s"] += 1
            counts["early"] += end < start
            both = {"cat": "message", "name": "message", "id": number}
            yield {"ph": "s", **both, "pid": send.rank, "tid": SENDS, "ts": start / 1000}
            yield {"ph": "f", "bp": "e", **both, "pid": receive.rank, "tid": RECEIVES, "ts": arrives / 1000}


def _predicted(expected: Timeline, steps: Sequence[MeasuredStep], run: RecordedRun, first: float) -> Iterator[Event]:
    """The predicted step from where each measured one starts. One that begins before the last has ended stands on a
    thread beside it."""
    free: list[float] = []
    for step in steps:
        lane = next((n for n, until in enumerate(free) if until <= step.start), len(free))
        free[lane : lane + 1] = [step.start + expected.makespan]
        thread = COMPUTE if lane == 0 else _LATER + lane
        for rank, row in enumerate(expected.events):
            process = run.schedule.ranks + rank
            if lane:
                yield _meta(process, "thread_name", thread, name=f"compute, overlapping steps {lane}")
            for event in row:
                args = {"step": step.number, "stage": event.action.stage, "microbatch": event.action.microbatch}
                times = (step.start + event.start, step.start + event.end)
                yield _slice(process, thread, action_name(event.action), "predicted", *times, first, args)[2]


def _metadata(run: RecordedRun) -> Event:
    clocks = {
        str(rank): {"offset_ns": round(trace.clock.offset * 1e9), "error_ns": _nanoseconds(trace.clock.error)}
        for rank, trace in run.ranks.items()
    }
    return {
        "run": run.info.run,
        "schedule": run.schedule.name,
        "ranks": run.schedule.ranks,
        "clocks": clocks,
        "problems": list(run.problems),
    }


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)


def _write(file: Path, events: Iterable[Event], metadata: Mapping[str, Any]) -> None:
    """Event by event, beside the file, which is then replaced."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            with gzip.open(beside, "wt", encoding="utf-8") if file.suffix == ".gz" else beside.open("w") as out:
                out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                for number, event in enumerate(events):
                    out.write(f"{',' if number else ''}{json.dumps(event)}\n")
                out.write(f'], "pipegraph": {json.dumps(metadata)}}}\n')
            beside.replace(file)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise PipegraphError(
            f"{file} cannot be written: {error.strerror or error}.\nTry: another name for -o."
        ) from None
