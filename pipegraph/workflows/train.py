"""Training steps on a package, and what they took: the work of ``pipegraph run``."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipegraph.cost.hardware import Hardware
from pipegraph.cost.model_output import mean_square, output_tensors
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.kernels.sharded import local
from pipegraph.package import Package
from pipegraph.progress import track
from pipegraph.runtime.measurements import COMPUTING, ActionTimes, MeasuredRun, SavedBytes
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.processes.group import TIMEOUT
from pipegraph.runtime.processes.rank_grid import DIMENSIONS, PIPELINE, RankGrid
from pipegraph.runtime.processes.world import local_device, make_mesh
from pipegraph.schedule import Schedule
from pipegraph.tracing.recording.profiler import LoopProfiler
from pipegraph.workflows.batch import batch_from_manifest, batch_from_source, explain_model_mismatch, source_loss
from pipegraph.workflows.profile import profile

_NONE = -1.0  # for an unknown figure, when processes exchange them


@dataclass(frozen=True)
class TrainingStep:
    """The loss of a step, and its seconds until the last rank was done, without the optimizer."""

    index: int
    loss: float
    seconds: float

    def __str__(self) -> str:
        return f"step {self.index}   loss {self.loss:.6f}   {self.seconds:.3f} s"


class Training:
    """Training on one batch with AdamW. Collective: every process makes one, and all make the same calls.

    Recompute is as the package was planned.

    Args:
        package: what to train.
        schedule: the order of the work.
        source: the model whose example batch and loss to use; by default seeded inputs and the outputs' mean square.
        device: ``cpu`` or ``cuda``.
        learning_rate: AdamW's.
        kernels: as in `Pipeline`.
        timeout: seconds that a rank waits for another one.
        weights: folder of a Hugging Face checkpoint to read weights from; by default the package's own.
        check_weights: as in `Pipeline`.
        strict: whether it is an error if a stage is left to autograd.
        grid: the processes; by default those of one pipeline. Every data-parallel rank trains on the same batch.
    """

    def __init__(
        self,
        package: Package,
        schedule: Schedule,
        source: ModelSource | None = None,
        device: str = "cpu",
        learning_rate: float = 1e-3,
        kernels: str = "inductor",
        timeout: float | None = None,
        weights: Path | None = None,
        check_weights: bool = True,
        strict: bool = False,
        grid: RankGrid | None = None,
    ) -> None:
        manifest, microbatches = package.manifest, schedule.microbatches
        self._source = source
        if source is None:
            self._batch = batch_from_manifest(manifest, microbatches)
        else:
            self._batch = batch_from_source(source, microbatches)
        seconds = TIMEOUT if timeout is None else timeout
        is_mesh = grid is not None and grid.size > grid.length(PIPELINE)
        mesh = make_mesh(grid, device, seconds) if grid is not None and is_mesh else None
        self._prints = mesh is None or not any(mesh.get_local_rank(name) for name in DIMENSIONS if name != PIPELINE)
        self._pipeline = Pipeline(
            package,
            schedule,
            loss_fn=mean_square if source is None else source_loss(source),
            device=device,
            kernels=kernels,
            recompute=manifest.prediction.recompute if manifest.prediction else "min-cut",
            timeout=seconds,
            weights=weights,
            check_weights=check_weights,
            strict=strict,
            mesh=mesh,
        )
        self._device = local_device(device)
        self._optimizer = torch.optim.AdamW([{"params": list(self._pipeline.parameters())}], lr=learning_rate)
        modules = self._pipeline.stages.values()
        state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        batch = output_tensors([self._batch.args, self._batch.kwargs, self._batch.target]).values()
        self._saved = SavedBytes(
            [*map(local, state), *batch],
            lambda: [local(parameter.detach()) for module in modules for parameter in module.parameters()],
        )
        self._times = ActionTimes(self._device)
        self._kernels = kernels
        self._seconds: list[float] = []
        self._bubbles: list[float] = []
        self._profile: LoopProfiler | None = None

    @property
    def knows_loss(self) -> bool:
        """Return whether this process knows the loss and is the one that prints it: the first of those that do."""
        return self._prints and self._pipeline.package.manifest.stages[-1].index in self._pipeline.stages

    @contextmanager
    def profiled(self, folder: Path, steps: int, hardware: Hardware | None = None) -> Iterator[Path]:
        """Record the next ``steps`` steps, without the first, into a new folder inside ``folder``, and yield that one.

        A step is predicted with the links of ``hardware``.
        """
        with profile(self._pipeline, folder, warmup=1, active=steps - 1, hardware=hardware) as self._profile:
            yield self._profile.folder
        self._profile = None

    def steps(self, count: int) -> Iterator[TrainingStep]:
        """Run so many steps, and yield each in the process that knows the loss.

        The first step compiles, and measures saved bytes; in the others every action is timed.
        """
        for index in track("training steps", range(len(self._seconds), len(self._seconds) + count)):
            self._optimizer.zero_grad()
            self._times.begin_step()
            start = time.perf_counter()
            observed = self._pipeline.observe(self._times if index else self._saved)
            with observed, explain_model_mismatch(self._pipeline.package.manifest, self._source):
                result = self._pipeline.step(*self._batch.args, target=self._batch.target, **self._batch.kwargs)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = time.perf_counter() - start
            self._optimizer.step()
            times = self._times.end_step()
            busy = statistics.fmean(map(times.busy, self._pipeline.ranks))
            # This synchronizes the ranks: they begin the next step together.
            by_rank = self._pipeline.gather([seconds, busy])
            self._seconds.append(max(each for each, _ in by_rank))
            if index:
                self._bubbles.append(1 - statistics.fmean(each for _, each in by_rank) / self._seconds[-1])
            if index == 0 and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            if self._profile is not None:
                self._profile.step(result)
            if result.loss is not None and self._prints:
                yield TrainingStep(index, float(result.loss), self._seconds[-1])

    def measured(self) -> MeasuredRun:
        """Return what the steps of all ranks took so far. Collective: every process must call it."""
        schedule = self._pipeline.schedule
        keys = [(stage, kind) for stage in range(schedule.stages) for kind in COMPUTING]
        ranks = range(schedule.ranks)
        medians = self._times.medians()
        saved = [self._saved.peak(rank) if self._holds(rank) else None for rank in ranks]
        row = [medians.get(key, _NONE) for key in keys]
        row += [self._state(rank) if self._holds(rank) else _NONE for rank in ranks]
        row += [_NONE if each is None else each for each in saved]
        gpu = self._device.type == "cuda"
        row.append(torch.cuda.max_memory_allocated(self._device) if gpu else _NONE)
        rows = self._pipeline.gather(row)
        known = list(map(max, zip(*rows, strict=True)))
        times, state, kept = known[: len(keys)], known[len(keys) : -1 - len(ranks)], known[-1 - len(ranks) : -1]
        counted = self._seconds[1:]
        return MeasuredRun(
            steps=len(counted),
            times={key: figure for key, figure in zip(keys, times, strict=True) if figure != _NONE},
            step=statistics.median(counted) if counted else None,
            state=tuple(map(int, state)),
            saved=tuple(None if each == _NONE else int(each) for each in kept),
            allocated=tuple(int(each[-1]) for each in rows) if gpu else (),
            processes=len(rows),
            kernels=self._kernels,
            bubble=statistics.median(self._bubbles) if self._bubbles else None,
        )

    def kernels(self) -> tuple[list[str], bool]:
        """Return for each stage and block what is compiled, and whether all is. Collective: every process calls it."""
        counts = self._pipeline.kernels_report()
        own = json.dumps([[str(count), not (count.autograd or count.inlined)] for count in counts])
        rows = [row for text in self._pipeline.gather_text(own) for row in json.loads(text)]
        return [line for line, _ in rows], all(is_compiled for _, is_compiled in rows)

    def _holds(self, rank: int) -> bool:
        return any(self._pipeline.schedule.placement[stage] == rank for stage in self._pipeline.stages)

    def _state(self, rank: int) -> int:
        """Return the bytes of a rank's parameters, buffers, gradients and optimizer state."""
        pipeline = self._pipeline
        modules = [each for stage, each in pipeline.stages.items() if pipeline.schedule.placement[stage] == rank]
        parameters = {parameter: None for module in modules for parameter in module.parameters()}
        held: list[Tensor] = [*parameters, *dict.fromkeys(buffer for module in modules for buffer in module.buffers())]
        held += [parameter.grad for parameter in parameters if parameter.grad is not None]
        for parameter in parameters:
            held += output_tensors(self._optimizer.state.get(parameter, {})).values()
        return sum(local(tensor).nbytes for tensor in held)
