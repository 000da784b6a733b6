"""Recording a training loop: torch's profiler around it, with a span for every action of the pipeline."""

from __future__ import annotations

import errno
import json
import math
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from pipegraph.errors import PipegraphError
from pipegraph.runtime.internals import profiler_is_recording
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.runtime.processes.launched_rank import scratch_folder
from pipegraph.runtime.step_data import StepResult
from pipegraph.tracing.recording.action_spans import ActionSpans, action_arguments
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
        if self._pipe.device.type == "cuda" and (self._is_recorded(self._step) or self._is_recorded(self._step + 1)):
            torch.cuda.synchronize(self._pipe.device)
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
                f"Another profile already records {where}, and a process has one profiler of torch.\n"
                "Try: end the other one first; pipegraph.profile records what torch.profiler.profile does."
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
