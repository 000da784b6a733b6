"""Writing one Chrome trace of all ranks, for Perfetto: a process per rank, measured and predicted.

rank 1: stages 1, 2    compute   │ F stage 1 microbatch 0 │ …     with the operations of torch below, if they are wanted
                       sends     │ SEND_F … │                     ┐ a flow arrow from each SEND
                       receives          │ RECV_F … │             ┘ to its RECV
                       collectives   │ UNSHARD … │                 of sharded and replicated stages
predicted rank 1       compute   │ F stage 1 microbatch 0 │ …     each step from where the measured one starts
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipegraph.errors import PipegraphError
from pipegraph.regular_file import replaced_file
from pipegraph.schedule import Timeline
from pipegraph.tracing import action_name, collective_name
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_steps, messages
from pipegraph.tracing.recorded_run import RankTrace, RecordedRun, RecordedSpan
from pipegraph.units import format_seconds

COMPUTE, SENDS, RECEIVES, COLLECTIVES, HOST = 1, 2, 3, 4, 5
_THREADS = {COMPUTE: "compute", SENDS: "sends", RECEIVES: "receives"}
_LANE = {COLLECTIVES: "collectives"}
_OVERLAP_THREAD = 16  # the first thread of predicted steps that overlap
_OPERATIONS = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
_DEVICE = _OPERATIONS[2:]

Event = dict[str, Any]
_Slice = tuple[int, int, Event]  # (start, end, event) with times in nanoseconds


@dataclass(frozen=True)
class MergedTrace:
    """Counts of what was written.

    Attributes:
        slices, flows: measured slices, and arrows between them.
        left_out: operations that begin in one slice and end in another, which a trace cannot show.
        early: messages that arrive, by the ranks' clocks, before they were sent.
    """

    slices: int
    flows: int
    left_out: int
    early: int


def merge_traces(
    runs: Sequence[RecordedRun], file: Path, expected: Timeline | None = None, operations: bool = False
) -> MergedTrace:
    """Write a run as one Chrome trace. Times are microseconds of rank 0's clock since the first event.

    Args:
        runs: the recorded run: all pipelines of its mesh.
        file: written wholly or not at all; compressed if the name ends in ``.gz``.
        expected: the predicted step, to show it with each measured one.
        operations: whether to also keep the recorded operations that are not actions.

    Raises:
        PipegraphError: the file cannot be written.
    """
    counts: Counter[str] = Counter()
    merges = [_EventMerge(run, measured_steps(run), operations, counts) for run in runs]
    first = min(merge.begin for merge in merges)

    def events() -> Iterator[Event]:
        for merge in merges:
            merge.first = first
            yield from merge.names(expected)
            for trace in merge.run.ranks.values():
                yield from merge.rank(trace)
            yield from merge.flows()
            if expected is not None:
                yield from merge.predicted(expected)

    _write(file, events(), _metadata(runs))
    return MergedTrace(*(counts[name] for name in ("slices", "flows", "left out", "early")))


def problems_of(runs: Iterable[RecordedRun]) -> list[str]:
    """Return the problems of all pipelines of a run, each once."""
    return list(dict.fromkeys(problem for run in runs for problem in run.problems))


def describe_rank(run: RecordedRun, rank: int) -> str:
    """Return ``rank 1: stages 1, 2``, in a mesh with the rank's place."""
    stages = [str(stage) for stage, place in enumerate(run.schedule.placement) if place == rank]
    return f"{run.grid.text(run.line[rank])}: stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"


