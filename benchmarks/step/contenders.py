"""The ways to run a step. Each leaves the gradients of the mean loss in `.grad`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleDualPipeV, ScheduleZBVZeroBubble
from transformers import LlamaForCausalLM

import pipegraph
from benchmarks.step.model import Part, StepSetting, parts, source_loss
from pipegraph.schedule import Schedule

TORCH_CLASSES: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}


class Contender(Protocol):
    """A way to run steps; every process runs them at the same time."""

    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        """Run one step over the whole batch. Return the mean loss in the process that has it, else None."""
        ...

    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients a step leaves in this process."""
        ...


class Limit:
    """A limit: each core computes half of the microbatches with the unsplit model, compiled by torch.compile.

    No transfer, no bubble, no imbalance: with such kernels no step takes less than the mean of the processes' times.
    """

    def __init__(self, setting: StepSetting, model: LlamaForCausalLM) -> None:
        self._setting = setting
        self._whole = Part(model, 0, setting.units)
        self._loss = torch.compile(lambda tokens, targets: source_loss(self._whole(tokens), targets), dynamic=False)

    def step(self, tokens: Tensor, targets: Tensor) -> float:
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        total = 0.0
        rows = zip(tokens.split(self._setting.rows)[mine], targets.split(self._setting.rows)[mine], strict=True)
        for some, wanted in rows:
            loss = self._loss(some, wanted) / self._setting.microbatches
            loss.backward()
            total += loss.item()
        return total

    def parameters(self) -> Iterable[nn.Parameter]:
        return self._whole.parameters()


class TorchPipeline:
    """A schedule of torch.distributed.pipelining over parts of the model. `compiled`: every stage and the loss are."""

    def __init__(
        self, setting: StepSetting, model: LlamaForCausalLM, schedule: str, cuts: Sequence[int], compiled: bool
    ) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        modules = parts(setting, model, cuts)
        v = schedule in ("ZBVZeroBubble", "DualPipeV")
        placement = [min(s, len(modules) - 1 - s) if v else s % ranks for s in range(len(modules))]
        self._own = {index: modules[index] for index, place in enumerate(placement) if place == rank}
        self._first, self._last = 0 in self._own, len(modules) - 1 in self._own
        run: dict[int, Any] = {
            index: torch.compile(module, dynamic=False) if compiled else module for index, module in self._own.items()
        }
        device = torch.device("cpu")
        stages = [pipelining.PipelineStage(each, index, len(modules), device) for index, each in run.items()]
        loss = torch.compile(source_loss, dynamic=False) if compiled else source_loss
        kind = TORCH_CLASSES[schedule]
        argument = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
        self._schedule = kind(argument, setting.microbatches, loss_fn=loss)

    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        losses: list[Tensor] = []
        inputs = (tokens,) if self._first else ()
        wanted = {"target": targets, "losses": losses} if self._last else {}
        self._schedule.step(*inputs, **wanted, return_outputs=False)
        return torch.stack(losses).mean().item() if losses else None

    def parameters(self) -> Iterable[nn.Parameter]:
        return [parameter for module in self._own.values() for parameter in module.parameters()]


class OwnPipeline:
    """pipegraph: a package under a schedule."""

    def __init__(self, setting: StepSetting, package: Path, schedule: str | Schedule, kernels: str) -> None:
        self.pipe = pipegraph.Pipeline(package, schedule, setting.microbatches, source_loss, kernels=kernels)

    def step(self, tokens: Tensor, targets: Tensor) -> float | None:
        loss = self.pipe.step(tokens, target=targets).loss
        return None if loss is None else loss.item()

    def parameters(self) -> Iterable[nn.Parameter]:
        return self.pipe.parameters()


class Packages:
    """The model's packages, one for each tuple of cuts; rank 0 writes a package when it is first needed."""

    def __init__(self, setting: StepSetting, model: LlamaForCausalLM, folder: Path) -> None:
        self._setting, self._folder = setting, folder
        self._captured: Any = None
        self._model = model

    def at(self, cuts: Sequence[int]) -> Path:
        """Return the package cut at these units. Collective: every process must call it."""
        path = self._folder / "-".join(map(str, cuts))
        if dist.get_rank() == 0 and not path.exists():
            if self._captured is None:
                tokens = self._setting.batch()[0][: self._setting.rows]
                self._captured = pipegraph.capture(Part(self._model, 0, self._setting.units), (tokens,))
            plan = pipegraph.plan(self._captured, points=[self._setting.point(unit) for unit in cuts])
            pipegraph.write_package(plan, path)
        dist.barrier()
        return path
