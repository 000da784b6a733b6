"""Training steps on a package: the work of ``pipegraph run``."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from pipegraph.cost.hardware import Hardware, known_peak
from pipegraph.cost.model_output import output_tensors, returned_loss
from pipegraph.device import Device
from pipegraph.errors import BatchError, PipegraphError, RuntimeFault, SourceError
from pipegraph.graph.sources.model_source import ModelSource
from pipegraph.kernels.sharded import local
from pipegraph.package import Package
from pipegraph.progress import report_progress
from pipegraph.runtime.checkpoint.extra_state import is_stateful
from pipegraph.runtime.checksums import checksum
from pipegraph.runtime.measurements import (
    COMPUTING,
    HISTORY_LENGTH,
    ActionTimes,
    MeasuredCollective,
    MeasuredRun,
    MeasuredState,
    Message,
    SavedBytes,
)
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.runtime.precision import changes_dtypes
from pipegraph.runtime.processes.group import TIMEOUT, ConnectionLost
from pipegraph.runtime.processes.rank_grid import DIMENSIONS, PIPELINE, REPLICATE, SHARD, RankGrid
from pipegraph.runtime.processes.world import make_mesh
from pipegraph.runtime.tensor_parallel import tensor_ranks
from pipegraph.schedule import CollectiveKind, Schedule
from pipegraph.torch_private.pytrees import pytree
from pipegraph.tracing.recording.profiler import LoopProfiler
from pipegraph.tracing.recording.step_figures import batch_sizes, model_flops
from pipegraph.units import format_count, format_duration
from pipegraph.workflows.batch import Batch, batch_from_manifest, batch_from_source, explain_model_mismatch
from pipegraph.workflows.profile import profile
from pipegraph.workflows.run_checkpoints import (
    CheckpointOptions,
    Evaluation,
    RunCheckpoints,
    Termination,
    TrainingLog,
    TrainingStep,
)
from pipegraph.workflows.training_functions import errors_named, loss_with_metrics, make_optimizer, training_function

# ---- run measurement -------------------------------------------------------------------------------------------------
# What the steps of a run take: times of actions, saved bytes, state, and what is compiled.


class RunMeasurement:
    """Measures the steps of a pipeline.

    The first step compiles, and its saved bytes are measured; in the others every action is timed.

    Args:
        precision: what the pipeline computes with, if not with the package's own dtypes.
    """

    def __init__(self, pipe: Pipeline, optimizer: torch.optim.Optimizer, precision: str | None = None) -> None:
        self._pipeline, self._optimizer = pipe, optimizer
        self._precision = precision
        self._device = Device(pipe.device)
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
        self._device.synchronize()
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
        else:
            self._device.reset_peak()
        self._steps += 1
        return seconds

    def measured(self) -> MeasuredRun:
        """Return what the steps of all ranks took so far. Collective: every process must call it."""
        schedule, medians, messages = self._pipeline.schedule, self._times.medians(), self._times.messages
        ranks = [rank for rank in range(schedule.ranks) if self._holds(rank)]
        peaks = [(rank, self._saved.peak(rank)) for rank in ranks if self._saved]
        local_figures = {
            "times": [(*key, seconds) for key, seconds in medians.items()],
            "state": [(rank, astuple(self._state(rank))) for rank in ranks],
            "saved": [(rank, peak) for rank, peak in peaks if peak is not None],
            "parts": [(stage, self._part(stage)) for stage in self._pipeline.stages],
            "collectives": [(*key, medians[key], sent) for key, sent in messages.items()],
            "allocated": None if self._device.is_cpu else self._device.peak_bytes,
        }
        processes = [json.loads(text) for text in self._pipeline.gather_text(json.dumps(local_figures))]

        def largest(name: str) -> dict[tuple[Any, ...], Any]:
            """Of a mesh several processes have each stage."""
            figures: dict[tuple[Any, ...], Any] = {}
            for *key, figure in (row for process in processes for row in process[name]):
                figures[*key] = max(figure, figures.get((*key,), figure))
            return figures

        times, state, saved, parts = map(largest, ("times", "state", "saved", "parts"))
        keys = [(stage, kind) for stage in range(schedule.stages) for kind in COMPUTING]
        return MeasuredRun(
            steps=len(self._seconds),
            times={key: times[key] for key in keys if key in times},
            step=statistics.median(self._seconds) if self._seconds else None,
            state=tuple(MeasuredState(*state[rank,]) for rank in range(schedule.ranks)),
            saved=tuple(saved.get((rank,)) for rank in range(schedule.ranks)),
            allocated=() if self._device.is_cpu else tuple(process["allocated"] for process in processes),
            processes=len(processes),
            kernels=self._pipeline.kernels,
            bubble=statistics.median(self._bubbles) if self._bubbles else None,
            collectives={
                (stage, CollectiveKind(kind)): MeasuredCollective(
                    seconds, tuple(Message(operation, size, tuple(ranks)) for operation, size, ranks in sent)
                )
                for process in processes
                for stage, kind, seconds, sent in process["collectives"]
            },
            parts=tuple(parts[stage,] for stage in range(schedule.stages)),
            tensor_ranks=tensor_ranks(self._pipeline.stages),
            precision=self._precision,
        )

    def kernels(self) -> tuple[list[str], bool]:
        """Return for each stage and block what is compiled, and whether all is. Collective: every process calls it."""
        counts = self._pipeline.kernels_report()
        local_text = json.dumps([[str(count), not (count.autograd or count.inlined)] for count in counts])
        rows = [row for text in self._pipeline.gather_text(local_text) for row in json.loads(text)]
        return [line for line, _ in rows], all(is_compiled for _, is_compiled in rows)

    def _saved_bytes(self, batch: Batch) -> SavedBytes:
        modules = self._pipeline.stages.values()
        state = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]

        def gathered() -> list[Tensor]:
            parameters = [local(parameter.detach()) for module in modules for parameter in module.parameters()]
            return [*parameters, *(copy for stage in self._pipeline.stages for copy in self._pipeline.copies_of(stage))]

        return SavedBytes([*map(local, state), *output_tensors(batch).values()], gathered)

    def _holds(self, rank: int) -> bool:
        return any(self._pipeline.schedule.placement[stage] == rank for stage in self._pipeline.stages)

    def _part(self, stage: int) -> float:
        """Return the part of a stage's parameters that this process has, by bytes."""
        parameters = list(self._pipeline.stages[stage].parameters())
        total_bytes = sum(parameter.numel() * parameter.itemsize for parameter in parameters)
        return sum(local(parameter.detach()).nbytes for parameter in parameters) / total_bytes if total_bytes else 1.0

    def _state(self, rank: int) -> MeasuredState:
        """Return the bytes that a rank holds between two steps."""
        pipeline = self._pipeline
        stages = [stage for stage in pipeline.stages if pipeline.schedule.placement[stage] == rank]
        modules = [pipeline.stages[stage] for stage in stages]
        parameters = {parameter: None for module in modules for parameter in module.parameters()}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [
            tensor
            for parameter in parameters
            for tensor in output_tensors(self._optimizer.state.get(parameter, {})).values()
        ]
        buffers = dict.fromkeys(buffer for module in modules for buffer in module.buffers())
        copies = [copy for stage in stages for copy in pipeline.copies_of(stage)]
        kinds: tuple[Iterable[Tensor], ...] = (*parameters, *copies), gradients, moments, buffers
        return MeasuredState(*(sum(local(tensor).nbytes for tensor in kind) for kind in kinds))