@dataclass
class _EventMerge:
    """Makes the events of one pipeline of a merged trace, and counts them.

    Attributes:
        first: the time that becomes 0, in nanoseconds on rank 0's clock.
    """

    run: RecordedRun
    steps: Sequence[MeasuredStep]
    operations: bool
    counts: Counter[str]
    first: int = 0

    @property
    def begin(self) -> int:
        """The time of its first event, in nanoseconds on rank 0's clock."""
        traces = self.run.ranks.values()
        firsts = [trace.spans[0].start for trace in traces if trace.spans]
        firsts += [start for trace in traces for start, _ in trace.steps.values()]
        if self.operations:
            firsts += [start for trace in traces for file in trace.files for start, _, _ in file.events()]
        return self.run.origin + round(min(firsts, default=0.0) * 1e9)

    def nanoseconds(self, time: float) -> int:
        return self.run.origin - self.first + round(time * 1e9)

    def slice(self, rank: int, thread: int, name: str, category: str, times: Sequence[float], args: Event) -> _Slice:
        start, end = map(self.nanoseconds, times)
        event: Event = {"ph": "X", "name": name, "cat": category, "pid": self.process(rank), "tid": thread}
        return start, end, {**event, "ts": start / 1000, "dur": (end - start) / 1000, "args": args}

    def process(self, rank: int) -> int:
        """Return the number of a rank's process, or of that of a predicted one, which is beyond the pipeline's."""
        ranks = self.run.schedule.ranks
        return self.run.line[rank] if rank < ranks else self.run.grid.size + self.run.line[rank - ranks]

    def names(self, expected: Timeline | None) -> Iterator[Event]:
        ranks = self.run.schedule.ranks
        for rank in range(ranks):
            trace, name = self.run.ranks.get(rank), describe_rank(self.run, rank)
            lanes = _LANE if trace is not None and trace.collectives else {}
            yield from _process(self.process(rank), name, {**_THREADS, **lanes})
            label = _clock(trace, self.run.line[rank]) if trace else "no trace"
            yield _meta(self.process(rank), "process_labels", labels=label)
            if expected is not None:
                lanes = _LANE if expected.collectives else {}
                threads = {COMPUTE: "compute", **lanes}
                yield from _process(self.process(ranks + rank), f"predicted {name}", threads)

    def rank(self, trace: RankTrace) -> Iterator[Event]:
        """Yield the actions and collectives of a rank and, if wanted, the operations below them."""
        slices: dict[int, list[_Slice]] = {thread: [] for thread in (*_THREADS, COLLECTIVES)}
        for span in trace.spans:
            args: Event = {"step": span.step, "stage": span.action.stage, "microbatch": span.action.microbatch}
            if span.action.peer is not None:
                args |= {"peer": span.action.peer, "bytes": span.bytes}
            thread, times = _thread(span), (span.start, span.end)
            slices[thread].append(self.slice(trace.rank, thread, action_name(span.action), "action", times, args))
        for recorded in trace.collectives:
            name, args = (
                collective_name(recorded.collective),
                {"step": recorded.step, "stage": recorded.collective.stage},
            )
            times = recorded.start, recorded.end
            slices[COLLECTIVES].append(self.slice(trace.rank, COLLECTIVES, name, "action", times, args))
        if self.operations:
            for thread, name, operation in self.operation_slices(trace):
                if thread not in slices:
                    slices[thread] = []
                    yield from _threads(self.process(trace.rank), {thread: name})
                slices[thread].append(operation)
        for of_thread in slices.values():
            yield from self.nested(of_thread)

    def operation_slices(self, trace: RankTrace) -> Iterator[tuple[int, str, _Slice]]:
        """Yield (thread, its name, slice) for every recorded operation that is not an action.

        On a GPU the actions are those of the device, and the operations of the host get separate threads.
        """
        threads: dict[tuple[bool, Any], tuple[int, str]] = {}
        for file in trace.files:
            main = _main_thread(file.events())
            for start, end, event in file.events():
                args = event.get("args") or {}
                if event.get("cat") not in _OPERATIONS or ("kind" in args and "microbatch" in args):
                    continue
                device, thread = event["cat"] in _DEVICE, event.get("tid")
                if not device and not trace.on_gpu and (event.get("pid"), thread) == main:
                    place = (COMPUTE, _THREADS[COMPUTE])
                else:
                    name = f"stream {thread}" if device else f"host thread {thread}"
                    place = threads.setdefault((device, thread), (HOST + len(threads), name))
                details = {key: args[key] for key in ("Input Dims", "device", "stream") if key in args}
                name, category = str(event.get("name")), str(event["cat"])
                yield *place, self.slice(trace.rank, place[0], name, category, (start, end), details)

    def nested(self, slices: Sequence[_Slice]) -> Iterator[Event]:
        """Yield the slices of a thread, outer before inner, without operations that begin in one and end after it.

        An action is never left out: if two overlap, because of clocks or files, the first ends when the second starts.
        """
        actions = sorted(
            (thread_slice for thread_slice in slices if thread_slice[2]["cat"] == "action"),
            key=lambda action: action[:2],
        )
        for at, (start, end, event) in enumerate(actions[:-1]):
            following = actions[at + 1][0]
            if end > following:
                actions[at] = (start, following, {**event, "dur": (following - start) / 1000})
        operations = [thread_slice for thread_slice in slices if thread_slice[2]["cat"] != "action"]
        starts = [start for start, _, _ in actions]
        open_until: list[int] = []
        for start, end, event in sorted(
            [*actions, *operations],
            key=lambda thread_slice: (thread_slice[0], -thread_slice[1], thread_slice[2]["cat"] != "action"),
        ):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            if event["cat"] != "action":
                last = bisect_left(starts, end) - 1  # the last action that begins before it ends
                cuts = last >= 0 and start < starts[last] and actions[last][1] > end
                if cuts or (open_until and end > open_until[-1]):
                    self.counts["left out"] += 1
                    continue
            open_until.append(end)
            self.counts["slices"] += 1
            yield event

    def flows(self) -> Iterator[Event]:
        """Yield an arrow from the start of each SEND to the end of its RECV: its ends have to lie within the slices."""
        for step in self.steps:
            for send, receive in messages(step):
                start, begin, end = (
                    self.nanoseconds(step.start + time) for time in (send.start, receive.start, receive.end)
                )
                self.counts["flows"] += 1
                self.counts["early"] += end < start
                arrow = {"cat": "message", "name": "message", "id": self.counts["flows"]}
                yield {"ph": "s", **arrow, "pid": self.process(send.rank), "tid": SENDS, "ts": start / 1000}
                arrives, process = max(begin, end - 1) / 1000, self.process(receive.rank)
                yield {"ph": "f", "bp": "e", **arrow, "pid": process, "tid": RECEIVES, "ts": arrives}

    def predicted(self, expected: Timeline) -> Iterator[Event]:
        """Yield the predicted step at the start of each measured one, on another thread if the last one still runs."""
        free: list[float] = []
        for step in self.steps:
            lane = next((n for n, until in enumerate(free) if until <= step.start), len(free))
            free[lane : lane + 1] = [step.start + expected.makespan]
            thread = COMPUTE if lane == 0 else _OVERLAP_THREAD + lane
            for rank, row in enumerate(expected.events):
                predicted_rank = self.run.schedule.ranks + rank
                if lane:
                    name = f"compute, overlapping steps {lane}"
                    yield _meta(self.process(predicted_rank), "thread_name", thread, name=name)
                for event in row:
                    args = {"step": step.number, "stage": event.action.stage, "microbatch": event.action.microbatch}
                    times = (step.start + event.start, step.start + event.end)
                    yield self.slice(predicted_rank, thread, action_name(event.action), "predicted", times, args)[2]
                for collective_event in expected.collectives[rank].events if expected.collectives and not lane else ():
                    name, args = collective_name(collective_event.collective), {"step": step.number}
                    times = (step.start + collective_event.start, step.start + collective_event.end)
                    yield self.slice(predicted_rank, COLLECTIVES, name, "predicted", times, args)[2]


