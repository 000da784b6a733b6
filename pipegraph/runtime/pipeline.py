"""`Pipeline`: a package, a schedule and this process's stages, put together."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pipegraph.errors import ScheduleError, one_line
from pipegraph.kernels import Maker
from pipegraph.kernels.cpu import keep_freed_memory
from pipegraph.package import Manifest, Package
from pipegraph.package.prediction import Prediction
from pipegraph.recompute import describe_stages
from pipegraph.runtime import parameters
from pipegraph.runtime.gradients import checked_norm, clip_grad_norm
from pipegraph.runtime.kernel_makers import graph_recorder, stage_makers, stage_recompute
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction, LossWeight, checked_weight
from pipegraph.runtime.measurements import Observer, ObserverList
from pipegraph.runtime.package_agreement import open_package
from pipegraph.runtime.padding import Padding
from pipegraph.runtime.parallelized_stages import resident_stages
from pipegraph.runtime.pipeline_state import PipelineState
from pipegraph.runtime.prepared_stages import StageRequest, prepare_stages
from pipegraph.runtime.processes.clock import ClockOffset
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import TIMEOUT, lost_connections
from pipegraph.runtime.processes.rank_grid import DATA, DIMENSIONS, RankGrid, single
from pipegraph.runtime.processes.world import LoneProcess, World, guard_of, join_world
from pipegraph.runtime.random_numbers import RandomNumbers
from pipegraph.runtime.rank_options import check_options
from pipegraph.runtime.schedule_choice import resolve_schedule
from pipegraph.runtime.step_data import NO_TARGET, StepRequest, StepResult
from pipegraph.runtime.step_runner import StepRunner
from pipegraph.runtime.step_sizes import StepSizes
from pipegraph.runtime.tensor_parallel import Plan
from pipegraph.schedule import Schedule, build, without_transfers
from pipegraph.schedule.recipes import find_recipe
from pipegraph.units import format_number_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from pipegraph.kernels.kernel_report import KernelCount

# ---- pipeline ranks --------------------------------------------------------------------------------------------------
# The processes of a pipeline: their places in the mesh, and the texts that they exchange.


class PipelineRanks:
    """The part of `Pipeline` that is about its processes."""

    schedule: Schedule
    ranks: tuple[int, ...]
    _processes: World | LoneProcess
    _guard: FaultGuard

    @property
    def grid(self) -> RankGrid:
        """Where the ranks of the mesh are; without a mesh those of this pipeline."""
        return self._processes.grid if isinstance(self._processes, World) else single(self.schedule.ranks)

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """For each rank of the schedule, its number in the grid."""
        if isinstance(self._processes, World):
            return self._processes.pipeline
        return tuple(range(self.schedule.ranks))

    @property
    def dp_rank(self) -> int:
        """The place of this process among the data-parallel ranks, for samplers: which share of a batch it is given."""
        world = self._processes
        return world.grid.line(world.rank, *DATA).index(world.rank) if isinstance(world, World) else 0

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks; 1 without a mesh."""
        world = self._processes
        return world.grid.length(*DATA) if isinstance(world, World) else 1

    def gather(self, figures: Sequence[float], everywhere: bool = False) -> list[list[float]]:
        """The figures of every process of this pipeline, by rank. Collective: all must call it, with equally many.

        No process continues before all have called. In a mesh these are the ranks along `pp`, or all with `everywhere`.
        """
        with self._guard, lost_connections(None, "gather()"):
            return self._processes.gather(figures, *(DIMENSIONS if everywhere else ()))

    def gather_text(self, text: str, everywhere: bool = False) -> list[str]:
        """The texts of the same processes, by rank. Collective: all must call it."""
        with self._guard, lost_connections(None, "gather_text()"):
            return self._processes.gather_text(text, *(DIMENSIONS if everywhere else ()))

    def clock_offset(self) -> ClockOffset:
        """Measure by messages how far this process's clock is from rank 0's. Collective: every rank of the mesh must
        call it."""
        with self._guard, lost_connections(None, "clock_offset()"):
            return self._processes.clock_offset()


