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
from functools import cache
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function
from torch.utils.hooks import RemovableHandle

from pipegraph.errors import PipegraphError
from pipegraph.runtime.internals import profiler_is_recording
from pipegraph.runtime.pipeline import Pipeline, StepResult
from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.runtime.wiring import stage_wirings, torch_dtype, transfer_of
from pipegraph.schedule import Action
from pipegraph.tracing.action_names import action_name
from pipegraph.tracing.recording.run_folder import make_run_folder, together, trace_file
from pipegraph.tracing.recording.step_sink import MakeSink, SinkFeed
from pipegraph.tracing.recording.tensorboard_plugin import (
    MARK,
    Event,
    by_rank,
    collectives,
    comparable,
    repaired,
    until,
)


def profile(
    pipe: Pipeline,
    folder: str | PathLike[str],
    *,
    wait: int = 0,
    warmup: int = 1,
    active: int = 3,
    repeat: int = 1,
    sink: MakeSink | None = None,
) -> Profile:
    """Record the steps of a training loop into a new folder inside `folder`, one Chrome trace for each rank.

    As with `torch.profiler.schedule`, `wait` steps are left alone, `warmup` steps warm the profiler up, `active` steps
    are recorded, and that `repeat` times, or with 0 until the loop ends. A loop that ends earlier writes the steps that
    it has recorded. What `sink` makes of the run's folder, in the first process, is told the figures of every step,
    also of those that are left alone; without a `sink` these take no longer than without a profile.

    All processes of the pipeline do this together. Raises PipegraphError for numbers that record nothing, and on
    entering it in every process where one of them cannot write there, or is recorded by another profile.
    """
    given = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    for name, number in given.items():
        least = 1 if name == "active" else 0
        if number < least:
            raise PipegraphError(f"{name} is {number}: give it {least} or more.\nTry: profile(pipe, folder, active=3).")
    return Profile(pipe, Path(folder), torch.profiler.schedule(**given), sink)


class Profile:
    """What `profile` gives: a context around a training loop."""

    folder: Path
    """The run's own folder, once the context is entered."""

    def __init__(
        self, pipe: Pipeline, parent: Path, schedule: Callable[[int], ProfilerAction], sink: MakeSink | None = None
    ) -> None:
        self._pipe = pipe
        self._parent = parent
        self._schedule = schedule
        self._feed = None if sink is None else SinkFeed(pipe, sink)
        self._spans = ActionSpans()
        self._observed: RemovableHandle | None = None
        self._step = 0  # the one that is under way
        self._losses: dict[int, float | None] = {}  # of the steps that are recorded and not yet written
        self._began = ClockOffset()
        self._gives_up = False
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if pipe.device.type == "cuda" else [])]
        self._torch = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=lambda _: self._write()
        )

    def __enter__(self) -> Profile:
        with ExitStack() as stack:
            stack.enter_context(alone(self._pipe))
            self._run = make_run_folder(self._pipe, self._parent)
            stack.callback(self._run.leave)
            self.folder = self._run.path
            if self._is_recorded(0) or self._feed is not None:
                self._began = self._pipe.clock_offset()
            if self._feed is not None:
                self._feed.open(self._run, self._began)
                stack.callback(self._feed.close)
            self._torch.__enter__()
            self._left = stack.pop_all()
        self._observe(self._is_looked_at(0))
        return self

    def step(self, result: StepResult | None = None) -> None:
        """Say that a step is done, its optimizer included, and what `Pipeline.step` gave. Every process calls this.

        Of a recorded step every process learns the loss. That is the one collective that every rank makes, by which
        TensorBoard compares them. What a GPU does for a recorded step is waited for, so that it lies in that step.
        """
        if self._pipe.device.type == "cuda" and (self._is_recorded(self._step) or self._is_recorded(self._step + 1)):
            torch.cuda.synchronize(self._pipe.device)
        if self._is_recorded(self._step):
            self._losses[self._step] = self._shared_loss(result)
        else:
            if self._feed is not None:
                self._shared_loss(result)
            if self._is_recorded(self._step + 1):
                self._set_clock(self._pipe.clock_offset())
        self._torch.step()  # which calls `_write` behind the last step of a window
        self._step += 1
        self._observe(self._is_looked_at(self._step))
        if self._feed is not None:
            self._feed.begin_step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gives_up = error is not None  # the processes are not at one place then, and can write nothing together
        self._observe(False)
        self._spans.close()
        try:
            self._torch.__exit__(kind, error, trace)
        except Exception:
            if error is None:
                raise
        finally:
            try:
                self._left.close()
            except PipegraphError:
                if error is None:
                    raise
        if error is None and not self._run.windows:
            warnings.warn(f"{self._step} steps were too few to record one; nothing was written.", stacklevel=2)

    def _is_recorded(self, step: int) -> bool:
        return self._schedule(step) in (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)

    def _is_looked_at(self, step: int) -> bool:
        """Whether the step is recorded, or warms up for that."""
        return self._schedule(step) is not ProfilerAction.NONE

    def _observe(self, wanted: bool) -> None:
        if wanted and self._observed is None:
            self._observed = self._pipe.observe(self._spans, evals=False)
        elif self._observed is not None and not wanted:
            self._observed.remove()
            self._observed = None

    def _shared_loss(self, result: StepResult | None) -> float | None:
        own = math.nan if result is None or result.loss is None else float(result.loss)
        with record_function(MARK):
            if self._feed is not None:
                return self._feed.end_step(None if math.isnan(own) else own)
            told = self._pipe.gather([own])
        return next((loss for (loss,) in told if not math.isnan(loss)), None)

    def _write(self) -> None:
        """Write what torch has recorded: a file for every rank of this process."""
        if self._gives_up or not self._losses:
            return
        clock = self._began.until(ended := self._pipe.clock_offset())
        digits = self._pipe.broadcast_text(str(time.time_ns()))
        first, last = min(self._losses), max(self._losses)
        trace: dict[str, Any] = {}
        together(self._pipe, Path(tempfile.gettempdir()), lambda: trace.update(exported(self._torch)))
        events: list[Event] = repaired(until(trace.pop("traceEvents"), last), arguments(self._pipe))
        events = comparable(events, self._pipe.gather(collectives(events)))
        traces = {}
        for rank, own in by_rank(events, self._pipe.ranks).items():
            about = {"run": self._run.run, "rank": rank, "ranks": self._pipe.schedule.ranks, "digits": digits}
            name = {"traceName": trace_file(rank, digits)}
            # The events come last: the plugin adds its own to a GPU's, behind the last bracket that it finds.
            traces[rank] = {**trace, **name, "pipegraph": {**about, "clock": asdict(clock)}, "traceEvents": own}
        self._run.add_window(traces, digits, {"steps": [first, last], "losses": list(self._losses.values())})
        self._losses.clear()
        if self._feed is not None:
            self._feed.end_window(last)
        self._set_clock(ended)
        self._torch.profiler = None  # which holds what is written now; torch makes another one for the next window

    def _set_clock(self, clock: ClockOffset) -> None:
        self._began = clock
        if self._feed is not None:
            self._feed.set_clock(clock)


