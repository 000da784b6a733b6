"""`Pipeline`: a package, a schedule and this process's stages, put together."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Self, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pipegraph.errors import PipegraphError, one_line
from pipegraph.kernels import Dynamic, Maker
from pipegraph.kernels.cpu.process import keep_freed_memory
from pipegraph.package import Package
from pipegraph.recompute import describe_stages
from pipegraph.runtime import parameters
from pipegraph.runtime.batch import StepSizes
from pipegraph.runtime.checkpoint.checkpointer import Checkpointer
from pipegraph.runtime.checkpoint.saving import SaveRequest
from pipegraph.runtime.checkpoint.weights import check_names, open_weights
from pipegraph.runtime.gradients import checked_norm, clip_grad_norm
from pipegraph.runtime.kernel_makers import stage_makers, stage_recompute
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction, LossWeight, checked_weight
from pipegraph.runtime.measurements import Observer, ObserverList
from pipegraph.runtime.microbatches import Padding
from pipegraph.runtime.package_agreement import open_package
from pipegraph.runtime.parallelized_stages import resident_stages
from pipegraph.runtime.prepared_stages import PipelineOptions, prepare_stages
from pipegraph.runtime.processes.group import TIMEOUT, lost_connections
from pipegraph.runtime.processes.rank_grid import DIMENSIONS, RankGrid, single
from pipegraph.runtime.processes.world import ClockOffset, LoneProcess, World, guard_of, join_world
from pipegraph.runtime.random_numbers import RandomNumbers
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.rank_options import check_options
from pipegraph.runtime.schedule_choice import as_planned, resolve_schedule
from pipegraph.runtime.step_data import NO_TARGET, StepRequest, StepResult
from pipegraph.runtime.step_runner import StepRunner
from pipegraph.runtime.tensor_parallel import Plan
from pipegraph.schedule import Schedule, without_transfers
from pipegraph.units import format_number_of

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh, ProcessGroup

    from pipegraph.kernels.traced import KernelCount
    from pipegraph.runtime.checkpoint.loading import Checkpoint


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


class Pipeline:
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
        weights: the folder of a Hugging Face checkpoint, or of `torch.distributed.checkpoint`; `Weights` for one with
            other names or padded embeddings; or a state dict. Its parameters and persistent buffers take the place of
            the package's, in the stages' dtypes. Each process reads those of its stages, and no other files. A warning
            lists tensors that no stage reads.
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
        dynamic: when kernels are for all sizes: "auto" for kernels of one shape until the second shape of a stage's
            inputs, True from the first step on, so that new sizes are compiled only where a stage does something else
            for them; False for kernels of each shape, which counts as a variant then.
        broadcast_loss: whether the rank of the last stage broadcasts the loss of each step, so that ``result.loss`` is
            the same number on every rank. Without it other ranks have None.

    Attributes:
        last_sizes: the sizes of the last step, on every rank; None before the first.

    A stage is traced again when its mode, `requires_grad`, a dtype, autocast, or the identity of its modules,
    parameters or buffers changes, and for the second shape of its inputs, then for all sizes. For
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
        weights: str | PathLike[str] | Mapping[str, Tensor] | None = None,
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
        broadcast_loss: bool = True,
        dynamic: Dynamic = "auto",
    ) -> None:
        reduction = LossReduction.from_arguments(loss_reduction, loss_weight, loss_over, broadcast_loss)
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
            processes, sharing = (len(world.pipeline), world.copies) if world else (None, 1)
            choice = as_planned(self.package.manifest, schedule, microbatches)
            self.schedule = resolve_schedule(*choice[:2], count, processes, choice.ranks, sharing)
            self.ranks = (world.pipeline.index(world.rank),) if world else tuple(range(self.schedule.ranks))
            stage_indices = [stage for stage, rank in enumerate(self.schedule.placement) if rank in self.ranks]
            opened_weights = None if weights is None else open_weights(weights)
            if opened_weights is not None and 0 in stage_indices:
                check_names(self.package.manifest, opened_weights)
            options = PipelineOptions(
                opened_weights,
                check_weights,
                seed,
                tp_plan,
                parallelize_fn,
                precision,
                fsdp,
                resident,
                kernels,
                recompute,
                max_variants,
                strict,
                cuda_graphs,
                dynamic,
            )
            if world:
                check_options(world, self.package.manifest, self.schedule, options, reduction)
            prepared = prepare_stages(self.package, stage_indices, self.device, world, options)
            self.stages = prepared.modules
            self.package = replace(self.package, manifest=prepared.manifest)
            padding = Padding(dict(pad_to or {}))
            padding.check(prepared.manifest)
            again = stage_recompute(recompute, self.package, self.stages)
            self.recompute = describe_stages(again)
            makers = stage_makers(options, again, prepared, self.device)
            self._context = context = RankContext(
                prepared, self.schedule, loss_fn, reduction, numbers, self.device, world, self._guard
            )
            whole_stages = resident_stages(fsdp, resident, self.package.manifest.prediction)
            self._runner = StepRunner(context, choice.schedule, makers, whole_stages, check_inputs, padding)
        self._checkpointer = Checkpointer(context)

    def __repr__(self) -> str:
        name = self.package.path.name
        return describe_pipeline(name, self.schedule, self.ranks, self.stages, self.device, self.kernels)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise PipegraphError(
            "a Pipeline cannot be copied or pickled: it holds kernels, and connections to other processes.",
            "state_dict() for its weights, save() for a checkpoint, or another Pipeline of the same package: "
            "Pipeline(pipe.package, pipe.schedule, …).",
        )

    # ---- like a model ------------------------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """Whether the stages of this process are in training mode."""
        return all(stage.training for stage in self.stages.values())

    def train(self, mode: bool = True) -> Self:
        """Switch the stages of this process to training mode, or to evaluation mode. Not collective: every rank has to
        call it."""
        for stage in self.stages.values():
            stage.train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as `torch.nn.Module.zero_grad` does."""
        for parameter in self.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let this rank's parameters require gradients, or freeze them. Stages are traced again."""
        for parameter in self.parameters():
            parameter.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the pipeline if it has this device already; otherwise raise PipegraphError, because kernels and
        connections belong to one device and one dtype."""
        requested = [*args, *kwargs.values()]
        devices = [torch.device(value) for value in requested if isinstance(value, str | torch.device)]
        is_there = all(  # a launcher's rank may be called cpu:1, which is the same CPU
            device.type == self.device.type and (device.type == "cpu" or device.index in (None, self.device.index))
            for device in devices
        )
        if is_there and all(isinstance(value, str | torch.device | bool | torch.memory_format) for value in requested):
            return self
        raise PipegraphError(
            f"a Pipeline stays on the device and in the dtype that it was made with ({self.device}).",
            'Pipeline(…, device=…) or Pipeline(…, precision="bf16").',
        )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise PipegraphError(
            "a Pipeline is not called: a step runs forward and backward of its microbatches together.",
            "result = pipe.step(inputs, target=labels), which trains; pipe.evaluate(inputs, target=labels) for the "
            "loss; or outputs = pipe.eval(inputs).",
        )

    # ---- steps -------------------------------------------------------------------------------------------------------

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
        weight = checked_weight(weight, self._context.reduction)
        has_loss = self._context.loss_fn is not None
        request = StepRequest(target, has_loss, return_outputs, return_losses, microbatches, weight=weight)
        result, self.last_sizes = self._run(args, kwargs, request)
        return result

    def check_batch(self, *args: Any, target: Any = None, microbatches: int | None = None, **kwargs: Any) -> None:
        """Raise BatchError or ScheduleError if `step` would refuse this batch. Not collective; nothing is computed.

        A step that fails ends a pipeline of several processes, and one that was never begun does not.
        """
        has_loss = self._context.loss_fn is not None
        self._runner.check(args, kwargs, StepRequest(target, has_loss, False, False, microbatches))

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

        Modules stay in the mode they are in: `pipe.eval()` and `pipe.train()` set it. The rest is as for `step`.

        Args:
            target: the second argument of `loss_fn`. If it is left out, no loss is computed; for a `loss_fn` that needs
                none it is None.
        """
        with_loss = self._context.loss_fn is not None and target is not NO_TARGET
        request = StepRequest(target, with_loss, return_outputs, return_losses, microbatches, evaluates=True)
        return self._run(args, kwargs, request)[0]

    def eval(self, *args: Any, microbatches: int | None = None, **kwargs: Any) -> Any:
        """Without arguments, switch the stages of this process to evaluation mode, and return the pipeline.

        With a model's arguments, run `evaluate` without a loss, in the mode that the stages are in. Return the model's
        outputs on the rank of the last stage, else None.
        """
        if not args and not kwargs:
            return self.train(False)
        return self.evaluate(*args, return_outputs=True, microbatches=microbatches, **kwargs).outputs

    def broadcast_outputs(self, outputs: Any) -> Any:
        """Return the outputs of the last stage on every rank of this pipeline, for metrics that every rank computes.

            logits = pipe.broadcast_outputs(pipe.eval(tokens))

        Collective: every rank must call it, with what `eval` or a step returned there. Outputs are tensors, None and
        plain values, in tuples, lists and dicts.
        """
        broadcast = self._runner.last_stage
        if broadcast is None:
            return outputs
        with self._guard, lost_connections(None, "broadcast_outputs()"):
            return broadcast.outputs(outputs)

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
        weight = None if loss is None or math.isnan(inputs.scale.divisor) else inputs.scale.divisor
        return StepResult(loss, losses, outputs, metrics, weight), inputs.batch.sizes

    # ---- kernels -----------------------------------------------------------------------------------------------------

    def retrace(self) -> None:
        """Trace the stages of this process, and the loss, again at their next call. Not collective.

        For changes that are not noticed: an attribute of a module, a number or a function that `loss_fn` reads. Kernels
        that were compiled are used again for graphs that come out equal.
        """
        for kernels in self._runner.kernels.values():
            kernels.retrace()

    def copies_of(self, stage: int) -> list[Tensor]:
        """The copies that kernels read in the place of the parameters of a stage of this process, with a precision."""
        copies: list[Tensor] = getattr(self._runner.kernels[stage], "copies", [])
        return copies

    def kernels_report(self) -> list[KernelCount]:
        """How often the stages of this process, and the blocks in them, have been traced and compiled. Not collective.

        for count in pipe.kernels_report():
            print(count)  # TransformerEncoderLayer (stage 0, 3): 2 static, 1 symbolic
        """
        from pipegraph.kernels.traced import kernels_report

        return kernels_report(self._runner.kernels)

    # ---- ranks -------------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> RankGrid:
        """Where the ranks of the mesh are; without a mesh those of this pipeline."""
        world = self._context.world
        return single(self.schedule.ranks) if world is None else world.grid

    @property
    def loss_weight(self) -> LossWeight | None:
        """The number of items that count in a target, as it was passed; None if the loss is a mean over rows."""
        return self._context.reduction.weight_of

    @property
    def mesh_ranks(self) -> tuple[int, ...]:
        """For each rank of the schedule, its number in the grid."""
        return self._context.pipeline

    @property
    def dp_rank(self) -> int:
        """The place of this process among the data-parallel ranks, for samplers: which share of a batch it is given."""
        return self._context.data_rank

    @property
    def dp_size(self) -> int:
        """The number of data-parallel ranks; 1 without a mesh."""
        return self._context.data_ranks

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

    # ---- state and checkpoints ---------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once, under the model's name. A tied weight has its first name."""
        return parameters.named_parameters(self._context.stages)

    def state_dict(self) -> dict[str, Any]:
        """The entries of the model's `state_dict()` that belong to this rank's stages."""
        return parameters.state_dict(self._context.stages)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load this rank's part of a state dict of the model."""
        parameters.load_state_dict(self.package.manifest, self._context.stages, state_dict)

    def save(
        self,
        folder: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        background: bool = False,
        keep: int | None = None,
        frozen: bool = True,
    ) -> Path:
        """Save a checkpoint as ``folder/step-00000123``, which is there whole or not at all. Collective.

            pipe.save("checkpoints", optimizer, step=step, extra={"scheduler": scheduler}, keep=3)

        In it are parameters and persistent buffers, a tied weight once, the optimizer's state and options, all under
        the model's names; `extra`; and the state of torch's random number generators on each rank. It is written with
        torch.distributed.checkpoint, each rank what it holds, into a folder that all ranks share.

        Args:
            folder: where the run's checkpoints are. Only one run saves into it.
            optimizer: over parameters of `pipe.parameters()`, on each rank the same class, groups and options.
            step: how many steps are done. A checkpoint of this step that is there already is replaced.
            extra: objects with `state_dict` and `load_state_dict`, such as a learning rate scheduler, a `GradScaler` or
                a data loader, and plain values; the same names on every rank. Values that differ between ranks are all
                saved.
            background: copy everything to CPU memory, and write it while steps continue. The next `save` or
                `load`, or `wait_for_save`, waits for it and raises its errors. The process does not end before it is
                done. A step that fails ends it, and the checkpoint before it is the newest.
            keep: how many checkpoints stay, this one and the newest before it; by default all.
            frozen: whether parameters that need no gradient are saved as well. Without them, as for adapters alone,
                `load` leaves those as they are that need none then.

        Returns:
            The checkpoint's folder. With `background` it is there later.

        Raises:
            CheckpointError: a rank cannot save, such as on a full disk; on every rank. Nothing is left of it, and the
                pipeline can continue.
            RuntimeFault: a rank is gone.
        """
        steps = self._context.numbers.steps
        request = SaveRequest(Path(folder), step, keep, background, optimizer, extra or {}, steps, frozen)
        return self._checkpointer.save(request)

    def prepare_save(self) -> None:
        """Connect the ranks for checkpoints now instead of at the first one. Collective.

        A rank that dies before the first checkpoint then ends it at once on the others, not after the timeout.
        """
        self._checkpointer.prepare()

    def wait_for_save(self) -> Path | None:
        """Wait until a checkpoint that is saved in the background is there. Collective.

        Returns:
            Its folder; None if none was being saved.

        Raises:
            CheckpointError: it could not be saved.
            RuntimeFault: a rank is gone.
        """
        return self._checkpointer.wait()

    def load(
        self,
        folder: str | PathLike[str],
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Resume from the newest checkpoint that is whole. Collective.

            start = pipe.load("checkpoints", optimizer, extra={"scheduler": scheduler}).step

        It may have been saved with another number of stages or ranks, other cuts, schedule or mesh. All files are
        compared with their digests first; a warning names each damaged checkpoint, and the previous one is loaded.
        With `Pipeline(seed=)` random numbers continue as they were; without it, only if every dimension of the mesh
        has the same number of ranks as before.

        Args:
            folder: that of the run, or one of the ``step-…`` folders in it.
            optimizer: gets the saved state and options, if it has the class of the saved optimizer and the same
                parameters in its groups. Without it only the model is loaded.
            extra: the objects that were saved, under the same names; each takes its state with `load_state_dict`.
                Values that differ between ranks need the same ranks, or the same number of data-parallel ranks if the
                values are equal along each pipeline.

        Returns:
            The `step` and the `folder` of the checkpoint, and `extra`: the saved plain values; without the argument
            `extra`, also the states of the saved objects. A value that does not fit the ranks of this run is left out
            with a warning if `extra` does not name it.

        Raises:
            CheckpointError: there is no whole checkpoint, or it is of another model, another optimizer or other
                extras, with their names; on every rank. Nothing is changed then.
            RuntimeFault: a rank is gone.
        """
        checkpoint, self._context.numbers.steps = self._checkpointer.load(Path(folder), optimizer, extra)
        return checkpoint
