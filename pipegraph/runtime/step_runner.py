"""What runs a pipeline's steps: the kernels of its stages, a transport, and executors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from pipegraph.errors import PipegraphError, ScheduleError
from pipegraph.kernels import Maker
from pipegraph.runtime.batch import bind_batch
from pipegraph.runtime.boundary_dtypes import BoundaryDtypes
from pipegraph.runtime.collective_times import CollectiveTimer
from pipegraph.runtime.executor import Executor
from pipegraph.runtime.executor_turns import run_executors
from pipegraph.runtime.fully_sharded import ShardedGroup
from pipegraph.runtime.gradient_checks import GradientChecks
from pipegraph.runtime.gradient_reduction import GradientReduction, copied_parameters, make_equal, trained_by
from pipegraph.runtime.gradients import share_infinities
from pipegraph.runtime.input_gradients import InputGradients
from pipegraph.runtime.loss_reduction import LossFunction, LossReduction
from pipegraph.runtime.loss_scale import LossScale
from pipegraph.runtime.measurements import CollectiveObserver, Observer, ObserverList
from pipegraph.runtime.microbatches import BatchLayout, Microbatches, cut, join, local_sizes
from pipegraph.runtime.padding import NO_PADDING, Padding
from pipegraph.runtime.parameter_checks import ParameterChecks
from pipegraph.runtime.parameter_collectives import ParameterCollectives, find_parts, sharded_parameters
from pipegraph.runtime.parameters import redistribute_gradients
from pipegraph.runtime.prepared_stages import PreparedStages
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import Group
from pipegraph.runtime.processes.rank_grid import DATA, REPLICATE
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.random_numbers import RandomNumbers
from pipegraph.runtime.rank_options import check_stages
from pipegraph.runtime.replicas import Replicas, unwrapped
from pipegraph.runtime.shard_transfers import GroupTransfers, all_parameters
from pipegraph.runtime.stage_kernels import make_kernels
from pipegraph.runtime.step_agreement import LocalStep, StepAgreement
from pipegraph.runtime.step_data import StepRequest
from pipegraph.runtime.step_executors import StepExecutors
from pipegraph.runtime.step_inputs import StepInputs
from pipegraph.runtime.step_losses import StepLosses, check_grad_mode, check_without_loss
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.runtime.ties import TiedWeights
from pipegraph.runtime.transport.distributed import DistributedTransport
from pipegraph.runtime.transport.protocol import LocalTransport, Transport
from pipegraph.runtime.wiring import rank_pairs, stage_wirings
from pipegraph.schedule import Schedule


class StepRunner:
    """Runs steps on the stages of this process, together with the other processes of the pipeline.

    Making it is collective, and the last part of it is where the ranks begin to need each other.

    Args:
        prepared: the stages of this process.
        schedule: the pipeline's.
        choice: what it was chosen by.
        makers: of each stage, by its index, what makes its kernels.
        loss_fn: the loss of one microbatch.
        reduction: of the losses of microbatches.
        device: where the stages are.
        world: the processes of the pipeline; None for a plain process.
        guard: the context in which all of this is called.
        resident: how many sharded stages of a rank may be whole at a time; None for all.
        numbers: what random numbers depend on.
        checks_inputs: whether ranks of one pipeline are compared in what they were given.

    Attributes:
        stages: of this process, without a `DistributedDataParallel` around them.
        layout: of the batches.
        kernels: of each stage.
        executors: of this process.
        ties: the tied weights.
        transport: what carries tensors between ranks.
    """

    def __init__(
        self,
        prepared: PreparedStages,
        schedule: Schedule,
        choice: str | PathLike[str] | Schedule,
        makers: Mapping[int, Maker],
        loss_fn: LossFunction | None,
        reduction: LossReduction,
        device: torch.device,
        world: World | None,
        guard: FaultGuard,
        resident: int | None,
        numbers: RandomNumbers,
        checks_inputs: bool = True,
        padding: Padding = NO_PADDING,
    ) -> None:
        manifest, groups, precision = prepared.manifest, prepared.groups, prepared.precision
        self._replicas = Replicas(prepared.modules)
        self._numbers, self._padding = numbers, padding
        if self._replicas and reduction.weight_of is not None:
            raise PipegraphError(
                "loss_weight counts items over all ranks, and DistributedDataParallel takes the mean of its replicas' "
                "gradients.\nTry: return the stage without it, and give Pipeline a mesh with dp_replicate."
            )
        stages = {index: unwrapped(stage) for index, stage in prepared.modules.items()}
        self.stages, self._trains = stages, schedule.trains
        self._name, self._device = schedule.name, device
        pipeline = world.pipeline if world else tuple(range(schedule.ranks))
        ranks = (pipeline.index(world.rank),) if world else pipeline  # of the schedule
        self._rank = ranks[0]
        places = [pipeline[rank] for rank in schedule.placement]  # of the world
        self.layout = BatchLayout.from_manifest(
            manifest, stages, device, None if precision is None else precision.cast_from
        )
        self._reduction = reduction if self.layout.has_last_stage else LossReduction()  # others have no target
        self._last_replicas = self._replicas.count(len(manifest.stages) - 1)
        self.ties = TiedWeights(manifest, stages, places, (world.rank,) if world else ranks)
        find_parts(groups, stages)
        self._wiring = wiring = stage_wirings(manifest)
        self._boundaries = BoundaryDtypes(manifest, wiring, stages, places)
        share = world.grid.line(world.rank, *DATA).index(world.rank) if world else 0
        replicas = {index: share + self._replicas.place(index) for index in stages}  # one of both is 0
        self.kernels = make_kernels(makers, stages, manifest, wiring, loss_fn, precision, numbers, replicas)
        stage_kernels, ties = self.kernels, self.ties
        transport: Transport = LocalTransport()
        collectives: ParameterCollectives | None = None
        self.executors = StepExecutors(
            schedule,
            choice,
            len(pipeline) if world else None,
            manifest.edges(),
            manifest.gradient_edges(),
            lambda lowered: [  # called when all of these are there; it does not hold what holds it
                Executor(rank, lowered, wiring, stage_kernels, transport, device, pipeline, numbers, ties, collectives)
                for rank in ranks
            ],
            self._what_is_collective(world, groups, resident),
        )
        self._data_ranks: Group | None = None
        self._losses = StepLosses(manifest, stages, loss_fn, reduction, world, bool(self._replicas))
        self._losses.check_schedule(schedule)
        self._input_gradients = InputGradients(manifest, places, world.rank if world else 0, world)
        # Actions of a GPU are timed by events of streams, in which gloo's collectives are not.
        self._times_collectives = world is not None and (device.type == "cpu" or world.uses_nccl)

        are_copied = world is not None and world.grid.length(*DATA) > 1
        own_loss = loss_fn if self.layout.has_last_stage else None
        self._hooks = prepared.hooks
        self._hooks.check(stages, frozenset(index for index, stage_groups in groups.items() if stage_groups))
        self._parameter_checks = ParameterChecks(prepared, stages, self.ties, own_loss, are_copied)

        # Everything that may fail on one rank alone is done. From here on the ranks need each other.
        self._distributed: DistributedTransport | None = None
        if world:
            check_stages(world, manifest, stages, groups, trained_by(own_loss))
            if are_copied:
                collectives = self._connect_copies(world, own_loss, groups)
            self.ties.connect(world)
            self._distributed = DistributedTransport(world, rank_pairs(self.executors.training, pipeline), guard.report)
            transport = self._distributed
        self.transport, self._collectives = transport, collectives
        self._gradient_checks = GradientChecks(manifest, self.stages, world, numbers.seed is not None)
        min_rows = self.layout.min_rows
        self._agreement = StepAgreement(manifest, stages, loss_fn, world, device, min_rows, checks_inputs)
        guard.closing.callback(self.transport.close)
        if world and world.uses_nccl:
            guard.watch(lambda: world.close(abort=True))
        if world:
            share_infinities(loss_fn, world, guard, owner=self)

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
        evaluates = request.evaluates
        step, microbatches = self._local_step(args, kwargs, request)
        trains = step.trains
        self._parameter_checks.before_step(trains)
        input_gradients = self._input_gradients.begin(args, kwargs, trains)
        batch, scale = self._agree(step, microbatches, request)
        if trains:
            self._gradient_checks.before_step()
        self.transport.start()
        self._numbers.microbatches = len(batch.sizes.microbatches)
        self._numbers.evaluates = evaluates
        executors = self.executors.executors(evaluates, self._numbers.microbatches, step.microbatches)
        observer = observers.joined(evaluates)
        for executor in executors:
            executor.observer, executor.input_gradients = observer, input_gradients
        results = StepOutputs()
        dtypes = self._boundaries.under_autocast(self._distributed)
        inputs = StepInputs(batch, scale, request.with_loss, request.return_outputs, dtypes)
        for executor in executors:
            self._losses.prepare(executor, inputs, trains)
        with self._hooks.during_step(self.stages) if trains else nullcontext():
            with self._during_step(observer), self.ties.summed_gradients() if trains else nullcontext():
                run_executors(executors, inputs, results)
                if trains:
                    redistribute_gradients(self.stages)
                    if self._collectives is not None:
                        self._collectives.finish()
            if trains:
                self._replicas.reduce()
        if trains:
            if self._collectives is not None:
                self._collectives.make_buffers_equal()
            self._input_gradients.finish(input_gradients)
            self._losses.after_step()
            self._gradient_checks.after_step()
        self.transport.finish()
        self._numbers.steps += not evaluates
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
        trains, layout = self._trains and not request.evaluates, self.layout
        if layout.has_last_stage and not request.with_loss:
            check_without_loss(self._name, trains, request.has_target)
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
    ) -> tuple[Microbatches, LossScale]:
        """Agree with all ranks on the microbatches of a step, and on the weight of its loss. Collective."""
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
        divisor, counts_items = request.weight or total, step.needs_weight
        scale = LossScale(microbatches.sizes, self._reduction, counts_items, local, total, divisor, self._last_replicas)
        return microbatches, scale

    def reduced(self, inputs: StepInputs, results: StepOutputs) -> tuple[Tensor | None, dict[str, Tensor] | None]:
        """The loss and the metrics of a step, of the batch of all data-parallel ranks; None without a loss here.

        Collective over the data-parallel ranks that have a loss.
        """
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
        """The model's outputs for the whole batch, which share no memory with it; None if there are none here."""
        manifest = self.layout.manifest
        training = bool(results.outputs) and self.stages[len(manifest.stages) - 1].training
        return join(manifest, results.outputs, inputs.batch, training)

    def _what_is_collective(
        self, world: World | None, groups: Mapping[int, Sequence[ShardedGroup]], resident: int | None
    ) -> dict[str, Any]:
        """What `lower` has to know of the stages that several ranks hold: all of them, or none."""
        every = range(len(self._wiring)) if world is not None and world.grid.length(*DATA) > 1 else ()
        return {"sharded": every, "resident": resident} if groups else {"replicated": every}

    def _connect_copies(
        self, world: World, loss_fn: LossFunction | None, groups: Mapping[int, Sequence[ShardedGroup]]
    ) -> ParameterCollectives:
        """Connect the ranks that hold the same stages, which then start from the same parameters. Collective."""
        if self._replicas:
            raise PipegraphError(
                "parallelize_fn returned DistributedDataParallel, and the mesh has data-parallel ranks of its own, "
                "whose gradients the pipeline reduces.\nTry: return the stage without a wrapper."
            )
        self._data_ranks = world.along(*DATA)
        parameters = copied_parameters(self.stages, sharded_parameters(groups), loss_fn)
        reduction = GradientReduction(
            parameters, self.stages, world.along(*DATA), world.grid.line(world.rank, *DATA)[0]
        )
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
            timer = CollectiveTimer(self._rank, self._device, observer)
        return self._collectives.during_step(timer)

    def _count(self, lists: int | None, requested_count: int | None) -> int:
        """Return how many microbatches the step is asked to have. Raises ScheduleError if it cannot have so many."""
        if lists is None:
            return self.executors.check(requested_count)
        try:
            return self.executors.check(lists)
        except ScheduleError as error:
            raise ScheduleError(f"the step was given lists of {lists} microbatches: {error}") from None