# ---- training data ---------------------------------------------------------------------------------------------------
# The batches that a run trains on: those of a model file's ``data(rank, world)``, or its example again and again.


_END: Final = object()


class TrainingData:
    """Batches one after the other.

    Args:
        batches: of this process.
        convert: makes the arguments of a step of what `batches` yields.
        named: what messages call them.
    """

    def __init__(
        self, batches: Iterable[Any], convert: Callable[[Any], Batch] = lambda batch: batch, named: str = "the example"
    ) -> None:
        self._batches, self._convert, self.named = batches, convert, named
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    @classmethod
    def from_source(cls, source: ModelSource | None, name: str, rank: int, world: int) -> TrainingData | None:
        """The batches that a model file's function returns for a data-parallel rank; None without that function."""
        function = training_function(source, name)
        if source is None or function is None:
            return None
        batches, named = function(rank, world), f"{name}({rank}, {world}) of {source.name}"
        if not isinstance(batches, Iterable):
            raise SourceError(
                f"{named} returned a {type(batches).__name__}, which holds no batches.",
                "a list, a generator, a torch DataLoader or any other iterable.",
            )
        has_target = source.example_target is not None
        return cls(batches, lambda item: _step_batch(item, has_target, named), named)

    @classmethod
    def repeated(cls, batch: Batch) -> TrainingData:
        """One batch without end."""
        return cls(itertools.repeat(batch))

    @property
    def stateful(self) -> Any | None:
        """The object with the position as its state, such as a loader of torchdata; None without such an object."""
        return self._batches if is_stateful(self._batches) else None

    def go_on_from(self, count: int) -> None:
        """Skip the first ``count`` batches, unless the position was restored from a state. Call it before `take`."""
        while self.stateful is None and self._position < count and self.take() is not None:
            pass
        self._position = count

    def take(self) -> Batch | None:
        """The next batch; None after the last. Raises SourceError if it is not a batch."""
        with errors_named(f"{self.named}: batch {self._position}"):
            if self._iterator is None:
                self._iterator = iter(self._batches)
            item = next(self._iterator, _END)
        if item is _END:
            return None
        self._position += 1
        return self._convert(item)

    @property
    def last(self) -> str:
        """How messages name the batch that was taken last."""
        return f"batch {self._position - 1} of {self.named}"


