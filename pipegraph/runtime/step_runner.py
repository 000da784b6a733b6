"""What runs a pipeline's steps: the kernels of its stages, a transport, and executors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import ArgumentError, PipegraphError, RuntimeFault, ScheduleError
from pipegraph.kernels import Maker
from pipegraph.package.routes import gradient_routes, routes
from pipegraph.runtime.batch import bind_batch, join_target
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.gradient_checks import GradientChecks, ParameterChecks
from pipegraph.runtime.gradient_reduction import GradientReduction, copied_parameters, make_equal
from pipegraph.runtime.gradients import share_infinities
from pipegraph.runtime.input_gradients import InputGradients
from pipegraph.runtime.kernel_makers import make_kernels, packed_loss
from pipegraph.runtime.last_stage import LastStageBroadcast
from pipegraph.runtime.loss_check import BatchLoss, LossCheck, require_forwards_first
from pipegraph.runtime.loss_reduction import LossReduction, LossScale
from pipegraph.runtime.measurements import CollectiveObserver, CollectiveTimer, Observer, ObserverList
from pipegraph.runtime.microbatches import (
    NO_PADDING,
    BatchLayout,
    Microbatches,
    Padding,
    StepInputs,
    cut,
    join,
    join_outputs,
    local_sizes,
    target_dims,
    values_with_rows,
)
from pipegraph.runtime.parameter_collectives import (
    GroupTransfers,
    ParameterCollectives,
    all_parameters,
    find_parts,
    sharded_parameters,
)
from pipegraph.runtime.parameters import TiedWeights, redistribute_gradients
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.rank_grid import DATA, REPLICATE
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.rank_context import RankContext
from pipegraph.runtime.rank_options import check_stages
from pipegraph.runtime.schedule_choice import fewer_microbatches, forward_only, with_microbatches
from pipegraph.runtime.step_agreement import LocalStep, StepAgreement
from pipegraph.runtime.step_data import StepRequest
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.runtime.transport.distributed import DistributedTransport
from pipegraph.runtime.transport.protocol import LocalTransport, Transport
from pipegraph.runtime.wiring import BoundaryDtypes, rank_pairs
from pipegraph.schedule import Schedule, lower

# ---- step losses -----------------------------------------------------------------------------------------------------
# How the executor of the last stage gets the loss of a step: of each microbatch, checked at first, or of the batch.


class StepLosses:
    """The losses of steps on one process.

    Raises:
        PipegraphError: a loss over the whole batch is divided between data-parallel ranks.
        ScheduleError: the loss is over the whole batch, and backwards begin before it is known.
    """

    def __init__(self, context: RankContext) -> None:
        manifest, loss_fn, reduction = context.manifest, context.loss_fn, context.reduction
        self._over_batch = loss_fn is not None and reduction.over == "batch"
        self._is_shared = bool(context.replicas) or context.data_ranks > 1
        self._is_checked = False
        if self._over_batch and self._is_shared:
            raise PipegraphError(
                'loss_over="batch" evaluates the loss on the rank of the last stage, and the outputs of the batch are '
                "divided between data-parallel ranks.",
                "a mesh of pp alone; or a loss_fn that gathers the outputs of all ranks itself, with "
                'loss_over="microbatch" and one microbatch.',
            )
        if self._over_batch:
            require_forwards_first(context.schedule)
        self._manifest, self._last = manifest, context.last
        self._with_rows = values_with_rows(manifest)
        stage = context.stages.get(self._last)
        self._values = [manifest.values[name] for name in manifest.stages[-1].outputs]
        self._loss = packed_loss(manifest, stage, loss_fn) if stage is not None and loss_fn is not None else None
        self._check: LossCheck | None = None
        if self._loss is not None and stage is not None and reduction.over == "rows":
            self._check = LossCheck(manifest, stage, self._loss, reduction, target_dims(manifest))

    def prepare(self, executor: Executor, batch: StepInputs, trains: bool) -> None:
        """Tell an executor how the loss of a step is computed. Raises ScheduleError as `StepLosses` does."""
        executor.batch_loss = executor.loss_check = None
        if self._over_batch and batch.with_loss:
            require_forwards_first(executor.schedule)
        if not executor.has_stage(self._last) or self._loss is None or not batch.with_loss:
            return
        if self._over_batch:
            sizes, dims = batch.batch.sizes, target_dims(self._manifest)
            executor.batch_loss = BatchLoss(
                self._loss,
                self._values,
                batch.batch.targets,
                lambda parts, dim: join_outputs(parts, dim, sizes.weights),
                lambda targets: join_target(targets, {sum(sizes.lengths(value)) for value in self._with_rows}, dims),
                trains,
            )
        elif trains and self._check is not None and not self._check.is_done:
            # One microbatch of one rank is the whole batch, whatever its loss is.
            self._is_checked = self._is_shared or len(batch.batch.sizes.microbatches) > 1
            executor.loss_check = self._check if self._is_checked else None

    def after_step(self) -> None:
        """End the check of the first step. Raises BatchError if the loss is not what the pipeline takes it for."""
        if self._check is not None and self._is_checked and not self._check.is_done:
            self._check.finish()


def check_grad_mode(trains: bool) -> None:
    """Raise PipegraphError if a step would train nothing."""
    if trains and torch.is_inference_mode_enabled():
        raise PipegraphError(
            "step() under torch.inference_mode() would train nothing: no gradient is kept there.",
            "step() outside it, or evaluate().",
        )


def check_without_loss(schedule: str, trains: bool, has_target: bool) -> None:
    """Raise PipegraphError if a step needs a loss, or is given a target, and the pipeline has no `loss_fn`."""
    if trains:
        raise PipegraphError(f"{schedule} has a backward, which needs a loss.", "Pipeline(…, loss_fn=…).")
    if has_target:
        raise PipegraphError(
            "a target was given, and this Pipeline has no loss_fn that takes it.",
            "Pipeline(…, loss_fn=…), or leave the target out.",
        )


# ---- step executors --------------------------------------------------------------------------------------------------
# The executors of a pipeline, for each number of microbatches that its steps have, made when they are first needed.


Edges = Iterable[tuple[int, int]]


class StepExecutors:
    """Executors by what they do and by the number of microbatches.

    Args:
        context: the process.
        choice: what its schedule was chosen by.
        make: lowered schedule → the executors of this process.
        resident: how many sharded stages of a rank may be whole at a time; None for all.

    Attributes:
        training: the pipeline's own schedule with its transfers.
    """

    def __init__(
        self,
        context: RankContext,
        choice: str | PathLike[str] | Schedule,
        make: Callable[[Schedule], Sequence[Executor]],
        resident: int | None,
    ) -> None:
        manifest, schedule = context.manifest, context.schedule
        self._pipeline_schedule, self._choice, self._make = schedule, choice, make
        self._processes = None if context.world is None else len(context.pipeline)  # each runs one rank
        edges = routes(manifest, schedule.placement)
        self._edges, self._gradient_edges = tuple(edges), gradient_routes(manifest, edges)
        # `lower` has to know which stages several ranks hold: all of them, or none.
        shared = tuple(range(len(manifest.stages))) if context.data_ranks > 1 else ()
        is_sharded = bool(context.prepared.groups)
        self._collectives: dict[str, Any] = (
            {"sharded": shared, "resident": resident} if is_sharded else {"replicated": shared}
        )
        self._built = {schedule.microbatches: schedule}
        self._executors: dict[tuple[bool, int], Sequence[Executor]] = {}
        self.training = lower(schedule, self._edges, self._gradient_edges, **self._collectives)
        self._evaluation = lower(forward_only(schedule), self._edges, (), **self._collectives)

    @property
    def training_executors(self) -> Sequence[Executor]:
        """The executors of a training step of the pipeline's own number of microbatches."""
        count = self._pipeline_schedule.microbatches
        return self.executors(False, count, count)

    def check(self, microbatches: int | None) -> int:
        """Return the number of microbatches of a step: the requested number, or by default that of the schedule.

        Raises:
            PipegraphError: the schedule cannot have this number.
        """
        if microbatches is None:
            return self._pipeline_schedule.microbatches
        if type(microbatches) is not int or microbatches < 1:
            raise ArgumentError(f"microbatches cannot be {microbatches!r}.", "a whole number from 1 on.")
        self._schedule(microbatches)
        return microbatches

    def executors(self, evaluates: bool, microbatches: int, requested_microbatches: int) -> Sequence[Executor]:
        """Return the executors of a step.

        Args:
            evaluates: whether only the forward runs.
            microbatches: the number of microbatches that the step has.
            requested_microbatches: the requested number, which may be larger.
        """
        key = evaluates, microbatches
        if key not in self._executors:
            self._executors[key] = self._make(self._lowered(evaluates, microbatches, requested_microbatches))
        return self._executors[key]

    def _lowered(self, evaluates: bool, microbatches: int, requested_microbatches: int) -> Schedule:
        if microbatches == self._pipeline_schedule.microbatches:
            return self._evaluation if evaluates else self.training
        try:
            schedule = self._schedule(microbatches)
        except ScheduleError:  # it cannot have this small number
            schedule = fewer_microbatches(self._schedule(requested_microbatches), microbatches)
        if evaluates:
            return lower(forward_only(schedule), self._edges, (), **self._collectives)
        return lower(schedule, self._edges, self._gradient_edges, **self._collectives)

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._built:
            self._built[microbatches] = with_microbatches(
                self._pipeline_schedule, self._choice, microbatches, self._processes
            )
        return self._built[microbatches]


