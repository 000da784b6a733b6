"""`Pipeline`: a package, a schedule and this process's stages, put together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegraph.errors import PipegraphError
from pipegraph.kernels import Loss, Maker, maker
from pipegraph.package import CALLER, Manifest, Package
from pipegraph.runtime import parameters
from pipegraph.runtime.executor import Executor, drive
from pipegraph.runtime.gradient_clipping import clip_grad_norm
from pipegraph.runtime.microbatch import batch_rows, bind, check, cut, cut_target, join, pack
from pipegraph.runtime.observer import Observer, Observers
from pipegraph.runtime.processes.clock import Clock
from pipegraph.runtime.processes.faults import Guard
from pipegraph.runtime.processes.group import TIMEOUT
from pipegraph.runtime.processes.world import find, local_device
from pipegraph.runtime.receive_lookahead import receives_ahead
from pipegraph.runtime.schedule_choice import choose, forward_only
from pipegraph.runtime.step_state import Feed, Results
from pipegraph.runtime.ties import RemoteTies, share, ties
from pipegraph.runtime.transport.distributed import DistributedTransport
from pipegraph.runtime.transport.local import LocalTransport
from pipegraph.runtime.transport.protocol import Transport
from pipegraph.runtime.wiring import rank_pairs, wire
from pipegraph.schedule import Schedule, lower, receive_buffers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class StepResult:
    """What a step gives on the rank of the last stage; elsewhere everything is None.

    `loss` is the mean over microbatches, `losses` (where asked for) one number for each, `outputs` (where asked for)
    the model's outputs joined along the batch. None of them carries a graph.
    """

    loss: Tensor | None
    losses: Tensor | None
    outputs: Any


class Pipeline:
    """Runs a package under a schedule.

    Under a launcher such as torchrun, or with a process group (`group`, else the default one), every process holds the
    stages of one rank, and all make the Pipeline together. In a plain process all stages are held here, on virtual
    ranks that take turns: same schedule, same executor, same numbers.

    `schedule` is a name, a `Schedule`, or the path of a CSV file; `loss_fn(output, target)` the loss of one microbatch.
    `kernels` is "inductor" (compiled), "eager" (the same graphs, uncompiled) or "autograd", or what makes kernels of a
    stage; `recompute` says what their backward computes again instead of keeping it: "none", "min-cut" or "block".
    `timeout` is how many seconds a rank waits for another one until it takes that one for hung: longer than a whole
    step may take, the first one with its compilation included.

    `weights` is the folder of a Hugging Face checkpoint, whose parameters and persistent buffers take the place of the
    package's, in the stages' dtypes: each process reads those of its own stages, and opens no file without any.

    `parallelize_fn(stage)` is called with each stage of this process when its weights are loaded, and before anything
    looks at its parameters: it shards, freezes or replaces what it likes in place, or returns another module with
    parameters of the same names. Kernels are traced from what it left, DTensors included; stages take and return plain
    tensors. If it gives all parameters another dtype, as `stage.to(torch.bfloat16)` does, on every rank, then what the
    caller passes and what crosses between stages has that dtype, too.

    A stage is traced again when its mode, `requires_grad`, a dtype or shape, autocast, or the identity of its modules,
    parameters or buffers changes. For anything else call `pipe.retrace()`: attributes such as `dropout.p`, and numbers
    that `loss_fn` reads, are constants of the traced graph. A stage is traced `max_variants` times at most, counted
    from the last `retrace`; one more variant is left to autograd, with a warning.

        pipe = Pipeline("out/", schedule="1f1b", microbatches=8, loss_fn=loss)
        optimizer = torch.optim.AdamW(pipe.parameters())
        result = pipe.step(tokens, target=labels)
        optimizer.step()
    """

    def __init__(
        self,
        package: Package | str | PathLike[str],
        schedule: str | PathLike[str] | Schedule = "1f1b",
        microbatches: int | None = None,
        loss_fn: LossFunction | None = None,
        device: str | torch.device = "cpu",
        kernels: str | Maker = "inductor",
        group: ProcessGroup | None = None,
        recompute: str = "min-cut",
        parallelize_fn: parameters.Parallelize | None = None,
        timeout: float = TIMEOUT,
        weights: str | PathLike[str] | None = None,
        max_variants: int = 8,
    ) -> None:
        self._loss_fn = loss_fn
        self.device = local_device(device)
        self.kernels = kernels if isinstance(kernels, str) else "custom"
        self.recompute = recompute
        self._observer: Observer | None = None
        self._added: list[Observer] = []
        self._world = world = find(group, self.device, timeout)
        self._guard = guard = Guard(world.rank, world.size, world.store) if world else Guard(0, 1, None)
        weakref.finalize(self, guard.close)  # also at exit, before torch's own threads are torn down
        if world:
            guard.closing.callback(lambda: world.close(abort=guard.has_failed))
        with guard:
            self.package = package if isinstance(package, Package) else Package.open(package)
            manifest = self.package.manifest
            self.schedule = choose(schedule, microbatches, len(manifest.stages), world.size if world else None)
            placement = self.schedule.placement
            self.ranks = ranks = (world.rank,) if world else tuple(range(self.schedule.ranks))
            own = [stage for stage, rank in enumerate(placement) if rank in ranks]
            self.stages: dict[int, nn.Module] = parameters.load_stages(self.package, own, self.device, weights)
            if parallelize_fn is not None:
                before = parameters.dtypes(self.stages)
                self.stages = parameters.parallelized(self.package, self.stages, parallelize_fn)
                manifest = parameters.converted(manifest, before, parameters.dtypes(self.stages))
                self.package = replace(self.package, manifest=manifest)
            shared = share(ties(manifest), self.stages)
            elsewhere = (parameter for tie, parameter in shared.items() if tie.owner(placement) not in ranks)
            self._counted_elsewhere = set(map(id, elsewhere))
            wiring, loss = wire(manifest), _packed_loss(manifest, loss_fn)
            make = maker(kernels, recompute, max_variants) if isinstance(kernels, str) else kernels
            self._kernels = {
                index: make(
                    stage,
                    wiring[index].input_gradients,
                    wiring[index].output_gradients,
                    loss if index == len(wiring) - 1 else None,
                )
                for index, stage in self.stages.items()
            }
            training = lower(self.schedule, manifest.edges(), manifest.gradient_edges())
            evaluation = lower(forward_only(self.schedule), manifest.edges(), ())

            # What may fail on one rank alone is done. From here on the ranks need each other.
            self._ties: RemoteTies | None = None
            self._transport: Transport = LocalTransport()
            if world:
                world.agree(f"{manifest.to_json()} {self.schedule.actions}")
                self._ties = RemoteTies(shared, placement, world)
                self._transport = DistributedTransport(world, rank_pairs(training), _buffers(training, evaluation))
            guard.closing.callback(self._transport.close)
            if world and self.device.type == "cuda":
                guard.watch(lambda: world.close(abort=True))
            self._training, self._evaluation = (
                [Executor(rank, lowered, wiring, self._kernels, self._transport, self.device) for rank in ranks]
                for lowered in (training, evaluation)
            )

    def step(
        self,
        *args: Any,
        target: Any = None,
        return_outputs: bool = False,
        return_losses: bool = False,
        **kwargs: Any,
    ) -> StepResult:
        """One training step over a batch: the model's own arguments, cut along dimension 0, and the target likewise.

        Gradients of the mean loss are added to `.grad`. A rank may be given None for inputs that its stages do not
        take. Raises BatchError, before anything is sent, where a shape or dtype is not the package's; RuntimeFault
        where this rank or another one fails.
        """
        differentiable = self.schedule.trains
        with_loss = self._loss_fn is not None
        results = self._run(self._training, args, kwargs, target, with_loss, return_outputs, differentiable)
        losses = torch.stack([results.losses[index] for index in sorted(results.losses)]) if results.losses else None
        return StepResult(
            loss=None if losses is None else losses.mean(),
            losses=losses if return_losses else None,
            outputs=self._joined(results),
        )

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a batch, on the rank of the last stage and None elsewhere.

        Forward only, without gradients. Modules stay in the mode they are in: `pipe.stages[0].eval()` sets it.
        """
        return self._joined(self._run(self._evaluation, args, kwargs, None, False, True, False))

    def retrace(self) -> None:
        """Trace the stages of this process, and the loss, again at their next call. Not collective.

        For changes that are not noticed: an attribute of a module, a number or a function that `loss_fn` reads. Kernels
        that were compiled are used again for graphs that come out equal.
        """
        for kernels in self._kernels.values():
            kernels.retrace()

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of every action of the steps and evals to come: when it begins, ends, and what is saved.

        One at a time; None ends it. Without one nothing is looked at, and nothing takes longer.
        """
        self._observer = observer
        self._tell_observers()

    def add_observer(self, observer: Observer) -> None:
        """Tell this one as well, whatever `observe` says: it is told first of a beginning, and last of an end.

        Of steps alone: an eval between two steps is no part of either. Under a schedule that has no backward they are
        the same, and it is told of both.
        """
        self._added.append(observer)
        self._tell_observers()

    def remove_observer(self, observer: Observer) -> None:
        """Tell one that was added no more."""
        self._added.remove(observer)
        self._tell_observers()

    def _tell_observers(self) -> None:
        asked = [] if self._observer is None else [self._observer]
        told = [*self._added, *asked]
        for executors, observers in (
            (self._training, told),
            (self._evaluation, asked if self.schedule.trains else told),
        ):
            for executor in executors:
                executor.observer = Observers(observers) if len(observers) > 1 else next(iter(observers), None)

    def gather(self, figures: Sequence[float]) -> list[list[float]]:
        """A row of figures of every process, in the order of ranks. All processes call this, with equally long rows.

        None of them goes on before all have.
        """
        with self._guard:
            return self._world.gather(figures) if self._world else [list(figures)]

    def told(self, text: str) -> str:
        """The text that the first process passes, in every process. All of them call this."""
        with self._guard:
            return self._world.told(text) if self._world else text

    def clock(self) -> Clock:
        """How far this process's clock is from that of rank 0, measured by messages. All processes call this."""
        with self._guard:
            return self._world.clock() if self._world else Clock()

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters, each once, under the model's name: the first one, for a tied weight."""
        return parameters.named_parameters(self.stages)

    def state_dict(self) -> dict[str, Any]:
        """The entries of the model's `state_dict()` that belong to this rank's stages."""
        return parameters.state_dict(self.stages)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load this rank's part of a state dict of the model."""
        parameters.load_state_dict(self.package.manifest, self.stages, state_dict)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As `torch.nn.utils.clip_grad_norm_`, over the gradients of all ranks, which call this together."""
        with self._guard:
            group = self._world.everyone() if self._world else None
            own = list(self.parameters())
            counted = [parameter for parameter in own if id(parameter) not in self._counted_elsewhere]
            return clip_grad_norm(own, counted, max_norm, norm_type, group, self.device)

    def _run(
        self,
        executors: Sequence[Executor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        target: Any,
        with_loss: bool,
        keep_outputs: bool,
        summed: bool,
    ) -> Results:
        results = Results()
        with self._guard:
            if summed and self._has_last_stage and not with_loss:
                name = self.schedule.name
                raise PipegraphError(f"{name} has a backward, which needs a loss: give Pipeline a loss_fn.")
            feed = self._feed(args, kwargs, target, with_loss, keep_outputs)
            self._transport.start("step" if executors is self._training else "eval")
            with self._ties.summed() if self._ties and summed else nullcontext():
                drive(executors, feed, results)
                if summed:
                    parameters.lay_out_gradients(self.stages)
            self._transport.finish()
        return results

    def _feed(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any, with_loss: bool, keep_outputs: bool
    ) -> Feed:
        manifest, microbatches = self.package.manifest, self.schedule.microbatches
        given = bind(manifest, args, kwargs)
        taken = {name for index in self.stages for name in manifest.stages[index].inputs}
        needed = {name for name in taken if manifest.values[name].producer == CALLER}
        for name in sorted(needed | given.keys()):  # also what only others take, so that every rank says the same
            check(manifest.values[name], given.get(name), microbatches)
        inputs = {name: cut(manifest.values[name], given[name], microbatches, self.device) for name in needed}
        targets = cut_target(
            target, microbatches, self.device if self._has_last_stage else None, batch_rows(manifest, microbatches)
        )
        return Feed(inputs, targets, with_loss, keep_outputs)

    def _joined(self, results: Results) -> Any:
        if not results.outputs:
            return None
        manifest = self.package.manifest
        by_microbatch = [results.outputs[index] for index in sorted(results.outputs)]
        joined = map(join, zip(*by_microbatch, strict=True))
        return pack(manifest.outputs, dict(zip(manifest.stages[-1].outputs, joined, strict=True)))

    @property
    def _has_last_stage(self) -> bool:
        return len(self.package.manifest.stages) - 1 in self.stages


def _buffers(*lowered: Schedule) -> dict[tuple[int, int], int]:
    """Of each edge and direction, how many received messages these schedules hold at one time, at most."""
    most: dict[tuple[int, int], int] = {}
    for schedule in lowered:
        for stages, count in receive_buffers(schedule, receives_ahead(schedule)).items():
            most[stages] = max(count, most.get(stages, 0))
    return most


def _packed_loss(manifest: Manifest, loss_fn: LossFunction | None) -> Loss | None:
    """The loss of the last stage's outputs: `loss_fn` takes them in the model's own structure."""
    if loss_fn is None:
        return None
    names = manifest.stages[-1].outputs
    return lambda outputs, target: loss_fn(pack(manifest.outputs, dict(zip(names, outputs, strict=True))), target)
