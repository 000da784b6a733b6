"""`StandaloneStages`: stages of a package that something else than `Pipeline` runs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.errors import ArgumentError
from pipegraph.package import Package
from pipegraph.runtime.gradient_hooks import GradientHooks
from pipegraph.runtime.package_agreement import open_package
from pipegraph.runtime.parameters import TiedWeights, differing_names
from pipegraph.runtime.processes.faults import FaultGuard
from pipegraph.runtime.processes.group import TIMEOUT
from pipegraph.runtime.processes.rank_grid import single
from pipegraph.runtime.processes.world import join_world

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class StandaloneStages:
    """The stages of a package where something else than `Pipeline` runs them, such as torch's ``PipelineStage``.

    It keeps tied weights equal, calls hooks of parameters that the model has once for a step, and makes the gradients
    of inputs contiguous, which torch can only send so.

        stage = package.load_stage(rank)
        stages = pipegraph.StandaloneStages(package, {rank: stage})
        optimizer = torch.optim.AdamW(stage.parameters())
        with stages.summed_gradients():
            schedule.step(tokens)
        optimizer.step()

    Every process of the group makes it with its own stages, and before the optimizer: the copies of a weight in one
    process become one parameter, and those in several start as the first stage's.

    Args:
        package: the package, or its folder.
        stages: index → module, of the stages that this process holds.
        group: the processes that hold the stages; by default the default group, or this process alone.
        timeout: how many seconds a rank waits for another one.

    Raises:
        ArgumentError: a stage is in no process or in several, or does not have the package's parameters.
    """

    def __init__(
        self,
        package: Package | str | PathLike[str],
        stages: Mapping[int, nn.Module],
        group: ProcessGroup | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        description, example = "stages has a module for each index", "StandaloneStages(package, {0: stage})"
        require_type(stages, Mapping, description, example)
        for stage in stages.values():
            require_type(stage, nn.Module, description, example)
        world, _ = join_world(group, _device(stages.values()), timeout)
        self._guard = FaultGuard(world.rank, world.grid, world.store) if world else FaultGuard(0, single(1), None)
        weakref.finalize(self, self._guard.close)
        with self._guard:
            if world:
                self._guard.closing.callback(world.close, abort=False)
                world.open()
            package = open_package(package, world)
            stage_texts = [" ".join(map(str, sorted(stages)))]
            placement = _placement(package, world.gather_text(stage_texts[0]) if world else stage_texts)
            for index, stage in stages.items():
                missing, added = differing_names(package, index, stage)
                if missing or added:
                    raise ArgumentError(
                        f"The module of stage {index} has other parameters than {package.path}: missing {missing}, "
                        f"added {added}.",
                        f"the stage that load_stage({index}) of the package returns.",
                    )
            self._stages, self._hooks = dict(stages), GradientHooks(stages)
            ranks = {world.rank} if world else {0}
            self._ties = TiedWeights(package.manifest, dict(sorted(stages.items())), placement, ranks)
            self._ties.add_up_together()
            if world:
                self._ties.connect(world)
        for stage in stages.values():
            stage.register_forward_pre_hook(_make_gradients_contiguous)

    @contextmanager
    def summed_gradients(self) -> Iterator[None]:
        """A context around a step, or several: every copy of a tied weight then has the gradient that all copies got.

        Hooks of parameters that the model has are called at its end.

        Collective: every process must enter and leave it.
        """
        with self._guard, self._hooks.during_step(self._stages), self._ties.summed_gradients():
            yield


def _make_gradients_contiguous(stage: nn.Module, inputs: tuple[Any, ...]) -> None:
    """That of a concatenated value, for one, is a part of a larger tensor."""
    for tensor in inputs:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(Tensor.contiguous)


def _device(stages: Iterable[nn.Module]) -> torch.device:
    """The device of the first parameter; the CPU without one."""
    first = next((parameter for stage in stages for parameter in stage.parameters()), None)
    return torch.device("cpu") if first is None else first.device


def _placement(package: Package, stage_texts: Sequence[str]) -> list[int]:
    """The rank of each stage, from what each rank says that it holds."""
    ranks: dict[int, list[int]] = {index: [] for index in range(len(package.manifest.stages))}
    for rank, text in enumerate(stage_texts):
        for index in map(int, text.split()):
            ranks.setdefault(index, []).append(rank)
    for index, holders in ranks.items():
        if index >= len(package.manifest.stages):
            last = len(package.manifest.stages) - 1
            raise ArgumentError(f"{package.path} has no stage {index}: its stages are 0 to {last}.", "one of these.")
        if len(holders) != 1:
            where = f"on the ranks {', '.join(map(str, holders))}" if holders else "on no rank"
            raise ArgumentError(f"Stage {index} is {where}, and has to be on one.", f"a group of {len(ranks)} ranks.")
    return [holders[0] for _, holders in sorted(ranks.items())]
