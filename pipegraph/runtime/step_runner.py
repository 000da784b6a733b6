"""What runs a pipeline's steps: the kernels of its stages, a transport, and executors.

There are executors for each number of microbatches, made when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import ArgumentError, PipegraphError, ScheduleError
from pipegraph.kernels import Loss, Maker, SizedKernels, StageKernels
from pipegraph.package import Manifest
from pipegraph.runtime.executor import Executor, run_executors
from pipegraph.runtime.gradients import share_infinities
from pipegraph.runtime.measurements import ObserverList
from pipegraph.runtime.microbatch import BatchSplitter
from pipegraph.runtime.model_arguments import fill_structure
from pipegraph.runtime.parameters import MissingGradients, redistribute_gradients
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.world import World
from pipegraph.runtime.replicas import Replicas, unwrapped
from pipegraph.runtime.schedule_choice import fewer_microbatches, forward_only, with_microbatches
from pipegraph.runtime.step_data import StepInputs, StepRequest
from pipegraph.runtime.step_state import StepOutputs
from pipegraph.runtime.ties import TiedWeights
from pipegraph.runtime.transport.distributed import DistributedTransport
from pipegraph.runtime.transport.protocol import LocalTransport, Transport
from pipegraph.runtime.wiring import StageWiring, first_senders, rank_pairs, stage_wirings
from pipegraph.schedule import Schedule, lower

Edges = Iterable[tuple[int, int]]

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""(output, target) → the loss of one microbatch, or (loss, metrics)"""


class StepExecutors:
    """Executors by what they do and by the number of microbatches.

    Args:
        schedule: the pipeline's own.
        given: what it was chosen by.
        processes: how many run it, one per rank; None for one process.
        edges, gradient_edges: (producer stage, consumer stage) pairs that carry values, and gradients.
        make: lowered schedule → the executors of this process.

    Attributes:
        training: the pipeline's own schedule with its transfers.
    """

    def __init__(
        self,
        schedule: Schedule,
        given: str | PathLike[str] | Schedule,
        processes: int | None,
        edges: Edges,
        gradient_edges: Edges,
        make: Callable[[Schedule], Sequence[Executor]],
    ) -> None:
        self._own, self._given, self._processes = schedule, given, processes
        self._edges, self._gradient_edges = tuple(edges), tuple(gradient_edges)
        self._make = make
        self._built = {schedule.microbatches: schedule}
        self._made: dict[tuple[bool, int], Sequence[Executor]] = {}
        self.training = lower(schedule, self._edges, self._gradient_edges)
        self._evaluation = lower(forward_only(schedule), self._edges, ())

    @property
    def own(self) -> Sequence[Executor]:
        """The executors of a training step of the pipeline's own number of microbatches."""
        count = self._own.microbatches
        return self.executors(False, count, count)

    def check(self, microbatches: int | None) -> int:
        """Return how many microbatches a step has that is asked to have so many; by default those of the schedule.

        Raises:
            PipegraphError: the schedule cannot have so many.
        """
        if microbatches is None:
            return self._own.microbatches
        if type(microbatches) is not int or microbatches < 1:
            raise ArgumentError(f"microbatches cannot be {microbatches!r}: give a whole number from 1 on.")
        self._schedule(microbatches)
        return microbatches

    def executors(self, evaluates: bool, microbatches: int, asked: int) -> Sequence[Executor]:
        """Return the executors of a step.

        Args:
            evaluates: whether only the forward runs.
            microbatches: how many the step has.
            asked: how many it was asked to have, at least as many.
        """
        key = evaluates, microbatches
        if key not in self._made:
            self._made[key] = self._make(self._lowered(evaluates, microbatches, asked))
        return self._made[key]

    def _lowered(self, evaluates: bool, microbatches: int, asked: int) -> Schedule:
        if microbatches == self._own.microbatches:
            return self._evaluation if evaluates else self.training
        try:
            schedule = self._schedule(microbatches)
        except ScheduleError:  # it cannot have so few
            schedule = fewer_microbatches(self._schedule(asked), microbatches)
        if evaluates:
            return lower(forward_only(schedule), self._edges, ())
        return lower(schedule, self._edges, self._gradient_edges)

    def _schedule(self, microbatches: int) -> Schedule:
        if microbatches not in self._built:
            self._built[microbatches] = with_microbatches(self._own, self._given, microbatches, self._processes)
        return self._built[microbatches]


