"""What the steps of a run take: times of actions, saved bytes, state, and what is compiled."""

from __future__ import annotations

import json
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor

from pipegraph.cost.model_output import output_tensors
from pipegraph.kernels.sharded import local
from pipegraph.runtime.measurements import (
    COMPUTING,
    HISTORY_LENGTH,
    ActionTimes,
    MeasuredCollective,
    MeasuredRun,
    Message,
    SavedBytes,
)
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.precision import changes_dtypes
from pipegraph.runtime.tensor_parallel import tensor_ranks
from pipegraph.schedule import CollectiveKind
from pipegraph.workflows.batch import Batch

_NONE = -1.0  # for an unknown figure, when processes exchange them


class RunMeasurement:
    """Measures the steps of a pipeline.

    The first step compiles, and its saved bytes are measured; in the others every action is timed.

    Args:
        kernels, precision: what the pipeline computes with.
    """

    def __init__(
        self, pipe: Pipeline, optimizer: torch.optim.Optimizer, kernels: str, precision: str | None = None
    ) -> None:
        self._pipeline, self._optimizer, self._kernels = pipe, optimizer, kernels
        self._precision = precision if changes_dtypes(precision, pipe.package.manifest) else None
        self._times = ActionTimes(pipe.device)
        self._saved: SavedBytes | None = None
        self._steps = 0
        self._own_seconds = 0.0
        self._seconds: deque[float] = deque(maxlen=HISTORY_LENGTH)
        self._bubbles: deque[float] = deque(maxlen=HISTORY_LENGTH)

    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """Measure a step on a batch. The optimizer comes after it."""
        if self._saved is None:
            self._saved = self._saved_bytes(batch)
        self._times.begin_step()
        start = time.perf_counter()
        with self._pipeline.observe(self._times if self._steps else self._saved):
            yield
        if self._pipeline.device.type == "cuda":
            torch.cuda.synchronize(self._pipeline.device)
        self._own_seconds = time.perf_counter() - start

    def own_figures(self) -> list[float]:
        """What this process knows of the step that is done: its seconds, and those in which a rank computed."""
        times = self._times.end_step()
        return [self._own_seconds, statistics.fmean(map(times.busy, self._pipeline.ranks))]

    def end_step(self, by_rank: list[list[float]]) -> float:
        """Take the `own_figures` of all ranks. Returns the seconds until the last one was done."""
        seconds = max(step_seconds for step_seconds, _ in by_rank)
        if self._steps:
            self._seconds.append(seconds)
            self._bubbles.append(1 - statistics.fmean(busy for _, busy in by_rank) / seconds)
        elif self._pipeline.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._pipeline.device)
        self._steps += 1
        return seconds

    def measured(self) -> MeasuredRun:
        """Return what the steps of all ranks took so far. Collective: every process must call it."""
        schedule = self._pipeline.schedule
        keys = [(stage, kind) for stage in range(schedule.stages) for kind in COMPUTING]
        ranks = range(schedule.ranks)
        medians = self._times.medians()
        peaks = [self._saved.peak(rank) if self._saved and self._holds(rank) else None for rank in ranks]
        row = [medians.get(key, _NONE) for key in keys]
        row += [self._state(rank) if self._holds(rank) else _NONE for rank in ranks]
        row += [_NONE if peak is None else peak for peak in peaks]
        row += [self._part(stage) for stage in range(schedule.stages)]
        gpu = self._pipeline.device.type == "cuda"
        row.append(torch.cuda.max_memory_allocated(self._pipeline.device) if gpu else _NONE)
        rows = self._pipeline.gather(row)
        figures = list(map(max, zip(*rows, strict=True)))
        parts = iter(figures)
        times, state, saved, stage_parts = (
            list(islice(parts, count)) for count in (len(keys), len(ranks), len(ranks), schedule.stages)
        )
        return MeasuredRun(
            steps=len(self._seconds),
            times={key: figure for key, figure in zip(keys, times, strict=True) if figure != _NONE},
            step=statistics.median(self._seconds) if self._seconds else None,
            state=tuple(map(int, state)),
            saved=tuple(None if peak == _NONE else int(peak) for peak in saved),
            allocated=tuple(int(process_row[-1]) for process_row in rows) if gpu else (),
            processes=len(rows),
            kernels=self._kernels,
            bubble=statistics.median(self._bubbles) if self._bubbles else None,
            collectives=self._collectives(),
            parts=tuple(stage_parts),
            tensor_ranks=tensor_ranks(self._pipeline.stages),
            precision=self._precision,
        )

    def _collectives(self) -> dict[tuple[int, CollectiveKind], MeasuredCollective]:
        """The collectives of all ranks. Collective: every process must call it."""
        medians = self._times.medians()
        local_text = json.dumps([[*key, medians[key], sent] for key, sent in self._times.messages.items()])
        return {
            (stage, CollectiveKind(kind)): MeasuredCollective(
                seconds, tuple(Message(operation, size, tuple(ranks)) for operation, size, ranks in sent)
            )
            for text in self._pipeline.gather_text(local_text)
            for stage, kind, seconds, sent in json.loads(text)
        }

    def kernels(self) -> tuple[list[str], bool]:
        """Return for each stage and block what is compiled, and whether all is. Collective: every process calls it."""
        counts = self._pipeline.kernels_report()
        local_text = json.dumps([[str(count), not (count.autograd or count.inlined)] for count in counts])
        rows = [row for text in self._pipeline.gather_text(local_text) for row in json.loads(text)]
        return [line for line, _ in rows], all(is_compiled for _, is_compiled in rows)

    def _saved_bytes(self, batch: Batch) -> SavedBytes:
        modules = self._pipeline.stages.values()
        state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        return SavedBytes(
            [*map(local, state), *output_tensors(batch).values()],
            lambda: [local(parameter.detach()) for module in modules for parameter in module.parameters()],
        )

    def _holds(self, rank: int) -> bool:
        return any(self._pipeline.schedule.placement[stage] == rank for stage in self._pipeline.stages)

    def _part(self, stage: int) -> float:
        """Return the part of a stage's parameters that this process has, by bytes, if it has the stage."""
        if stage not in self._pipeline.stages:
            return _NONE
        parameters = list(self._pipeline.stages[stage].parameters())
        total_bytes = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        return sum(local(parameter.detach()).nbytes for parameter in parameters) / total_bytes if total_bytes else 1.0

    def _state(self, rank: int) -> int:
        """Return the bytes of a rank's parameters, buffers, gradients and optimizer state."""
        pipeline = self._pipeline
        modules = [module for stage, module in pipeline.stages.items() if pipeline.schedule.placement[stage] == rank]
        parameters = {parameter: None for module in modules for parameter in module.parameters()}
        state: list[Tensor] = [*parameters, *dict.fromkeys(buffer for module in modules for buffer in module.buffers())]
        state += [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            state += output_tensors(self._optimizer.state.get(parameter, {})).values()
        return sum(local(tensor).nbytes for tensor in state)