def fingerprint(batch: Batch) -> int:
    """A number of 48 bits that differs for batches with other values. It waits for a GPU."""
    number = checksum(tuple(output_tensors(batch).values()), 0)
    return 0 if number is None else int(number) % 2**48


def _step_batch(item: Any, has_target: bool, named: str) -> Batch:
    """The arguments of a step: inputs as `example_inputs` has them, or a pair of them and the target."""
    inputs, target = item, None
    if has_target:
        if not isinstance(item, tuple | list) or len(item) != 2:
            kind = f"{len(item)} things" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise SourceError(
                f"a batch of {named} is {kind}; in a file with example_target it is a pair of inputs and target.",
                "yield inputs, target",
            )
        inputs, target = item
    if isinstance(inputs, dict):
        return Batch((), inputs, target)
    if not isinstance(inputs, tuple | list):
        return Batch((inputs,), {}, target)
    if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
        return Batch(inputs[0], inputs[1], target)
    return Batch(tuple(inputs), {}, target)


# ---- agreed batches --------------------------------------------------------------------------------------------------
# The batches that all ranks train on together: a step begins if each rank has one that the pipeline takes.
#
# rank 0   batch 7 ──────────┐
# rank 1   batch 7, refused ─┴─ known to all ─▶ every rank raises before the step sends anything, and can still save


