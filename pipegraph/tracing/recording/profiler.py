"""Recording a training loop: torch's profiler around it, with a span for every action of the pipeline."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from pipegraph.device import Device
from pipegraph.errors import PipegraphError
from pipegraph.runtime.measurements import Message
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.launched_rank import scratch_folder
from pipegraph.runtime.processes.world import ClockOffset
from pipegraph.runtime.step_data import StepResult
from pipegraph.runtime.wiring import stage_wirings, torch_dtype, transfer_of
from pipegraph.schedule import Action, Collective
from pipegraph.torch_private.distributed import profiler_is_recording
from pipegraph.tracing import COLLECTIVE_EVENT, action_name, collective_name
from pipegraph.tracing.recording.run_folder import make_run_folder, run_on_all_ranks, trace_file
from pipegraph.tracing.recording.step_figures import SinkFactory, StepReporter
from pipegraph.tracing.recording.tensorboard_plugin import (
    LOSS_SPAN,
    Event,
    adapt_events,
    count_collectives,
    events_by_rank,
    events_until,
    match_collectives,
)

# ---- action spans ----------------------------------------------------------------------------------------------------
# Spans of actions and collectives in a trace of torch's profiler, and the arguments of their events.
#
# main thread   │ F stage 1 microbatch 0 │ UNSHARD stage 0 │ B stage 1 microbatch 0 │      UNSHARD is started
# collectives                             │ UNSHARD stage 0      │                         … and done


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
        self._keeps = Device(device).is_cpu
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
    wiring, sizes = stage_wirings(manifest, pipe.schedule.placement), manifest.captured_sizes

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


# ---- profiler --------------------------------------------------------------------------------------------------------


class LoopProfiler:
    """A context around a training loop, which records its steps; `pipegraph.profile` makes it.

    Collective: every process of the mesh enters it, calls `step`, and leaves it.
    """

    folder: Path
    """The run's own folder, once the context is entered."""

    def __init__(
        self, pipe: Pipeline, parent: Path, schedule: Callable[[int], ProfilerAction], sink: SinkFactory | None = None
    ) -> None:
        """Prepare to record.

        Args:
            pipe: the pipeline that the loop runs.
            parent: the folder in which the run's folder is made.
            schedule: step → what torch's profiler does in it, as `torch.profiler.schedule` returns it.
            sink: makes what rank 0 hands the figures of every step to; without one, none are taken.
        """
        self._pipe = pipe
        self._parent = parent
        self._schedule = schedule
        self._reporter = None if sink is None else StepReporter(pipe, sink)
        self._spans = ActionSpans(pipe.device)
        self._observer: RemovableHandle | None = None
        self._step = 0  # the one that is running
        self._losses: dict[int, float | None] = {}  # of the steps that are recorded and not yet written
        self._clock = ClockOffset()  # when the window began
        self._failed = False
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if pipe.device.type == "cuda" else [])]
        self._torch = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=lambda _: self._write()
        )

    def __enter__(self) -> LoopProfiler:
        with ExitStack() as stack:
            stack.enter_context(exclusive_profiling(self._pipe))
            self._run = make_run_folder(self._pipe, self._parent)
            stack.callback(self._run.remove_if_empty)
            self.folder = self._run.path
            if self._is_recorded(0) or self._reporter is not None:
                self._clock = self._pipe.clock_offset()
            if self._reporter is not None:
                self._reporter.open(self._run, self._clock)
                stack.callback(self._reporter.close)
            with _no_warning_of_cleared_events():
                self._torch.__enter__()
            self._cleanup = stack.pop_all()
        self._observe(self._is_profiled(0))
        return self

    def step(self, result: StepResult | None = None) -> None:
        """End a step, its optimizer included. Collective: every process must call it.

        The loss of a recorded step is shared with all processes. That is the one collective that every rank makes, by
        which TensorBoard compares them. A GPU is waited for, so that its work of a recorded step lies in that step.

        Args:
            result: what `Pipeline.step` returned; without it the loss is not recorded.
        """
        if self._is_recorded(self._step) or self._is_recorded(self._step + 1):
            Device(self._pipe.device).synchronize()
        if self._is_recorded(self._step):
            self._losses[self._step] = self._share_loss(result)
        else:
            if self._reporter is not None:
                self._share_loss(result)
            if self._is_recorded(self._step + 1):
                self._set_clock(self._pipe.clock_offset())
        with _no_warning_of_cleared_events():
            self._torch.step()  # which calls `_write` after the last step of a window
        self._step += 1
        self._observe(self._is_profiled(self._step))
        if self._reporter is not None:
            self._reporter.begin_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = error is not None  # the processes then are not at one place, and can write nothing together
        self._observe(False)
        self._spans.close()
        try:
            self._torch.__exit__(kind, error, trace)
        except Exception:
            if error is None:
                raise
        finally:
            try:
                self._cleanup.close()
            except PipegraphError:
                if error is None:
                    raise
        if error is None and not self._run.windows:
            warnings.warn(f"{self._step} steps were too few to record one; nothing was written.", stacklevel=2)

    def _is_recorded(self, step: int) -> bool:
        return self._schedule(step) in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def _is_profiled(self, step: int) -> bool:
        """Return whether the step is recorded, or warms the profiler up."""
        return self._schedule(step) is not ProfilerAction.NONE

    def _observe(self, enabled: bool) -> None:
        if enabled and self._observer is None:
            self._observer = self._pipe.observe(self._spans, evals=False)
        elif self._observer is not None and not enabled:
            self._observer.remove()
            self._observer = None

    def _share_loss(self, result: StepResult | None) -> float | None:
        local_loss = math.nan if result is None or result.loss is None else float(result.loss)
        with record_function(LOSS_SPAN):
            if self._reporter is not None:
                return self._reporter.end_step(None if math.isnan(local_loss) else local_loss)
            rows = self._pipe.gather([local_loss], everywhere=True)
        return next((loss for (loss,) in rows if not math.isnan(loss)), None)

    def _write(self) -> None:
        """Write what torch has recorded: a file for every rank of this process."""
        if self._failed or not self._losses:
            return
        clock = self._clock.until(ended := self._pipe.clock_offset())
        digits = self._pipe.gather_text(str(time.time_ns()) if self._run.is_first else "", everywhere=True)[0]
        first, last = min(self._losses), max(self._losses)
        trace: dict[str, Any] = {}
        run_on_all_ranks(self._pipe, Path(tempfile.gettempdir()), lambda: trace.update(export_trace(self._torch)))
        lane = self._spans.take_collectives(trace.get("baseTimeNanoseconds"))
        events: list[Event] = events_until([*trace.pop("traceEvents"), *lane], last)
        events = adapt_events(events, action_arguments(self._pipe))
        events = match_collectives(events, self._pipe.gather(count_collectives(events), everywhere=True))
        traces, grid = {}, self._pipe.grid
        for rank, rank_events in events_by_rank(
            events, [self._pipe.mesh_ranks[pipeline_rank] for pipeline_rank in self._pipe.ranks]
        ).items():
            header = {"run": self._run.run, "rank": rank, "ranks": grid.size, "digits": digits}
            header["mesh"] = dict(zip(grid.names, grid.shape, strict=True))
            header["messages"] = {text: sent for text, sent in self._spans.messages.items() if sent}
            name = {"traceName": trace_file(rank, digits)}
            # The events come last: the plugin adds its own to a GPU's, at the last bracket that it finds.
            traces[rank] = {
                **trace,
                **name,
                "pipegraph": {**header, "clock": asdict(clock)},
                "traceEvents": rank_events,
            }
        self._run.add_window(traces, digits, {"steps": [first, last], "losses": list(self._losses.values())})
        self._losses.clear()
        if self._reporter is not None:
            self._reporter.end_window(last)
        self._set_clock(ended)
        self._torch.profiler = None  # frees what is written now; torch makes another one for the next window

    def _set_clock(self, clock: ClockOffset) -> None:
        self._clock = clock
        if self._reporter is not None:
            self._reporter.set_clock(clock)