class ActionSpans:
    """Opens a span in torch's profiler where an action begins, and closes it where it ends."""

    def __init__(self) -> None:
        self._open: dict[int, record_function] = {}

    def begin(self, rank: int, action: Action) -> None:
        self._open[rank] = span = record_function(action_name(action))
        span.__enter__()

    def end(self, rank: int, action: Action, saved: Any) -> None:
        self._open.pop(rank).__exit__(None, None, None)

    def close(self) -> None:
        """End what an action has left open that failed."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


def exported(profiler: torch.profiler.profile) -> dict[str, Any]:
    """What torch's profiler has recorded, as it writes it. Raises OSError where the disk is full for that."""
    with tempfile.TemporaryDirectory(prefix="pipegraph-profile-") as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))  # which says nothing of a disk that is full
        try:
            trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), strict=False)
        except (FileNotFoundError, ValueError) as error:
            raise OSError(errno.ENOSPC, "torch's profiler could not write all of it") from error
    return trace


def arguments(pipe: Pipeline) -> Callable[[Action], dict[str, Any]]:
    """What is said of an action in a trace: `stage`, `kind`, `microbatch`, `rank`; of a transfer also `peer` (the
    stage at its other end), `peer_rank` and `bytes`."""
    wiring, placement = stage_wirings(pipe.package.manifest), pipe.schedule.placement

    @cache
    def of(action: Action) -> dict[str, Any]:
        stage = action.stage
        said: dict[str, Any] = {"stage": stage, "kind": action.kind.value, "microbatch": action.microbatch}
        said["rank"] = placement[stage]
        if action.peer is not None:
            values = transfer_of(action, wiring, placement).values
            size = sum(math.prod(value.shape_at()) * torch_dtype(value).itemsize for value in values)
            said |= {"peer": action.peer, "peer_rank": placement[action.peer], "bytes": size}
        return said

    return of


_held = threading.Lock()


@contextmanager
def alone(pipe: Pipeline) -> Iterator[None]:
    """Hold torch's profiler while the body runs. All processes of the pipeline do this together.

    Raises PipegraphError, in all of them, where something else is recording in one of them.
    """
    is_ours = _held.acquire(blocking=False)
    try:
        told = pipe.gather([not is_ours or profiler_is_recording()])
        taken = [rank for rank, (is_taken,) in enumerate(told) if is_taken]
        if taken:
            where = f"rank {taken[0]}" if len(told) > 1 else "this process"
            raise PipegraphError(
                f"{where} is recorded by another profile already, and torch's profiler is there once in a process.\n"
                "Try: end the other one first; pipegraph.profile records what torch.profiler.profile does."
            )
        yield
    finally:
        if is_ours:
            _held.release()
