"""Telling somebody, in the first process, what every step took: the figures that all processes exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.schedule import Timeline
from pipegraph.tracing.recording.run_folder import RunFolder, together, unwritable
from pipegraph.tracing.recording.step_figures import StepFigures, StepRecorder


class StepSink(Protocol):
    """Takes what was recorded. One process has it."""

    def step(self, figures: StepFigures) -> None:
        """Of a step that is done."""
        ...

    def timeline(self, timeline: Timeline, step: int) -> None:
        """Of the last step of a window."""
        ...

    def close(self) -> None:
        """There is no more."""
        ...


MakeSink = Callable[[Path], StepSink]
"""Of a run's folder."""


class SinkFeed:
    """Records every step, whether torch's profiler does or not, and tells a sink. All processes make the same calls."""

    def __init__(self, pipe: Pipeline, make_sink: MakeSink) -> None:
        self._pipe = pipe
        self._make_sink = make_sink
        self._folder = Path()
        self._sink: StepSink | None = None
        self._recorder = StepRecorder(pipe)

    def open(self, run: RunFolder, clock: ClockOffset) -> None:
        """Begin. Raises PipegraphError in all processes where the first one cannot write."""

        def make() -> None:
            if run.is_first:
                self._sink = self._make_sink(run.path)

        self._folder = run.path
        together(self._pipe, run.path, make)
        self.set_clock(clock)
        self._observed = self._pipe.observe(self._recorder.times, evals=False)
        self._recorder.begin_step()

    def set_clock(self, clock: ClockOffset) -> None:
        """From here on this is how far the clocks are apart."""
        self._recorder.offset = clock.offset_ns / 1e9

    def end_step(self, loss: float | None) -> float | None:
        """A step is done. Gives its loss, to all processes. Raises PipegraphError where its figures cannot be kept."""
        figures = self._recorder.end_step(loss)
        if self._sink is not None:
            with self._written():
                self._sink.step(figures)
        return figures.loss

    def begin_step(self) -> None:
        """The next one begins."""
        self._recorder.begin_step()

    def end_window(self, step: int) -> None:
        """That step was a window's last one."""
        timeline = self._recorder.timeline()
        if self._sink is not None and timeline is not None:
            with self._written():
                self._sink.timeline(timeline, step)

    def close(self) -> None:
        """No more steps. The only call that processes need not make together."""
        self._observed.remove()
        if self._sink is not None:
            with self._written():
                self._sink.close()

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._folder, error) from error