def _process(number: int, name: str, threads: Mapping[int, str]) -> Iterator[Event]:
    yield _meta(number, "process_name", name=name)
    yield _meta(number, "process_sort_index", sort_index=number)
    yield from _threads(number, threads)


def _threads(process: int, threads: Mapping[int, str]) -> Iterator[Event]:
    for thread, name in threads.items():
        yield _meta(process, "thread_name", thread, name=name)
        yield _meta(process, "thread_sort_index", thread, sort_index=thread)


def _meta(process: int, kind: str, thread: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "ts": 0, "args": args}


def _clock(trace: RankTrace, rank: int) -> str:
    if rank == 0:
        return "rank 0's clock"
    if trace.clock.error is None:
        return "clock not compared with rank 0's"
    return f"clock {format_seconds(trace.clock.offset)}, ± {format_seconds(trace.clock.error)}"


def _thread(span: RecordedSpan) -> int:
    if not span.action.kind.is_transfer:
        return COMPUTE
    return SENDS if span.action.sends else RECEIVES


def _main_thread(events: Iterable[tuple[float, float, Event]]) -> tuple[Any, Any] | None:
    """Return (pid, tid) of the thread whose actions a file holds."""
    for _, _, event in events:
        if event.get("cat") == "user_annotation" and "microbatch" in (event.get("args") or {}):
            return event.get("pid"), event.get("tid")
    return None


def _metadata(runs: Sequence[RecordedRun]) -> Event:
    first = runs[0]
    clocks = {
        str(run.line[rank]): {
            "offset_ns": round(trace.clock.offset * 1e9),
            "error_ns": None if trace.clock.error is None else round(trace.clock.error * 1e9),
        }
        for run in runs
        for rank, trace in run.ranks.items()
    }
    return {
        "run": first.info.run,
        "schedule": first.schedule.name,
        "ranks": first.schedule.ranks,
        "mesh": dict(zip(first.grid.names, first.grid.shape, strict=True)),
        "clocks": clocks,
        "problems": problems_of(runs),
    }


def _write(file: Path, events: Iterable[Event], metadata: Mapping[str, Any]) -> None:
    """Write the events to a new file, which then replaces the old one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (
            replaced_file(file) as part,
            gzip.open(part, "wt", encoding="utf-8") if file.suffix == ".gz" else part.open("w") as out,
        ):
            out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(events):
                out.write(f"{',' if number else ''}{json.dumps(event)}\n")
            out.write(f'], "pipegraph": {json.dumps(metadata)}}}\n')
    except OSError as error:
        raise PipegraphError(f"{file} cannot be written: {error.strerror or error}.", "another name for -o.") from None
