"""What each step took on every rank, in a few figures that all ranks exchange and hand to one receiver."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Protocol

import torch

from pipegraph.device import Device
from pipegraph.package import CALLER, Manifest, leaves
from pipegraph.package.manifest import Value
from pipegraph.runtime.batch import StepSizes
from pipegraph.runtime.measurements import ActionTimes, StepTimes
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.rank_grid import DATA, PIPELINE
from pipegraph.runtime.processes.world import ClockOffset
from pipegraph.schedule import Event, Kind, Schedule, Timeline
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.tracing.recording.run_folder import RunFolder, run_on_all_ranks, write_error

PARTS = {
    Kind.F: "forward",
    Kind.I: "input_gradient",
    Kind.W: "weight_gradient",
    Kind.B: "backward",
    Kind.SEND_F: "transfer",
    Kind.SEND_B: "transfer",
    Kind.RECV_F: "wait",
    Kind.RECV_B: "wait",
}
"""What a rank's time goes into. A transfer hands a message over, a wait ends when one has arrived."""

_PROCESS_FIGURES: Final = 6
"""the number of figures of a process itself, before those of its ranks"""

COLLECTIVES: Final = "collectives"
"""The part that overlaps with the others: how long collectives of the schedule ran."""


@dataclass(frozen=True)
class StepFigures:
    """One step.

    Attributes:
        index: of the step, from 0.
        loss: None if the step has none.
        samples, tokens: of the batch of all data-parallel ranks, as `batch_sizes` counts them.
        seconds: of the pipeline: from the first action of any rank to the end of the last one.
        iteration: seconds of a whole iteration of the user's loop, the optimizer included: from the start in the first
            process to the end in the last one.
        bubble: the share of ``seconds`` in which ranks computed nothing, their mean; None if they share a process.
        ranks: of each rank of the mesh, the seconds that each of `PARTS`, and also `COLLECTIVES`, took.
        peak_bytes: of each process, since it began: the peak of what torch had allocated on its GPU or, without a GPU,
            of the machine's memory that the process held.
    """

    index: int
    loss: float | None
    samples: int | None
    tokens: int | None
    seconds: float
    iteration: float
    bubble: float | None
    ranks: tuple[Mapping[str, float], ...]
    peak_bytes: tuple[int, ...]


class StepRecorder:
    """Makes the figures of each step from `times`, which observe the pipeline.

    Every process makes one and calls `begin_step` when a step begins; `end_step` and `timeline` are collective.
    ``offset`` is how far rank 0's clock (`time.time`) is ahead of this process's, in seconds.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.offset = 0.0
        self.times = ActionTimes(pipe.device)
        self._pipe, self._device = pipe, pipe.device
        self._parts = parts_of(pipe.schedule_with_collectives)
        self._last = StepTimes({})  # of the step before
        self._last_start = 0.0  # of that step, on rank 0's clock
        self._index = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Begin the next step."""
        self._start, self._watch = time.time(), time.perf_counter()
        self.times.begin_step()

    def end_step(self, loss: float | torch.Tensor | None) -> StepFigures:
        """Return the figures of the step that ends now, of all ranks. Collective: every process must call it."""
        self._last, self._last_start = self.times.end_step(), self._start + self.offset
        stop = self._last_start + time.perf_counter() - self._watch
        row = [math.nan if loss is None else float(loss), float(self._peak_bytes()), self._last_start, stop]
        sizes = self._pipe.last_sizes
        counts = (None, None) if sizes is None else batch_sizes(self._pipe.package.manifest, sizes)
        row += [math.nan if count is None else count for count in counts]
        for rank in self._pipe.ranks:
            spans = self._last.spans.get(rank, ())
            row.append(self._last_start + min((span.begin for span in spans), default=math.inf))
            row.append(self._last_start + max((span.end for span in spans), default=-math.inf))
            sums = dict.fromkeys(self._parts, 0.0)
            for span in spans:
                sums[PARTS[span.action.kind]] += span.end - span.begin
            for collective in self._last.collectives.get(rank, ()):
                sums[COLLECTIVES] += collective.end - collective.begin
            row += sums.values()
        figures = self._figures(self._pipe.gather(row, everywhere=True))
        self._index += 1
        return figures

    def timeline(self) -> Timeline | None:
        """Return when the actions of the last step ran, from 0 on; None if not all of them ran.

        In a mesh these are the actions of the first pipeline. Collective: every process must call it.
        """
        schedule = self._pipe.schedule
        actions = [[action for action in row if not action.kind.is_transfer] for row in schedule.actions]
        longest = 2 * max(map(len, actions))
        row: list[float] = []
        for rank in self._pipe.ranks:
            spans = [span for span in self._last.spans.get(rank, ()) if not span.action.kind.is_transfer]
            spans = spans[-len(actions[rank]) :]
            if [span.action for span in spans] != actions[rank]:  # a call of another number of microbatches
                spans = []
            times = [self._last_start + moment for span in spans for moment in (span.begin, span.end)]
            row += [*times, *[math.nan] * (longest - len(times))]
        rows = self._pipe.gather(row, everywhere=True)
        if len(rows) > 1:
            by_rank = [rows[rank] for rank in self._pipe.grid.line(0, PIPELINE)]
        else:
            by_rank = [rows[0][at : at + longest] for at in range(0, len(rows[0]), longest)]
        rank_times = [times[: 2 * len(rank_actions)] for times, rank_actions in zip(by_rank, actions, strict=True)]
        if any(map(math.isnan, (moment for times in rank_times for moment in times))):
            return None
        first = min(moment for times in rank_times for moment in times)
        events = tuple(
            tuple(
                Event(action, begin - first, end - first)
                for action, begin, end in zip(rank_actions, times[::2], times[1::2], strict=True)
            )
            for rank_actions, times in zip(actions, rank_times, strict=True)
        )
        return Timeline(events, peak_activations(schedule))

    def _figures(self, rows: list[list[float]]) -> StepFigures:
        ranks, grid = self._pipe.schedule.ranks, self._pipe.grid
        in_turn = len(rows) < ranks
        width = 2 + len(self._parts)
        by_rank = (
            [rows[0][_PROCESS_FIGURES + at * width :] for at in range(ranks)]
            if in_turn
            else [row[_PROCESS_FIGURES:] for row in rows]
        )
        seconds = max(0.0, max(figures[1] for figures in by_rank) - min(figures[0] for figures in by_rank))
        parts = [dict(zip(self._parts, figures[2:width], strict=True)) for figures in by_rank]
        computing = {PARTS[kind] for kind in PARTS if not kind.is_transfer}
        busy = fmean(sum(spent for part, spent in rank_parts.items() if part in computing) for rank_parts in parts)
        samples, tokens = (sum(rows[rank][at] for rank in grid.line(0, *DATA)) for at in (4, 5))
        return StepFigures(
            index=self._index,
            samples=None if math.isnan(samples) else int(samples),
            tokens=None if math.isnan(tokens) else int(tokens),
            loss=next((row[0] for row in rows if not math.isnan(row[0])), None),
            seconds=seconds,
            iteration=max(row[3] for row in rows) - min(row[2] for row in rows),
            bubble=None if in_turn or not seconds else 1 - busy / seconds,
            ranks=tuple(parts),
            peak_bytes=tuple(int(row[1]) for row in rows),
        )

    def _peak_bytes(self) -> int:
        return Device(self._device).peak_bytes