class AgreedBatches:
    """The batches of one rank, as far as all ranks have one.

    Args:
        data: of this rank.
        place: this data-parallel rank.
        places: how many there are.
    """

    def __init__(self, pipe: Pipeline, data: TrainingData, place: int, places: int) -> None:
        self._pipe, self._data, self._place, self._places = pipe, data, place, places
        self._begun = False
        self._accepted_kinds: set[Any] = set()  # shapes and dtypes of batches that fit

    def take(self, explained: AbstractContextManager[None]) -> Batch | None:
        """The next batch; None on all ranks if one of them has none left. Collective.

        Args:
            explained: a context in which batches are checked.

        Raises:
            PipegraphError: data cannot be read, or do not fit; or, on all other ranks, those of one do not.
        """
        batch, problem, mark = None, None, 0
        try:
            batch = self._data.take()
            if batch is not None:
                mark = 0 if self._begun else fingerprint(batch)
                with explained:
                    self._check(batch)
        except PipegraphError as error:
            problem = error
        rows = self._pipe.gather([batch is not None, self._place, mark, problem is not None], everywhere=True)
        if problem is not None:
            raise problem
        failed = next((rank for rank, row in enumerate(rows) if row[3]), None)
        if failed is not None:
            message = f"rank {failed} has no batch to train on.\nTry: what the message of rank {failed} says."
            # By this cause a launcher knows that another rank failed first.
            raise SourceError(message) from ConnectionLost(failed, "its data failed")
        if not all(row[0] for row in rows):
            return None
        if len({(place, mark) for _, place, mark, _ in rows}) > self._places:
            raise SourceError(
                f"{self._data.last} is not the same on all ranks of a pipeline, which each read it: what is random in "
                "it has to be seeded.",
                "generator=torch.Generator().manual_seed(rank)",
            )
        self._begun = True
        return batch

    def _check(self, batch: Batch) -> None:
        """Raise BatchError for a batch of a new kind that a step would refuse."""
        tensors: dict[str, Tensor] = output_tensors(batch)
        kind = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if kind not in self._accepted_kinds:
            self._pipe.check_batch(*batch.args, target=batch.target, **batch.kwargs)
            self._accepted_kinds.add(kind)


# ---- pace ------------------------------------------------------------------------------------------------------------
# How fast a training loop is.


