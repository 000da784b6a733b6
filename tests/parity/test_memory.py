"""What a divided backward keeps, in bytes, is what the schedule counts times what one microbatch keeps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pipegraph import Pipeline
from pipegraph.kernels import Forward
from pipegraph.kernels.registry import make
from pipegraph.package import Package
from pipegraph.schedule import Schedule, What, build, lifetimes
from tests.parity.cases import MODELS
from tests.parity.workshop import Workshop
from tests.slow import cases

STAGES, MICROBATCHES = 4, 8


class Saved:
    """What the backward of one microbatch of a stage will read, and how many bytes that is by now."""

    def __init__(self, stage: int, content: Any) -> None:
        self.stage, self.content, self.count = stage, content, 0


class Scale:
    """Makes kernels, and after each F and I adds up what each rank holds."""

    def __init__(self, placement: Sequence[int]) -> None:
        self.most = [0] * (max(placement) + 1)
        self.of_one = [0] * len(placement)
        """The most that one microbatch of each stage held."""
        self._placement = placement
        self._saved: weakref.WeakSet[Saved] = weakref.WeakSet()
        self._stage_count = 0

    def __call__(self, *arguments: Any) -> Kernels:
        self._stage_count += 1
        return Kernels(self, self._stage_count - 1, *arguments)

    def weigh(self, saved: Saved, state: set[int]) -> None:
        self._saved.add(saved)
        tensors = {tensor.untyped_storage()._cdata: tensor for tensor in saved.content.values.values()}
        saved.count = sum(tensor.nbytes for memory, tensor in tensors.items() if memory not in state)
        rank = self._placement[saved.stage]
        rank_bytes = sum(microbatch.count for microbatch in self._saved if self._placement[microbatch.stage] == rank)
        self.most[rank] = max(self.most[rank], rank_bytes)
        self.of_one[saved.stage] = max(self.of_one[saved.stage], saved.count)


class Kernels:
    def __init__(self, scale: Scale, stage: int, module: torch.nn.Module, *arguments: Any) -> None:
        self._kernels = make("eager", module, *arguments)
        self._scale, self._stage = scale, stage
        self._state = {tensor.untyped_storage()._cdata for tensor in [*module.parameters(), *module.buffers()]}

    def begin(self) -> None:
        self._kernels.begin()

    def retrace(self) -> None:
        pass

    def prepare(self, *arguments: Any, **options: Any) -> None:
        self._kernels.prepare(*arguments, **options)

    def forward(self, inputs: Sequence[Any], **options: Any) -> Forward:
        forward = self._kernels.forward(inputs, **options)
        saved = Saved(self._stage, forward.saved)
        self._scale.weigh(saved, self._state)
        return Forward(forward.outputs, forward.loss, saved)

    def backward(self, saved: Saved, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        return self._kernels.backward(saved.content, gradients)

    def input_backward(self, saved: Saved, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        input_gradients = self._kernels.input_backward(saved.content, gradients)
        self._scale.weigh(saved, self._state)
        return input_gradients

    def weight_backward(self, saved: Saved) -> None:
        self._kernels.weight_backward(saved.content)


@pytest.mark.parametrize("name", cases(["1f1b", "zb-v", "v-min"], slow=["v-min"]))
def test_peak_of_what_is_saved(shared_workshop: Workshop, name: str) -> None:
    model = MODELS["llama"]
    chunks = 1 if name == "1f1b" else 2
    package = Package.open(shared_workshop.package("llama", STAGES))
    schedule = build(name, STAGES // chunks, MICROBATCHES)
    scale = Scale(schedule.placement)
    pipe = Pipeline(package, schedule, loss_fn=model.loss, kernels=scale)
    assert model.tokens is not None
    tokens = torch.randint(97, (MICROBATCHES, model.tokens))
    pipe.step(input_ids=tokens, target=tokens)
    assert scale.most == pytest.approx(_expected(scale.of_one, schedule), rel=0.1)


def _expected(sizes: Sequence[int], schedule: Schedule) -> list[int]:
    """Of each rank the most that its stages' microbatches hold at one time, by the schedule's own lifetimes."""
    most = []
    for row, actions in zip(lifetimes(schedule), schedule.actions, strict=True):
        saved = [(span.made, span.last_read, sizes[span.stages[0]]) for span in row if span.what is What.SAVED]
        most.append(max(sum(size for start, last, size in saved if start <= at <= last) for at in range(len(actions))))
    return most