class StepRunner:
    """Runs steps on the stages of this process, together with the other processes of the pipeline.

    Making it is collective, and the last part of it is where the ranks begin to need each other.

    Args:
        manifest: of the package, with the dtypes that the stages have now.
        stages: of this process, as `parallelize_fn` returned them.
        schedule: the pipeline's.
        given: what it was chosen by.
        make: makes the kernels of a stage.
        loss_fn: the loss of one microbatch.
        loss_reduction: one of `LOSS_REDUCTIONS`.
        device: where the stages are.
        world: the processes of the pipeline; None for a plain process.
        guard: the context in which all of this is called.

    Attributes:
        stages: of this process, without a `DistributedDataParallel` around them.
        batches: cuts batches and joins outputs.
        kernels: of each stage.
        executors: of this process.
        ties: the tied weights.
        transport: what carries tensors between ranks.
    """

    def __init__(
        self,
        manifest: Manifest,
        stages: Mapping[int, nn.Module],
        schedule: Schedule,
        given: str | PathLike[str] | Schedule,
        make: Maker,
        loss_fn: LossFunction | None,
        loss_reduction: str,
        device: torch.device,
        world: World | None,
        guard: FaultGuard,
    ) -> None:
        self._replicas = Replicas(stages)
        stages = {index: unwrapped(stage) for index, stage in stages.items()}
        self.stages, self._trains = stages, schedule.trains
        self._name = schedule.name
        ranks = (world.rank,) if world else tuple(range(schedule.ranks))
        placement = schedule.placement
        self.batches = BatchSplitter(
            manifest, stages, device, loss_reduction, self._replicas.count(len(manifest.stages) - 1)
        )
        self.ties = TiedWeights(manifest, stages, placement, ranks)
        self._missing = MissingGradients(manifest)
        wiring = stage_wirings(manifest)
        self.kernels = _make_kernels(make, stages, wiring, _packed_loss(manifest, loss_fn))
        self.executors = StepExecutors(
            schedule,
            given,
            world.size if world else None,
            manifest.edges(),
            manifest.gradient_edges(),
            lambda lowered: [Executor(rank, lowered, wiring, self.kernels, self.transport, device) for rank in ranks],
        )
        self._informants = first_senders(wiring[min(stages)], placement) if world else []

        # Everything that may fail on one rank alone is done. From here on the ranks need each other.
        self.transport: Transport = LocalTransport()
        if world:
            world.check_agreement(f"{manifest.to_json()} {schedule.actions}")
            self.ties.connect(world)
            self.transport = DistributedTransport(world, rank_pairs(self.executors.training), guard.report)
        guard.closing.callback(self.transport.close)
        if world and device.type == "cuda":
            guard.watch(lambda: world.close(abort=True))
        if world:
            share_infinities(loss_fn, world, guard)

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        request: StepRequest,
        observers: ObserverList,
    ) -> tuple[StepInputs, StepOutputs]:
        """Run one step, or only its forward. Returns what it took, and the results of its microbatches.

        Collective. Raises BatchError for a batch that does not fit, and PipegraphError for a loss that is missing,
        before anything is sent.
        """
        evaluates = request.evaluates
        trains = self._trains and not evaluates
        if self.batches.has_last_stage and not request.with_loss:
            self._check_without_loss(trains, request.has_target)
        passed = self.batches.take(args, kwargs, request)
        asked = self._count(passed.count, request.microbatches)
        given = self.batches.split(passed, request, asked, trains)
        self.transport.start("evaluate" if evaluates else "step", given)
        for ranks in self._informants:
            if given.unknown:
                self.transport.learn(ranks, given)
        executors = self.executors.executors(evaluates, len(given.batch.sizes.microbatches), asked)
        observer = observers.joined(evaluates)
        for executor in executors:
            executor.observer = observer
        results = StepOutputs()
        if trains:
            with self.ties.summed_gradients():
                run_executors(executors, given, results)
                redistribute_gradients(self.stages)
            self._replicas.reduce()
            self._missing.check(self.stages)
        else:
            run_executors(executors, given, results)
        self.transport.finish()
        return given, results

    def _count(self, lists: int | None, asked: int | None) -> int:
        """Return how many microbatches the step is asked to have. Raises ScheduleError if it cannot have so many."""
        if lists is None:
            return self.executors.check(asked)
        try:
            return self.executors.check(lists)
        except ScheduleError as error:
            raise ScheduleError(f"the step was given lists of {lists} microbatches: {error}") from None

    def _check_without_loss(self, trains: bool, has_target: bool) -> None:
        if trains:
            raise PipegraphError(f"{self._name} has a backward, which needs a loss: give Pipeline a loss_fn.")
        if has_target:
            raise PipegraphError(
                "a target was given, and this Pipeline has no loss_fn that takes it.\n"
                "Try: Pipeline(…, loss_fn=…), or leave the target out."
            )


def _make_kernels(
    make: Maker, stages: Mapping[int, nn.Module], wiring: Sequence[StageWiring], loss: Loss | None
) -> dict[int, StageKernels]:
    """Return the kernels of each stage. The last stage computes the loss as well."""
    require_type(make, Callable, "kernels is a name, or a function that makes them", 'kernels="inductor"')
    last = len(wiring) - 1
    kernels = {
        index: make(
            stage, wiring[index].input_gradients, wiring[index].output_gradients, loss if index == last else None
        )
        for index, stage in stages.items()
    }
    for index, made in kernels.items():
        if isinstance(made, SizedKernels):
            made.name_dimensions([value.shape for value in wiring[index].inputs])
    return kernels


def _packed_loss(manifest: Manifest, loss_fn: LossFunction | None) -> Loss | None:
    """Return the loss of the last stage's outputs: `loss_fn` takes them in the model's own structure."""
    if loss_fn is None:
        return None
    require_type(loss_fn, Callable, "loss_fn is a function of output and target", "loss_fn=nn.MSELoss()")
    names, structure = manifest.stages[-1].outputs, manifest.outputs
    return lambda outputs, target: loss_fn(fill_structure(structure, dict(zip(names, outputs, strict=True))), target)