# ---- pipeline --------------------------------------------------------------------------------------------------------


# ---- planned schedule ------------------------------------------------------------------------------------------------
# The schedule, microbatches and ranks that a package was planned for, in place of what the caller leaves out.


DEFAULT_SCHEDULE: Final = "1f1b"


class ScheduleChoice(NamedTuple):
    """The arguments of `resolve_schedule`."""

    schedule: str | PathLike[str] | Schedule
    microbatches: int | None
    ranks: int | None


def as_planned(
    manifest: Manifest, schedule: str | PathLike[str] | Schedule | None, microbatches: int | None
) -> ScheduleChoice:
    """Return the choice of a caller, completed by the plan of the package, or by 1F1B and one microbatch without one.

    Warns if the plan is for an order that no name stands for.
    """
    plan = manifest.prediction
    if schedule is None:
        schedule = DEFAULT_SCHEDULE if plan is None else _name_of(plan)
    if plan is None or not isinstance(schedule, str) or schedule.endswith(".csv"):
        return ScheduleChoice(schedule, microbatches, None)
    name = find_recipe(schedule).name
    ranks = len(set(plan.placement)) if name == plan.schedule else None
    return ScheduleChoice(name, plan.microbatches if microbatches is None else microbatches, ranks)


def _name_of(plan: Prediction) -> str:
    """The name of the plan's schedule; that of the default one if the plan has another order."""
    ranks = len(set(plan.placement))
    try:
        schedule = build(plan.schedule, ranks, plan.microbatches, len(plan.placement) // ranks)
    except ScheduleError:
        schedule = None
    if schedule is not None and tuple(schedule.placement) == tuple(plan.placement):
        return schedule.name
    warnings.warn(
        f"the package is planned for {plan.schedule}, an order that is in a file; {DEFAULT_SCHEDULE} runs instead. "
        "Try: Pipeline(…, schedule=FILE) with that CSV file.",
        stacklevel=4,
    )
    return DEFAULT_SCHEDULE


# ---- pipeline --------------------------------------------------------------------------------------------------------


# ---- pipeline kernels ------------------------------------------------------------------------------------------------
# The kernels of a pipeline's stages on this process: traced again, and counted.


class PipelineKernels:
    """What a pipeline says of its kernels."""

    _runner: StepRunner

    def retrace(self) -> None:
        """Trace the stages of this process, and the loss, again at their next call. Not collective.

        For changes that are not noticed: an attribute of a module, a number or a function that `loss_fn` reads. Kernels
        that were compiled are used again for graphs that come out equal.
        """
        for kernels in self._runner.kernels.values():
            kernels.retrace()

    def kernels_report(self) -> list[KernelCount]:
        """How often the stages of this process, and the blocks in them, have been traced and compiled. Not collective.

        for count in pipe.kernels_report():
            print(count)  # TransformerEncoderLayer (stage 0, 3): 2 static, 1 symbolic
        """
        from pipegraph.kernels.kernel_report import kernels_report

        return kernels_report(self._runner.kernels)


# ---- pipeline --------------------------------------------------------------------------------------------------------


# ---- pipeline text ---------------------------------------------------------------------------------------------------
# What `repr` shows of a pipeline.


def describe_pipeline(
    package: str, schedule: Schedule, ranks: Sequence[int], stages: Iterable[int], device: object, kernels: str
) -> str:
    """Return the package, the schedule, and what of it this process holds, in a line.

    Pipeline(small: zb-v with 8 microbatches; stages 0, 3 of 4 on rank 0 of 2, cpu, kernels inductor)
    """
    microbatches, stage_names = format_number_of("microbatch", schedule.microbatches), [*map(str, stages)]
    holds = f"stage{'' if len(stage_names) == 1 else 's'} {', '.join(stage_names)} of {schedule.stages}"
    where = f"rank {ranks[0]} of {schedule.ranks}"
    if len(ranks) == schedule.ranks:
        holds, where = f"all {format_number_of('stage', schedule.stages)}", f"{format_number_of('rank', len(ranks))}"
        where += " in one process"
    return one_line(
        f"Pipeline({package}: {schedule.name} with {microbatches}; {holds} on {where}, {device}, kernels {kernels})"
    )


# ---- pipeline --------------------------------------------------------------------------------------------------------


class Pipeline(PipelineState, PipelineRanks, PipelineKernels):
    """Runs a package under a schedule.

    Under a launcher such as torchrun, or with a process group, every process holds the stages of one rank, and all
    make the Pipeline together. In a plain process all stages are held here, on virtual ranks that run in turns: same
    schedule, same executor, same numbers.

        pipe = Pipeline("out/", schedule="1f1b", microbatches=8, loss_fn=loss)
        optimizer = torch.optim.AdamW(pipe.parameters())
        result = pipe.step(tokens, target=labels)
        optimizer.step()

    Args:
        package: the package, or its folder.
        schedule: a name, a `Schedule`, or the path of a CSV file. By default that of the package's plan; without a plan
            "1f1b".
        microbatches: how many a batch is cut into; by default those of a ready schedule or of the package's plan, else
            1.
        loss_fn: `loss_fn(output, target)` returns the loss of a microbatch, or (loss, metrics) with a dict of tensors:
            one number each, under the same names for every microbatch, and without a gradient.
        device: where the stages of this process are; plain "cuda" is the GPU of the local rank.
        kernels: "inductor" (compiled), "eager" (these graphs, uncompiled), "autograd", or what makes them for a stage.
        group: the processes of the pipeline; by default the default group.
        mesh: in place of a group, the processes of one pipeline or of several that train one model, as a `DeviceMesh`
            whose dimensions are some of "pp" (a pipeline), "dp_replicate" (ranks that hold the same stages), "dp_shard"
            and "tp" (ranks that share the parameters of a stage). Ranks that differ in a `dp` dimension are each given
            their own share of the batch; what a step computes is of the whole.
        tp_plan: how the ranks along "tp" divide the model: for patterns of module names, with ``*`` for a part of a
            name, one of transformers' styles ("colwise", "rowwise", "colwise_gather_output", "sequence_parallel", …) or
            an object of `torch.distributed.tensor.parallel`. The first pattern that fits a module counts. By default
            the package's own plan: that of the model file, or of a Hugging Face model.
        fsdp: options of torch's `fully_shard` (`mp_policy`, `reshard_after_forward`, `shard_placement_fn`, …), which
            divides the parameters of each repeated layer, and of the rest of a stage, between the ranks along
            "dp_shard". They are gathered when the schedule says so, and kernels compute with the whole. A
            `parallelize_fn` may call `fully_shard` itself instead, over that dimension of the mesh.
        resident: how many stages of this rank may be whole at a time; by default as the package was planned; else all,
            or 2 with ``reshard_after_forward=True``: one that computes and one that is being gathered.
        recompute: what a backward computes again instead of keeping it: "none", "min-cut" or "block" (every repeated
            layer, from what goes into it), or "offload", which keeps the values that "min-cut" keeps in CPU
            memory, pinned and copied on separate streams while kernels run (emulated on a CPU); such a choice for
            patterns of module names, of which the last that fits counts (``{"layers.*": "block", "*.mlp": "none"}``,
            ``{"layers[::2]": "block"}`` for every second layer); in place of a choice a function that answers for each
            operation, as `torch.utils.checkpoint.create_selective_checkpoint_contexts` takes it; or a sequence with one
            of these for each stage. By default the choice of the package's plan, else "min-cut".
        parallelize_fn: called with each stage of this process once its weights are loaded. It shards, freezes, adds or
            replaces what it likes in place, or returns another module with parameters of the same names, also in
            `DistributedDataParallel` over the stage's replicas in other pipelines. Kernels are traced from the result,
            DTensors included; stages take and return plain tensors. If it gives all parameters another dtype on every
            rank, as `stage.to(torch.bfloat16)` does, the caller's inputs and what crosses between stages have that
            dtype, too.
        timeout: how many seconds a rank waits for another one until it takes it for hung. It must be longer than any
            step, the first one with its compilation included.
        weights: the folder of a Hugging Face checkpoint. Its parameters and persistent buffers take the place of the
            package's, in the stages' dtypes. Each process reads those of its stages, and no other files.
        max_variants: how many variants of a stage are traced, counted from the last `retrace`: for its modes, dtypes,
            branches on sizes and so on. One more is left to autograd, with a warning.
        check_weights: whether it is an error if a shard that this process reads is not as it was written.
        strict: whether it is an error if a stage is left to autograd.
        loss_reduction: how the loss of a step is made of those of its microbatches: "mean", weighed by their rows, if
            loss_fn returns a mean; "sum" if it returns a sum. Metrics are put together in the same way.
        loss_weight: for a loss_fn that returns a sum over the items that count, such as tokens that are not masked:
            `loss_weight(target)` returns how many count in a microbatch. The loss of a step, and each metric, is then
            the sum over microbatches and data-parallel ranks, divided by all that counts there.
        loss_over: "rows" if the loss is the mean over rows that loss_reduction and loss_weight describe, or their sum:
            the first step checks it, on two halves of each microbatch. "batch": the loss is evaluated once, on the
            outputs of all microbatches and the whole target, as a contrastive loss needs it; for schedules whose last
            stage runs all forwards first, such as "gpipe". "microbatch": the loss of each microbatch as it is.
        seed: what dropout and all other random operations draw from. Their numbers depend on it, the step, the
            microbatch of the whole batch and what draws, and on nothing else: not on cuts, schedule, processes,
            kernels or recompute. By default they come from torch's generators. Parameters of a package without weights
            follow from it, too. Ranks along "tp" draw the same, each for its own part of what they divide.
        precision: "bf16" or "fp16": stages compute and send in this dtype, and parameters, gradients, the optimizer's
            state and checkpoints have float32. "bf16-true" or "fp16-true": everything has this dtype. "fp32":
            everything has float32. By default the dtypes are the package's.
        cuda_graphs: whether the kernels of each action are recorded as a CUDA graph, which is launched at once: faster
            where a GPU waits for the host, for more memory. Not with "offload" or parameters that ranks divide.
        check_inputs: whether different batches on ranks of one pipeline are an error; on a GPU in the call after.
        pad_to: name of a size → a multiple that it is rounded up to, so that static kernels serve more lengths: inputs
            end in zeros, labels in -100, and outputs keep the padded length. The model must not let padding change
            other positions: it is causal, or has a mask among its inputs, which is padded with zeros, too.

    Attributes:
        last_sizes: the sizes of the last step, on every rank; None before the first.

    A stage is traced again when its mode, `requires_grad`, a dtype, autocast, or the identity of its modules,
    parameters or buffers changes, and for the second and third shape of its inputs, the third time for all sizes. For
    anything else call `pipe.retrace()`: attributes such as `dropout.p`, and numbers that `loss_fn` reads, are constants
    of the traced graph. Parameters that are tied, or that ranks along a `dp` dimension have as well, are not replaced.
    """

    def __init__(
        self,
        package: Package | str | PathLike[str],
        schedule: str | PathLike[str] | Schedule | None = None,
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        device: str | torch.device = "cpu",
        kernels: str | Maker = "inductor",
        group: ProcessGroup | None = None,
        recompute: Any = None,
        parallelize_fn: parameters.ParallelizeFunction | None = None,
        timeout: float = TIMEOUT,
        weights: str | PathLike[str] | None = None,
        max_variants: int = 8,
        check_weights: bool = True,
        strict: bool = False,
        loss_reduction: str = "mean",
        loss_weight: LossWeight | None = None,
        mesh: DeviceMesh | None = None,
        tp_plan: Plan | None = None,
        fsdp: Mapping[str, Any] | None = None,
        resident: int | None = None,
        seed: int | None = None,
        precision: str | None = None,
        cuda_graphs: bool = False,
        check_inputs: bool = True,
        pad_to: Mapping[str, int] | None = None,
        loss_over: str = "rows",
    ) -> None:
        self._reduction = LossReduction.from_arguments(loss_reduction, loss_weight, loss_over)
        self._loss_fn = loss_fn
        self.kernels = kernels if isinstance(kernels, str) else "custom"
        self._observers = ObserverList()
        self.last_sizes: StepSizes | None = None
        numbers = RandomNumbers(seed)
        world, self.device = join_world(group, device, timeout, mesh)
        if self.device.type == "cpu":
            keep_freed_memory()
        self._processes: World | LoneProcess = world or LoneProcess()
        self._guard = guard_of(world)
        weakref.finalize(self, self._guard.close)  # also at exit, before torch's own threads are torn down
        with self._guard:
            if world:
                world.open()
            self.package = open_package(package, world)
            count = len(self.package.manifest.stages)
            processes, sharing = (len(world.pipeline), world.grid.size // len(world.pipeline)) if world else (None, 1)
            choice = as_planned(self.package.manifest, schedule, microbatches)
            self.schedule = resolve_schedule(*choice[:2], count, processes, choice.ranks, sharing)
            self.ranks = (world.pipeline.index(world.rank),) if world else tuple(range(self.schedule.ranks))
            stage_indices = [stage for stage, rank in enumerate(self.schedule.placement) if rank in self.ranks]
            request = StageRequest(weights, check_weights, seed, tp_plan, parallelize_fn, precision, fsdp)
            if world:
                options = self.schedule, request, self._reduction, resident, kernels, recompute
                check_options(world, self.package.manifest, *options)
            prepared = prepare_stages(self.package, stage_indices, self.device, world, request)
            self.stages = prepared.modules
            self.package = replace(self.package, manifest=prepared.manifest)
            padding = Padding(dict(pad_to or {}))
            padding.check(prepared.manifest)
            again = stage_recompute(recompute, self.package, self.stages)
            self.recompute = describe_stages(again)
            recorder = graph_recorder(cuda_graphs, kernels, self.device, again, self.stages)
            makers = stage_makers(kernels, again, prepared.manifest, max_variants, strict, recorder)
            self._runner = StepRunner(
                prepared,
                self.schedule,
                choice.schedule,
                makers,
                loss_fn,
                self._reduction,
                self.device,
                world,
                self._guard,
                resident_stages(fsdp, resident, self.package.manifest.prediction),
                numbers,
                check_inputs,
                padding,
            )
        super().__init__(prepared.manifest, self._runner.stages, self.device, self._processes, self._guard, numbers)

    def __repr__(self) -> str:
        name = self.package.path.name
        return describe_pipeline(name, self.schedule, self.ranks, self.stages, self.device, self.kernels)

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        return_losses: bool = False,
        microbatches: int | None = None,
        weight: Tensor | float | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Do one training step over a batch. Gradients of its loss are added to `.grad`.

        Takes the model's own arguments, for a batch of any size that the capture allows. Inputs are cut into
        microbatches along their rows, and the target along dimension 0, as evenly as possible, but never into more
        microbatches than rows. A rank may be given None for inputs that its stages do not take. A list in place of a
        tensor, or of the target, has one for each microbatch, which may differ in every dynamic size; outputs of
        different lengths are returned as a list. Outputs without rows are returned as they are if they are equal, else
        as a mean over rows.

        A tensor of floats with `requires_grad=True` gets its gradient in `.grad` too, on the rank of the first stage
        that reads it: pass it to every rank. If it is not a leaf, ``x.backward(x.grad)`` continues into its own graph.

        Args:
            args, kwargs: the model's.
            target: the second argument of `loss_fn`.
            return_outputs: whether the result has the model's outputs.
            return_losses: whether it has the loss of each microbatch.
            microbatches: how many the batch is cut into, on every rank the same; by default those of the pipeline. A
                schedule that was given by its name is then built for this number.
            weight: with `loss_weight`, the divisor of the loss: the number of items that count in all accumulated
                batches, over all ranks. By default the number in this batch.

        Raises:
            BatchError: a shape or dtype is not the package's. Nothing was sent.
            ScheduleError: the schedule cannot have this number of microbatches. Nothing was sent.
            PipegraphError: ``torch.inference_mode()`` is on; or a parameter that other stages or ranks have as well was
                replaced since the pipeline was made, or has a hook that would not be called. Nothing was sent.
            RuntimeFault: this rank or another one failed.
        """
        weight = checked_weight(weight, self._reduction)
        has_loss = self._loss_fn is not None
        request = StepRequest(target, has_loss, return_outputs, return_losses, microbatches, weight=weight)
        result, self.last_sizes = self._run(args, kwargs, request)
        return result

    def check_batch(self, *args: Any, target: Any = None, microbatches: int | None = None, **kwargs: Any) -> None:
        """Raise BatchError or ScheduleError if `step` would refuse this batch. Not collective; nothing is computed.

        A step that fails ends a pipeline of several processes, and one that was never begun does not.
        """
        self._runner.check(args, kwargs, StepRequest(target, self._loss_fn is not None, False, False, microbatches))

    def evaluate(
        self,
        *args: Any,
        target: Any = NO_TARGET,
        return_outputs: bool = False,
        return_losses: bool = False,
        microbatches: int | None = None,
        **kwargs: Any,
    ) -> StepResult:
        """Run the forward of a batch: its loss and metrics, and its outputs if they are asked for, without gradients.

            loss = pipe.evaluate(tokens, target=labels).loss

        Modules stay in the mode they are in: `pipe.stages[0].eval()` sets it. The rest is as for `step`.

        Args:
            target: the second argument of `loss_fn`. If it is left out, no loss is computed; for a `loss_fn` that needs
                none it is None.
        """
        with_loss = self._loss_fn is not None and target is not NO_TARGET
        request = StepRequest(target, with_loss, return_outputs, return_losses, microbatches, evaluates=True)
        return self._run(args, kwargs, request)[0]

    def eval(self, *args: Any, microbatches: int | None = None, **kwargs: Any) -> Any:
        """`evaluate` without a loss. Return the model's outputs on the rank of the last stage, else None."""
        return self.evaluate(*args, return_outputs=True, microbatches=microbatches, **kwargs).outputs

    @property
    def schedule_with_collectives(self) -> Schedule:
        """The schedule with the collectives between ranks that share its stages; unchanged if no ranks share them."""
        collectives = without_transfers(self._runner.executors.training).collectives
        return self.schedule.changed(collectives=collectives) if collectives else self.schedule

    def observe(self, observer: Observer, evals: bool = True) -> RemovableHandle:
        """Show an observer every action of the steps to come: when it begins, when it ends, and what is saved.

        Any number of observers may look at once. The first one added begins first and ends last.

        Args:
            observer: has the methods of `pipegraph.runtime.measurements.Observer`.
            evals: whether it sees the actions of `evaluate` as well.

        Returns:
            A handle whose `remove()` ends it, as torch's hooks return. It is a context as well:

                with pipe.observe(ActionTimes(pipe.device)):
                    pipe.step(tokens, target=labels)
        """
        return self._observers.add(observer, evals or not self.schedule.trains)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip as `torch.nn.utils.clip_grad_norm_` does, by the norm of the gradients of the whole model.

        Collective: every rank must call it. Returns the norm before clipping. Raises ArgumentError for a `max_norm`
        that is negative or NaN, or a `norm_type` that is not positive; no gradient is changed then.
        """
        with self._guard, lost_connections(None, "clip_grad_norm_()"):
            bound, p = checked_norm(max_norm, norm_type)
            local_parameters, processes = list(self.parameters()), self._processes
            counted, everyone = self._runner.ties.counted(local_parameters), processes.along(*DIMENSIONS)
            return clip_grad_norm(local_parameters, counted, bound, p, everyone, self.device, processes.copies)

    def _run(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], request: StepRequest
    ) -> tuple[StepResult, StepSizes]:
        with self._guard, lost_connections(None, "step() or evaluate()"):
            inputs, results = self._runner.run(args, kwargs, request, self._observers)
            loss, metrics = self._runner.reduced(inputs, results)
        losses = results.loss_by_microbatch() if request.return_losses else None
        outputs = self._runner.joined(inputs, results) if request.return_outputs else None
        weight = None if loss is None else inputs.scale.divisor
        return StepResult(loss, losses, outputs, metrics, weight), inputs.batch.sizes
