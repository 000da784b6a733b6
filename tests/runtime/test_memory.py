"""What a step keeps for its backward is what the schedule counts, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.kernels import Forward, Loss
from pipegraph.kernels.autograd import AutogradKernels
from pipegraph.package import Package
from pipegraph.runtime.pipeline import Pipeline
from pipegraph.schedule import Kind, Schedule, Times, What, lifetimes, names, simulate
from pipegraph.schedule.recipes import trains
from tests.runtime.packages import batch, loss, write
from tests.runtime.sketches import chain

MICROBATCHES, STAGES = 8, 4
TRAINING = [name for name in names() if trains(name)]
FULL_BACKWARD = [name for name in TRAINING if "zb" not in name and not name.startswith("v-")]  # no I and W apart


class Load:
    """Bytes that are held on each rank: now, and the most so far."""

    def __init__(self) -> None:
        self.now, self.most = [0] * STAGES, [0] * STAGES
        self.rank = 0
        """that computes"""

    def add(self, rank: int, count: int) -> None:
        self.now[rank] += count
        self.most[rank] = max(self.most[rank], self.now[rank])


class SavedContent:
    """Something saved on the rank that computes, from when it is made to when nobody holds it."""

    def __init__(self, load: Load, count: int, content: Any) -> None:
        self.held, self.rank, self.count, self.content = load, load.rank, count, content
        load.add(self.rank, count)

    def __del__(self) -> None:
        self.held.add(self.rank, -self.count)


class CountedKernels(AutogradKernels):
    """Those of autograd, with the same number of bytes saved for each microbatch from F to B or W."""

    def __init__(self, load: Load, count: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._load, self._count = load, count

    def forward(self, inputs: Sequence[Any], **options: Any) -> Forward:
        result = super().forward(inputs, **options)
        return Forward(result.outputs, result.loss, SavedContent(self._load, self._count, result.saved))

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return super().backward(saved.content, gradients)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package.open(write(chain(STAGES, width=64), tmp_path / "chain"))


@pytest.mark.parametrize("schedule", TRAINING)
def test_the_peak_of_what_kernels_save_is_the_schedules(schedule: str, package: Package) -> None:
    load = Load()

    def kernels(stage: nn.Module, inputs: Sequence[bool], outputs: Sequence[bool], last: Loss | None) -> CountedKernels:
        return CountedKernels(load, 1000, stage, inputs, outputs, last)

    pipe = step(package, schedule, MICROBATCHES, load, kernels)
    counted = simulate(pipe.schedule, Times.equal(STAGES)).peak_activations
    assert load.most[: len(counted)] == [1000 * count for count in counted]


@pytest.mark.parametrize("schedule", FULL_BACKWARD)
def test_the_peak_of_what_autograd_saves_is_the_schedules(schedule: str, package: Package) -> None:
    load = Load()

    def pack(tensor: Tensor) -> Any:
        parameter = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor if parameter else SavedContent(load, tensor.nbytes, tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: getattr(saved, "content", saved)):
        step(package, "1f1b", 1, load, "autograd")
        stage_bytes, load.most = load.most, [0] * STAGES  # a stage on each rank, and one microbatch
        pipe = step(package, schedule, MICROBATCHES, load, "autograd")
    expected = bytes_saved(pipe.schedule, stage_bytes)
    assert load.most[: len(expected)] == pytest.approx(expected, rel=0.1)


def step(package: Package, schedule: str, microbatches: int, load: Load, kernels: str | Callable[..., Any]) -> Pipeline:
    pipe = Pipeline(package, schedule=schedule, microbatches=microbatches, loss_fn=loss, kernels=kernels)
    for executor in pipe._runner.executors.training_executors:
        forward = executor._do[Kind.F]

        def watched(*arguments: Any, rank: int = executor.rank, forward: Any = forward) -> None:
            load.rank = rank
            forward(*arguments)

        executor._do[Kind.F] = watched
    (x,) = batch(package.manifest, microbatches).values()
    pipe.step(x, target=torch.zeros(len(x)))
    assert not any(load.now), "the step is over, and something is still held"
    return pipe


def bytes_saved(schedule: Schedule, per_stage: Sequence[int]) -> list[int]:
    """Of each rank, the most bytes it holds at one time, by the lifetimes of what its stages save."""
    most = []
    for row, actions in zip(lifetimes(schedule), schedule.actions, strict=True):
        saved = [(span.made, span.last_read, per_stage[span.stages[0]]) for span in row if span.what is What.SAVED]
        most.append(max(sum(size for first, last, size in saved if first <= at <= last) for at in range(len(actions))))
    return most
