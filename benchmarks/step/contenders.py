"""The ways to run a step: the limit, pipegraph, and what all contenders are compared with for being right."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh

import pipegraph
from benchmarks.step.models import Case
from pipegraph.schedule import Schedule

_NUMBERS = itertools.count()


class Contender(ABC):
    """A way to run steps, in every process at the same time.

    `keeps_memory`: whether it lets its process keep the memory of freed tensors; torch and DeepSpeed do not.
    """

    keeps_memory = False

    @abstractmethod
    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        """Run one step over the whole batch: add the gradients of the mean loss to `.grad`.

        Returns the mean loss, or this process's part of it, in a process that has any, else None.
        """

    @abstractmethod
    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Return the parameters whose gradients a step leaves in this process, under the model's names."""

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients of a step by the model's names. Collective."""
        return {name: parameter.grad for name, parameter in self.named_parameters()}

    def clear(self) -> None:
        """Drop the gradients."""
        for _, parameter in self.named_parameters():
            parameter.grad = None


class Reference(Contender):
    """The unsplit model, not compiled, all of it in every process."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self._case, self._unsplit = case, case.unsplit(model)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        count, total = self._case.microbatches, 0.0
        for microbatch, target in zip(inputs.chunk(count), targets.chunk(count), strict=True):
            loss = self._case.loss(self._unsplit(microbatch), target) / count
            loss.backward()
            total += loss.item()
        return total

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._unsplit.named_parameters()


class Limit(Contender):
    """The limit: the unsplit model and its loss as one graph under torch.compile, its microbatches dealt to the cores.

    Every process computes its share of the microbatches, all at the same time, each with the thread that a rank has.
    The limit is the mean of their times: the processors' time of the unsplit, compiled step ÷ ranks. It has no
    boundary, no division of the backward, no bubble, no imbalance, no transfer and no interpreter, and its cores share
    memory and caches as the ranks do. Gradients are left in each process: the sum over processes is not timed.

    `with_loss`: without it the model is given a gradient of its outputs; the account takes the difference.
    """

    keeps_memory = True

    def __init__(self, case: Case, model: nn.Module, with_loss: bool = True, compiled: bool = True) -> None:
        self._count, self._unsplit = case.microbatches, case.unsplit(model)
        unsplit, loss = self._unsplit, case.loss

        def mean_loss(inputs: Tensor, targets: Tensor) -> Tensor:
            return loss(unsplit(inputs), targets) / case.microbatches

        def outputs(inputs: Tensor, targets: Tensor) -> Tensor:
            return unsplit(inputs)

        function = own_code(mean_loss if with_loss else outputs)
        self._run = torch.compile(function, dynamic=False, fullgraph=True) if compiled else function

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        share = slice(dist.get_rank(), None, dist.get_world_size())
        total = 0.0
        for microbatch, target in zip(inputs.chunk(self._count)[share], targets.chunk(self._count)[share], strict=True):
            result = self._run(microbatch, target)
            if result.dim():
                result.backward(torch.ones_like(result))
            else:
                result.backward()
                total += result.item()
        return total

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self._unsplit.named_parameters()

    def gradients(self) -> dict[str, Tensor | None]:
        gradients = super().gradients()
        for gradient in gradients.values():
            if gradient is not None:
                dist.all_reduce(gradient)
        return gradients


class OwnPipeline(Contender):
    """pipegraph: a package under a schedule."""

    keeps_memory = True

    def __init__(
        self, case: Case, package: Path, schedule: str | Schedule, kernels: str, mesh: DeviceMesh | None = None
    ) -> None:
        self.pipe = pipegraph.Pipeline(package, schedule, case.microbatches, case.loss, kernels=kernels, mesh=mesh)

    def step(self, inputs: Tensor, targets: Tensor) -> float | None:
        loss = self.pipe.step(inputs, target=targets).loss
        is_last = len(self.pipe.package.manifest.stages) - 1 in self.pipe.stages  # every rank has the loss
        return loss.item() if loss is not None and is_last else None

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.pipe.named_parameters()


class Packages:
    """The model's packages, one for each tuple of cuts; rank 0 writes a package when it is first needed."""

    def __init__(self, captured: Any, folder: Path) -> None:
        self._captured, self._folder = captured, folder

    def at(self, cuts: Sequence[str]) -> Path:
        """Return the package cut at these points. Collective: every process must call it."""
        path = self._folder / "-".join(cuts)
        if dist.get_rank() == 0 and not path.exists():
            pipegraph.write_package(pipegraph.plan(self._captured, points=list(cuts)), path)
        dist.barrier()
        return path


class Checker:
    """Compares a contender's step with the reference.

    Args:
        tolerance: the norm of what a gradient may differ by ÷ the norm of the reference's; and what the loss may.
    """

    def __init__(self, reference: Contender, batch: tuple[Tensor, Tensor], tolerance: float) -> None:
        self._batch, self._tolerance = batch, tolerance
        self._loss = reference.step(*batch)
        self._gradients = reference.gradients()
        reference.clear()

    def mistake(self, contender: Contender) -> str | None:
        """Run one step; return what is wrong with its gradients or its loss, None if nothing is. Collective."""
        contender.clear()
        loss = contender.step(*self._batch)
        gradients = contender.gradients()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            gathered, (loss or 0.0, {name: self._error(name, gradients[name]) for name in gradients})
        )
        contender.clear()
        every = {name: error for _, errors in gathered for name, error in errors.items()}
        if missing := self._gradients.keys() - every.keys():
            return f"no rank has {sorted(missing)[0]}"
        worst = max(every, key=every.__getitem__)
        if not every[worst] < self._tolerance:
            return f"the gradient of {worst} is off by {every[worst]:.1e} of its norm"
        total = sum(part for part, _ in gathered)
        if not abs(total - (self._loss or 0.0)) < self._tolerance:
            return f"the loss is {total:.6f}, not {self._loss:.6f}"
        return None

    def _error(self, name: str, gradient: Tensor | None) -> float:
        expected = self._gradients[name]
        if gradient is None or expected is None:
            return float("inf")
        error = (gradient - expected).norm() / expected.norm()
        return float("inf") if error.isnan() else error.item()


def own_code(function: Any) -> Callable[..., Any]:
    """Return a copy of a function that shares no code object with others.

    torch.compile keeps guards and what it compiled by code object. Two stages with one `forward` would look through
    each other's guards at every call, and count as recompilations of each other.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}")
    return FunctionType(code, function.__globals__, code.co_name, function.__defaults__, function.__closure__)