def export_trace(profiler: torch.profiler.profile) -> dict[str, Any]:
    """Return what torch's profiler has recorded, as it writes it. Raises OSError if the disk is full."""
    with tempfile.TemporaryDirectory(prefix="pipegraph-profile-", dir=scratch_folder()) as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))  # which does not report a full disk
        try:
            trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), strict=False)
        except (FileNotFoundError, ValueError) as error:
            raise OSError(errno.ENOSPC, "torch's profiler could not write all of it") from error
    return trace


_profiler_lock = threading.Lock()


@contextmanager
def exclusive_profiling(pipe: Pipeline) -> Iterator[None]:
    """Hold torch's profiler while the body runs. Collective: every process of the mesh must enter it.

    Raises PipegraphError, in all processes, if something else is recording in one of them.
    """
    is_ours = _profiler_lock.acquire(blocking=False)
    try:
        rows = pipe.gather([not is_ours or profiler_is_recording()], everywhere=True)
        busy_ranks = [rank for rank, (is_taken,) in enumerate(rows) if is_taken]
        if busy_ranks:
            where = f"rank {busy_ranks[0]}" if len(rows) > 1 else "this process"
            raise PipegraphError(
                f"Another profile already records {where}, and a process has one profiler of torch.",
                "end the other one first; pipegraph.profile records what torch.profiler.profile does.",
            )
        yield
    finally:
        if is_ours:
            _profiler_lock.release()


@contextmanager
def _no_warning_of_cleared_events() -> Iterator[None]:
    """torch 2.11 warns at the first window that events are cleared at its end, which is what this profiler wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        yield