def parts_of(schedule: Schedule) -> tuple[str, ...]:
    """Return those of `PARTS` on which ranks spend time under a schedule, and `COLLECTIVES` if it has any."""
    kinds = {action.kind for row in schedule.actions for action in row}
    crosses = any(schedule.placement[at] != schedule.placement[at - 1] for at in range(1, schedule.stages))
    parts = [part for kind, part in PARTS.items() if kind in kinds or (kind.is_transfer and crosses)]
    return (*dict.fromkeys(parts), *([COLLECTIVES] if schedule.collectives else []))


def model_flops(manifest: Manifest, sizes: StepSizes) -> float | None:
    """Return the floating-point operations of a step of these sizes: three times those of its forwards, as a backward
    takes two forwards (Chowdhery et al., PaLM, appendix B). Operations that a backward repeats do not count.

    They grow as the elements of the model's first input do, from those at capture: attention's grow faster with the
    length. None if the package does not have them.
    """
    flops = [stage.cost.flops for stage in manifest.stages]
    first = _first_input(manifest)
    if first is None or not all(flops):
        return None
    captured = math.prod(first.shape_at(manifest.captured_sizes))
    elements = sum(math.prod(microbatch.shape(first)) for microbatch in sizes.microbatches)
    return 3 * sum(count or 0 for count in flops) * elements / captured


def _first_input(manifest: Manifest) -> Value | None:
    """The first input of the model that is a tensor with elements."""
    names = [name for name in leaves((manifest.args, manifest.kwargs)) if name is not None]
    inputs = [manifest.values[name] for name in names]
    return next((value for value in inputs if value.producer == CALLER and not value.is_constant and value.shape), None)


def batch_sizes(manifest: Manifest, sizes: StepSizes) -> tuple[int | None, int | None]:
    """Return the samples and the tokens of a step of these sizes; None for what the model's inputs do not have.

    Samples are the rows of the model's first input that is a tensor; tokens are its elements, if it holds integers of
    shape [batch, sequence].
    """
    first = _first_input(manifest)
    if first is None:
        return None, None
    is_tokens = first.dtype.lstrip("u").startswith("int") and len(first.shape) == 2
    if first.batch_dim is None and first.batch_role != "list":  # all microbatches take the same tensor
        shapes = [sizes.microbatches[0].shape(first)]
    else:
        shapes = [microbatch.shape(first) for microbatch in sizes.microbatches]
    samples = sum(shape[first.batch_dim or 0] for shape in shapes)
    return samples, sum(map(math.prod, shapes)) if is_tokens else None


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