# ---- executor turns --------------------------------------------------------------------------------------------------
# One step of all executors of a process, each of which runs until it waits for another one.


def run_executors(executors: Sequence[Executor], inputs: StepInputs, results: StepOutputs) -> None:
    """Do one step of every executor of this process: one under a launcher, all of them in turns in a plain process.

    Each continues until it needs what another of them has yet to send.
    """
    runs: list[tuple[Executor, Iterator[Any]]] = [(executor, executor.run(inputs, results)) for executor in executors]
    for executor in executors:
        executor.position = 0  # not where a step that failed has ended
    try:
        while runs:
            positions = [executor.position for executor, _ in runs]
            waiting = [(executor, run) for executor, run in runs if next(run, "done") is None]
            if len(waiting) == len(runs) and positions == [executor.position for executor, _ in waiting]:
                at = ", ".join(f"rank {waiter.rank} at {waiter.actions[waiter.position]}" for waiter, _ in waiting)
                raise RuntimeFault(
                    f"the schedule deadlocks: every rank waits for another one ({at}).",
                    "pipegraph schedule FILE, which checks it.",
                )
            runs = waiting
    finally:
        for executor in executors:
            executor.clear()


# ---- step runner -----------------------------------------------------------------------------------------------------


class StepRunner:
    """Runs steps on the stages of this process, together with the other processes of the pipeline.

    Making it is collective, and the last part of it is where the ranks begin to need each other.

    Args:
        context: the process. Collective methods are called in the context of its `guard`.
        choice: what the schedule was chosen by.
        makers: of each stage, by its index, what makes its kernels.
        resident: how many sharded stages of a rank may be whole at a time; None for all.
        checks_inputs: whether the inputs of the ranks of one pipeline are compared.
        padding: of the inputs of a step.

    Attributes:
        layout: of the batches.
        kernels: of each stage.
        executors: of this process.
        ties: the tied weights.
        transport: what carries tensors between ranks.
        last_stage: what broadcasts from the rank of the last stage; None in a plain process.
    """

    def __init__(
        self,
        context: RankContext,
        choice: str | PathLike[str] | Schedule,
        makers: Mapping[int, Maker],
        resident: int | None,
        checks_inputs: bool = True,
        padding: Padding = NO_PADDING,
    ) -> None:
        self._context, self._padding = context, padding
        groups, world = context.prepared.groups, context.world
        if context.replicas and context.reduction.weight_of is not None:
            raise PipegraphError(
                "loss_weight counts items over all ranks, and DistributedDataParallel takes the mean of its replicas' "
                "gradients.",
                "return the stage without it, and give Pipeline a mesh with dp_replicate.",
            )
        self.layout = BatchLayout.of(context)
        # Other processes have no target.
        self._reduction = context.reduction if self.layout.has_last_stage else LossReduction()
        self.ties = TiedWeights(context.manifest, context.stages, context.placement, context.world_ranks)
        find_parts(groups, context.stages)
        self._boundaries = BoundaryDtypes(context.manifest, context.wiring, context.stages, context.placement)
        self.kernels = make_kernels(context, makers)
        stage_kernels, ties = self.kernels, self.ties
        transport: Transport = LocalTransport()
        collectives: ParameterCollectives | None = None
        self.executors = StepExecutors(
            context,
            choice,
            lambda lowered: [  # called when all of these exist; without a reference to this object, which holds it
                Executor(context, rank, lowered, stage_kernels, transport, ties, collectives) for rank in context.ranks
            ],
            resident,
        )
        self._data_ranks: Group | None = None
        self._losses = StepLosses(context)
        self.last_stage: LastStageBroadcast | None = None
        self._input_gradients = InputGradients(context)
        # Actions of a GPU are timed by events of streams, in which gloo's collectives are not.
        self._times_collectives = world is not None and (context.device.type == "cpu" or world.uses_nccl)
        self._hooks = context.prepared.hooks
        self._hooks.check(context.stages, frozenset(index for index, stage_groups in groups.items() if stage_groups))
        self._parameter_checks = ParameterChecks(context, self.ties)

        # Everything that may fail on one rank alone is done. From here on the ranks need each other.
        self._distributed: DistributedTransport | None = None
        if world:
            check_stages(context, world)
            if context.data_ranks > 1:
                collectives = self._connect_copies(world)
            self.ties.connect(world)
            pairs = rank_pairs(self.executors.training, context.pipeline)
            transport = self._distributed = DistributedTransport(world, pairs, context.guard.report)
        self.transport, self._collectives = transport, collectives
        self._gradient_checks = GradientChecks(context)
        self._agreement = StepAgreement(context, self.layout.min_rows, checks_inputs)
        context.guard.closing.callback(self.transport.close)
        if world and world.uses_nccl:
            context.guard.watch(lambda: world.close(abort=True))
        if world:
            share_infinities(context.loss_fn, world, context.guard, owner=self)
            self.last_stage = LastStageBroadcast(context)

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: StepRequest,
        observers: ObserverList,
    ) -> tuple[StepInputs, StepOutputs]:
        """Run one step, or only its forward. Returns what it took, and the results of its microbatches.

        Collective. Raises BatchError for a batch that does not fit, and PipegraphError if there is no loss or nothing
        to train, or parameters were replaced that other stages or ranks have as well, before anything is computed.
        """
        evaluates, stages, numbers = request.evaluates, self._context.stages, self._context.numbers
        step, microbatches = self._local_step(args, kwargs, request)
        trains = step.trains
        self._parameter_checks.before_step(trains)
        input_gradients = self._input_gradients.begin(args, kwargs, trains)
        batch, scale, has_loss = self._agree(step, microbatches, request)
        if trains:
            self._gradient_checks.before_step()
        self.transport.start()
        numbers.microbatches = len(batch.sizes.microbatches)
        numbers.evaluates = evaluates
        executors = self.executors.executors(evaluates, numbers.microbatches, step.microbatches)
        observer = observers.joined(evaluates)
        for executor in executors:
            executor.observer, executor.input_gradients = observer, input_gradients
        results = StepOutputs()
        dtypes = self._boundaries.under_autocast(self._distributed)
        inputs = StepInputs(batch, scale, has_loss, request.return_outputs, dtypes)
        for executor in executors:
            self._losses.prepare(executor, inputs, trains)
        with self._hooks.during_step(stages) if trains else nullcontext():
            with self._during_step(observer), self.ties.summed_gradients() if trains else nullcontext():
                run_executors(executors, inputs, results)
                if trains:
                    redistribute_gradients(stages)
                    if self._collectives is not None:
                        self._collectives.finish()
            if trains:
                self._context.replicas.reduce()
        if trains:
            if self._collectives is not None:
                self._collectives.make_buffers_equal()
            self._input_gradients.finish(input_gradients)
            self._losses.after_step()
            self._gradient_checks.after_step()
        self.transport.finish()
        numbers.steps += not evaluates
        return inputs, results

    def check(self, args: Sequence[Any], kwargs: Mapping[str, Any], request: StepRequest) -> None:
        """Check a batch, as far as this rank knows its sizes. Nothing is sent.

        Raises:
            BatchError, ScheduleError, PipegraphError: as `run` does.
        """
        self._cut(self._local_step(args, kwargs, request)[0])

    def _local_step(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], request: StepRequest
    ) -> tuple[LocalStep, Microbatches | None]:
        """Check the tensors of a batch, and cut it if its loss needs a weight. Raises as `check` does."""
        trains, layout = self._context.schedule.trains and not request.evaluates, self.layout
        if layout.has_last_stage and not request.with_loss:
            check_without_loss(self._context.schedule.name, trains, request.has_target)
        check_grad_mode(trains)
        batch = self._padding.pad(layout.manifest, bind_batch(layout.manifest, args, kwargs, request))
        requested_count = self._count(batch.count, request.microbatches)
        sizes, tables = local_sizes(layout, batch, requested_count)
        loss = request.with_loss if layout.has_last_stage else None
        step = LocalStep(batch, sizes, tables, request.evaluates, trains, requested_count, loss)
        if not loss or self._reduction.weight_of is None:
            return step, None
        microbatches = self._cut(step)
        weight = None if microbatches is None else self._reduction.weigh(microbatches.targets)
        return replace(step, needs_weight=True, weight=weight), microbatches

    def _cut(self, step: LocalStep) -> Microbatches | None:
        """The microbatches of a step; None if this rank does not know all sizes. Raises BatchError."""
        sizes = self.layout.step_sizes(step.tables)
        return None if sizes is None else cut(self.layout, step.batch, sizes, step.microbatches)

    def _agree(
        self, step: LocalStep, microbatches: Microbatches | None, request: StepRequest
    ) -> tuple[Microbatches, LossScale, bool]:
        """Agree with all ranks on the microbatches of a step, the weight of its loss, and whether it has one.
        Collective."""
        pending = self._agreement.start(step)
        try:
            microbatches = microbatches or self._cut(step)  # while the records are on their way
        except BaseException:
            pending.drop()
            raise
        agreement = self._agreement.finish(pending)
        if microbatches is None or agreement.tables != step.tables:
            microbatches = self._cut(replace(step, tables=agreement.tables))
            assert microbatches is not None, "the agreement has checked that all sizes are known"
        rows = microbatches.sizes.rows
        local, total = float(len(microbatches.sizes.microbatches) if rows is None else rows), agreement.rows
        if step.needs_weight:
            local = self._reduction.weigh(microbatches.targets) if step.weight is None else step.weight
            total = self._agreement.total_weight(local) if agreement.weight is None else agreement.weight
        elif self._context.reduction.weight_of is not None:
            total = math.nan if agreement.weight is None else agreement.weight  # known to the last stage alone
        divisor, replicas = request.weight or total, self._context.replicas.count(self._context.last)
        scale = LossScale(microbatches.sizes, self._reduction, step.needs_weight, local, total, divisor, replicas)
        return microbatches, scale, agreement.has_loss

    def reduced(self, inputs: StepInputs, results: StepOutputs) -> tuple[Tensor | None, dict[str, Tensor] | None]:
        """The loss and the metrics of a step, of the batch of all data-parallel ranks; None without a loss here.

        Collective, if the step has a loss.
        """
        loss, metrics = self._reduced_here(inputs, results)
        if inputs.with_loss and self.last_stage is not None and self._context.reduction.broadcast:
            loss = self.last_stage.loss(loss)
        return loss, metrics

    def _reduced_here(self, inputs: StepInputs, results: StepOutputs) -> tuple[Tensor | None, dict[str, Tensor] | None]:
        """The same of the rank of the last stage. Collective over the data-parallel ranks that have a loss."""
        losses, metrics = results.loss_by_microbatch(), results.metrics_by_microbatch()
        if losses is None or metrics is None:
            return None, None
        columns = losses, *metrics.values()
        numbers = [inputs.scale.reduce(column) for column in columns]
        if self._data_ranks is not None:
            table = torch.stack(numbers)
            self._data_ranks.all_reduce(table)
            numbers = list(table)
        dtypes = map(inputs.scale.reduced_dtype, columns)
        loss, *reduced_metrics = (number.to(dtype) for number, dtype in zip(numbers, dtypes, strict=True))
        return loss, dict(zip(metrics, reduced_metrics, strict=True))

    def joined(self, inputs: StepInputs, results: StepOutputs) -> Any:
        """Return the model's outputs for the whole batch, without memory of the inputs; None without outputs here."""
        manifest = self.layout.manifest
        training = bool(results.outputs) and self._context.stages[self._context.last].training
        return join(manifest, results.outputs, inputs.batch, training)

    def _connect_copies(self, world: World) -> ParameterCollectives:
        """Connect the ranks that hold the same stages, which then start from the same parameters. Collective."""
        context, groups = self._context, self._context.prepared.groups
        if context.replicas:
            raise PipegraphError(
                "parallelize_fn returned DistributedDataParallel, and the mesh has data-parallel ranks, too, "
                "whose gradients the pipeline reduces.",
                "return the stage without a wrapper.",
            )
        self._data_ranks = world.along(*DATA)
        parameters = copied_parameters(context.stages, sharded_parameters(groups), context.trained_by_loss)
        first = world.grid.line(world.rank, *DATA)[0]
        reduction = GradientReduction(parameters, context.stages, world.along(*DATA), first)
        reduction.make_equal()
        transfers: dict[int, list[GroupTransfers]] = {}
        if groups:
            line = world.shard_line()
            transfers = {
                index: [GroupTransfers(group, line) for group in stage_groups] for index, stage_groups in groups.items()
            }
            if world.grid.length(REPLICATE) > 1:
                first = world.grid.line(world.rank, REPLICATE)[0]
                parts = [
                    parameter.sharded for stage_groups in groups.values() for parameter in all_parameters(stage_groups)
                ]
                make_equal(list(dict.fromkeys(parts)), world.along(REPLICATE), first)
        self.ties.add_up_together()
        return ParameterCollectives(groups, transfers, reduction)

    def _during_step(self, observer: Observer | None) -> AbstractContextManager[None]:
        if self._collectives is None:
            return nullcontext()
        timer = None
        if self._times_collectives and isinstance(observer, CollectiveObserver):
            timer = CollectiveTimer(self._context.ranks[0], self._context.device, observer)
        return self._collectives.during_step(timer)

    def _count(self, lists: int | None, requested_count: int | None) -> int:
        """Return the requested number of microbatches. Raises ScheduleError if the schedule cannot have this number."""
        if lists is None:
            return self.executors.check(requested_count)
        try:
            return self.executors.check(lists)
        except ScheduleError as error:
            raise ScheduleError(f"the step was given lists of {lists} microbatches: {error}") from None
