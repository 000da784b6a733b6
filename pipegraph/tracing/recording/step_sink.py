"""Handing the figures of every step, which all processes exchange, to one receiver in rank 0's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.schedule import Timeline
from pipegraph.tracing.recording.run_folder import RunFolder, run_on_all_ranks, write_error
from pipegraph.tracing.recording.step_figures import StepFigures, StepRecorder


class StepSink(Protocol):
    """Receives what was recorded. Only rank 0's process has one."""

    def step(self, figures: StepFigures) -> None:
        """Receive the figures of a step that is done."""
        ...

    def timeline(self, timeline: Timeline, step: int) -> None:
        """Receive the timeline of the last step of a window."""
        ...

    def close(self) -> None:
        """Flush and close: nothing more will come."""
        ...


SinkFactory = Callable[[Path], StepSink]
"""Makes a sink for a run's folder."""


class StepReporter:
    """Records every step, whether torch's profiler does or not, and reports it to a sink.

    All methods but `set_clock` and `close` are collective: every process must call them.
    """

    def __init__(self, pipe: Pipeline, make_sink: SinkFactory) -> None:
        self._pipe = pipe
        self._make_sink = make_sink
        self._folder = Path()
        self._sink: StepSink | None = None
        self._recorder = StepRecorder(pipe)

    def open(self, run: RunFolder, clock: ClockOffset) -> None:
        """Start recording. Raises PipegraphError, in all processes, if rank 0 cannot write."""

        def make() -> None:
            if run.is_first:
                self._sink = self._make_sink(run.path)

        self._folder = run.path
        run_on_all_ranks(self._pipe, run.path, make)
        self.set_clock(clock)
        self._observer = self._pipe.observe(self._recorder.times, evals=False)
        self._recorder.begin_step()

    def set_clock(self, clock: ClockOffset) -> None:
        """Use this offset to rank 0's clock from now on."""
        self._recorder.offset = clock.offset_ns / 1e9

    def begin_step(self) -> None:
        """Begin the next step."""
        self._recorder.begin_step()

    def end_step(self, loss: float | None) -> float | None:
        """End a step and return its loss, in all processes. Raises PipegraphError if its figures cannot be written."""
        figures = self._recorder.end_step(loss)
        if self._sink is not None:
            with self._disk_errors():
                self._sink.step(figures)
        return figures.loss

    def end_window(self, step: int) -> None:
        """Report the timeline of ``step``, the last one of a window."""
        timeline = self._recorder.timeline()
        if self._sink is not None and timeline is not None:
            with self._disk_errors():
                self._sink.timeline(timeline, step)

    def close(self) -> None:
        """Stop recording."""
        self._observer.remove()
        if self._sink is not None:
            with self._disk_errors():
                self._sink.close()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self._folder, error) from error