class Pace:
    """Counts the steps of a loop and their tokens, with all that is between them: data, optimizer, checkpoints.

    The first step, which compiles, is left out of the figures.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._tokens = 0.0
        self._began = 0.0

    def step_done(self, tokens: float = 0.0) -> None:
        """Count a step on this number of tokens."""
        if self.steps == 0:
            self._began = time.monotonic()
        else:
            self._tokens += tokens
        self.steps += 1

    @property
    def tokens_per_second(self) -> float | None:
        """None if no tokens were counted yet."""
        return self._tokens / (time.monotonic() - self._began) if self._tokens else None

    def seconds_left(self, steps: int) -> float | None:
        """How long this number of further steps will take; None if that is not known yet."""
        if self.steps < 2:
            return None
        return (time.monotonic() - self._began) / (self.steps - 1) * steps

    def text(self, steps: int | None) -> str:
        """The figures, with the time left if the number of further steps is known; empty before the first figure."""
        rate, remaining_seconds = self.tokens_per_second, None if steps is None else self.seconds_left(steps)
        parts = [f"{format_count(rate)} tokens/s"] if rate is not None else []
        parts += [f"{format_duration(remaining_seconds)} left"] if remaining_seconds is not None else []
        return ", ".join(parts)


# ---- train -----------------------------------------------------------------------------------------------------------


_RECORDED_STEPS: Final = 3  # of a run with data, because no viewer takes a trace of days

_Entry = TypeVar("_Entry", TrainingStep, Evaluation)


class Training:
    """Training on the data of a model file, or on one batch. Collective: every process makes one, and all make the
    same calls.

    Recompute is as the package was planned.

    Args:
        package: what to train.
        schedule: the order of the work.
        source: the model file whose loss, metrics, data or else example, optimizer and scheduler to use; by default
            seeded inputs, `default_loss` and AdamW.
        device: ``cpu`` or ``cuda``.
        learning_rate: of AdamW, 1e-3 by default. Not allowed if the model file has an optimizer.
        timeout: seconds that a rank waits for another one.
        grid: the processes; by default those of one pipeline. Without data, every data-parallel rank trains on the same
            batch.
        checkpoints: where the run is saved and continues from; by default nowhere.
        options: other arguments of `Pipeline`: kernels, weights, check_weights, strict, cuda_graphs,
            dynamic, seed, precision.

    Attributes:
        done: the steps that are done, those before the checkpoint included.
        resumed_from: the checkpoint that was read; None if the run began at its first step.
        has_data: whether the model file gives data.
        mesh: the lengths of its dimensions other than the pipeline's; empty without a grid.
        was_terminated: whether SIGTERM ended `steps`.

    Raises:
        SourceError: a function of the model file raises, or returns a value that training cannot use.
        CheckpointError: the run cannot continue from its checkpoints.
    """

    def __init__(
        self,
        package: Package,
        schedule: Schedule,
        source: ModelSource | None = None,
        device: str = "cpu",
        learning_rate: float | None = None,
        timeout: float | None = None,
        grid: RankGrid | None = None,
        checkpoints: CheckpointOptions | None = None,
        **options: Any,
    ) -> None:
        self._source = source
        seconds = TIMEOUT if timeout is None else timeout
        is_mesh = grid is not None and grid.size > grid.length(PIPELINE)
        mesh = make_mesh(grid, device, seconds) if grid is not None and is_mesh else None
        self._prints = mesh is None or not any(mesh.get_local_rank(name) for name in DIMENSIONS if name != PIPELINE)
        self._share = (0, 1)  # this data-parallel rank, and how many there are
        if grid is not None and mesh is not None:
            place = mesh.get_local_rank(REPLICATE) * grid.length(SHARD) + mesh.get_local_rank(SHARD)
            self._share = place, grid.length(REPLICATE, SHARD)
        self.mesh = {} if grid is None else {name: grid.length(name) for name in DIMENSIONS if name != PIPELINE}
        self._pipeline = Pipeline(
            package,
            schedule,
            loss_fn=loss_with_metrics(source),
            loss_weight=training_function(source, "loss_weight"),
            loss_over=(source.training.loss_over if source is not None else None) or "rows",
            device=device,
            timeout=seconds,
            mesh=mesh,
            **options,
        )
        self._optimizer, self._scheduler = make_optimizer(self._pipeline, source, learning_rate)
        data = TrainingData.from_source(source, "data", *self._share)
        self.has_data = data is not None
        if data is None:
            count, manifest = schedule.microbatches, package.manifest
            example = batch_from_source(source, count, manifest) if source else batch_from_manifest(manifest, count)
            data = TrainingData.repeated(example)
        self._data = data
        self._batches = AgreedBatches(self._pipeline, data, *self._share)
        precision = options.get("precision")  # the manifest of the pipeline's package is of this precision
        precision = precision if changes_dtypes(precision, package.manifest) else None
        self._measurement = RunMeasurement(self._pipeline, self._optimizer, precision)
        self._pace = Pace()
        self._profile: LoopProfiler | None = None
        self.done, self._evaluated = 0, 0
        self._processes = 0
        self.resumed_from: Path | None = None
        self._termination = Termination()
        self.was_terminated = False
        self._checkpoints: RunCheckpoints | None = None
        self._log: TrainingLog | None = None
        if checkpoints is not None:
            self._resume(checkpoints)

    @property
    def knows_loss(self) -> bool:
        """Return whether this process knows the loss and is the one that prints it: the first of those that do."""
        return self._prints and self._pipeline.package.manifest.stages[-1].index in self._pipeline.stages

    def peak_flops(self) -> float | None:
        """The peak of the devices of all processes, in floating-point operations per second of the dtype of most of the
        model's values; None if it is not known, or before a step."""
        manifest = self._pipeline.package.manifest
        dtypes = Counter(value.dtype for value in manifest.values.values() if "float" in value.dtype)
        dtype = dtypes.most_common(1)[0][0] if dtypes else "float32"
        if dtype == "float32" and torch.get_float32_matmul_precision() != "highest":
            dtype = "tfloat32"
        peak = known_peak(Device(self._pipeline.device).name, dtype)
        return peak * self._processes if peak and self._processes else None

    @property
    def has_loss(self) -> bool:
        """Whether the model file has a loss function, or the model returns its loss."""
        manifest = self._pipeline.package.manifest

        def empty(name: str | None) -> Tensor | None:
            value = None if name is None else manifest.values[name]
            if value is None or value.is_constant:
                return None
            return torch.empty([1] * len(value.shape), dtype=getattr(torch, value.dtype), device="meta")

        has_function = self._source is not None and self._source.loss_fn is not None
        return has_function or returned_loss(pytree.tree_map(empty, manifest.outputs)) is not None

    @property
    def schedule(self) -> Schedule:
        """The schedule with the collectives of its stages."""
        return self._pipeline.schedule_with_collectives

    @contextmanager
    def profiled(self, folder: Path, steps: int | None, hardware: Hardware | None = None) -> Iterator[Path]:
        """Record the next ``steps`` steps, without the first, into a new folder inside ``folder``, and yield that one.

        With data, three steps are recorded, and the scalars of all. A step is predicted with the links of ``hardware``.
        """
        active = _RECORDED_STEPS if steps is None or self.has_data else steps - 1
        with profile(self._pipeline, folder, warmup=1, active=active, hardware=hardware) as self._profile:
            yield self._profile.folder
        self._profile = None

    def steps(self, count: int | None = None) -> Iterator[TrainingStep | Evaluation]:
        """Run this number of steps, or until the data ends, and yield each in the process that knows the loss.

        With checkpoints the run is saved between steps and at its end, and SIGTERM ends it after the current step.

        Raises:
            BatchError: the capture does not allow a batch.
            SourceError: the data ends before that number of steps.
            CheckpointError: the run cannot be saved.
        """
        last = None if count is None else self.done + count
        with self._termination.awaited() if self._checkpoints else nullcontext():
            while self.done != last and not self.was_terminated:
                self._report(last)
                batch = self._next_batch()
                if batch is None:
                    break
                step = self._step(batch, last)
                if step is not None:
                    yield self._logged(step)
                is_due = self._checkpoints is not None and self._checkpoints.is_due(self.done)
                if is_due and self.done != last and not self.was_terminated:
                    yield from self._evaluate()
                    self._save(background=True)
            self._report(last)
            if not self.was_terminated:  # its sender waits for no evaluation
                yield from self._evaluate()
            self._save(background=False)
        if self.done < (last or 1) and not self.was_terminated:
            raise SourceError(self._too_few_batches(last or 1))

    def measured(self) -> MeasuredRun:
        """Return what the steps of all ranks took so far. Collective: every process must call it."""
        return self._measurement.measured()

    def kernels(self) -> tuple[list[str], bool]:
        """Return for each stage and block what is compiled, and whether all is. Collective: every process calls it."""
        return self._measurement.kernels()

    def _resume(self, options: CheckpointOptions) -> None:
        """Read the newest checkpoint, if there is one."""
        extra = {"scheduler": self._scheduler, "data": self._data.stateful}
        stateful_objects = {name: stateful for name, stateful in extra.items() if stateful is not None}
        self._checkpoints = RunCheckpoints(options, self._pipeline, self._optimizer, stateful_objects)
        self.resumed_from = self._checkpoints.go_on()
        self.done = self._evaluated = self._checkpoints.saved
        self._data.go_on_from(self.done)
        if self.knows_loss:
            self._log = TrainingLog(options.folder, self.done)

    def _save(self, background: bool) -> None:
        if self._checkpoints is not None and self.done:
            self._checkpoints.save(self.done, background)

    def _report(self, last: int | None) -> None:
        pace = self._pace.text(None if last is None else last - self.done)
        report_progress("training steps" + (f", {pace}" if pace else ""), self.done, last or 0)

    def _next_batch(self) -> Batch | None:
        """The next batch of this process; None on all of them if one has none left.

        Raises:
            PipegraphError: it cannot be trained on, on all of them. What is done is saved.
        """
        if not self.has_data:
            return self._data.take()
        try:
            return self._batches.take(self._explained(self._data))
        except RuntimeFault:
            raise
        except PipegraphError as error:
            self._save(background=False)
            raise type(error)(f"{error.problem}{self._saved_note()}", error.advice) from error.__cause__ or error

    def _step(self, batch: Batch, last: int | None) -> TrainingStep | None:
        self._optimizer.zero_grad()
        with self._measurement.step(batch), self._explained(self._data):
            result = self._pipeline.step(*batch.args, target=batch.target, **batch.kwargs)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        # This synchronizes the ranks: they begin the next step together.
        figures = [*self._measurement.own_figures(), self._tokens(), self._termination.is_requested]
        rows = self._pipeline.gather(figures, everywhere=True)
        self._processes = len(rows)
        seconds = self._measurement.end_step([row[:2] for row in rows])
        self._pace.step_done(statistics.fmean(row[2] for row in rows) * self._share[1])
        self.was_terminated = any(row[3] for row in rows)
        self.done += 1
        if self._profile is not None:
            self._profile.step(result)
        if result.loss is None or not self.knows_loss:
            return None
        sizes = self._pipeline.last_sizes
        flops = None if sizes is None else model_flops(self._pipeline.package.manifest, sizes)
        return TrainingStep(
            self.done - 1,
            float(result.loss),
            seconds,
            {name: float(metric) for name, metric in (result.metrics or {}).items()},
            self._pace.tokens_per_second,
            self._pace.seconds_left(last - self.done) if last is not None and self.has_data else None,
            None if flops is None or not seconds else flops * self._share[1] / seconds,
        )

    def _tokens(self) -> int:
        """The tokens of the step that is done, of this process's share; 0 if they are not counted."""
        sizes = self._pipeline.last_sizes
        if not self.has_data or sizes is None:
            return 0
        return batch_sizes(self._pipeline.package.manifest, sizes)[1] or 0

    def _evaluate(self) -> Iterator[Evaluation]:
        """Yield the mean loss over the evaluation data, if the file has some, in the process that knows it."""
        if self._evaluated == self.done:
            return
        self._evaluated = self.done
        data = TrainingData.from_source(self._source, "evaluation_data", *self._share)
        if data is None:
            return
        results = []
        with evaluating(self._pipeline), self._explained(data):
            batch = data.take()
            while all(row[0] for row in self._pipeline.gather([batch is not None], everywhere=True)):
                assert batch is not None, "all ranks have one"
                results.append(self._pipeline.evaluate(*batch.args, target=batch.target, **batch.kwargs))
                batch = data.take()
        if not results:
            raise SourceError(f"{data.named} has no batch.", "one or more for every data-parallel rank.")
        losses = [(float(result.loss), result.weight or 0.0) for result in results if result.loss is not None]
        if losses and self.knows_loss:
            weight = math.fsum(weight for _, weight in losses)
            loss = math.fsum(loss * weight for loss, weight in losses) / weight
            yield self._logged(Evaluation(self.done - 1, loss))

    def _logged(self, entry: _Entry) -> _Entry:
        if self._log is not None:
            self._log.write(entry)
        return entry

    @contextmanager
    def _explained(self, data: TrainingData) -> Iterator[None]:
        """Name the batch in the error of one that does not fit."""
        try:
            with explain_model_mismatch(self._pipeline.package.manifest, self._source):
                yield
        except BatchError as error:
            if not self.has_data:
                raise
            advice = "batches of the shapes that were captured; or the model split again, with dynamic_shapes"
            raise BatchError(f"{data.last}: {error.problem}", error.advice or advice) from error

    def _saved_note(self) -> str:
        """That what is done is saved, if it is."""
        return f" What is done is saved as step {self.done}." if self._checkpoints is not None and self.done else ""

    def _too_few_batches(self, last: int) -> str:
        fewer = f"--steps {self.done}; or " if self.done else ""
        return (
            f"{self._data.named} ended after {self.done} of {last} steps.{self._saved_note()}\n"
            f"Try: {fewer}data that begins again at its end: while True: yield from loader"
        )


@contextmanager
def evaluating(pipe: Pipeline) -> Iterator[None]:
    """Have the stages of this process in evaluation mode while the body runs."""
    modes = {module: module.training for stage in pipe.stages.values() for module in stage.modules()}
    for stage in pipe.stages.values():
        stage.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
