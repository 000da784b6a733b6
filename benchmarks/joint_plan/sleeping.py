"""Kernels of a stage that sleep for as long as its own took, so that many ranks may share few cores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sleeping_stages import SleepingKernels
from pipegraph.kernels import Forward, Loss
from pipegraph.package import Manifest
from pipegraph.schedule import Kind


class PlannedKernels(SleepingKernels):
    """F and B that sleep, and return zeros of the shapes that the manifest has."""

    def __init__(
        self,
        stage: nn.Module,
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
        input_gradients: Sequence[bool],
        seconds: Mapping[Kind, float],
    ) -> None:
        super().__init__(stage, 0.0, input_gradients)
        self._shapes, self._seconds = shapes, seconds
        self._zeros = [torch.zeros_like(parameter) for parameter in self._parameters]

    def forward(
        self, inputs: Sequence[Any], *, target: Any = None, with_loss: bool = False, differentiable: bool = True
    ) -> Forward:
        time.sleep(self._seconds[Kind.F])
        outputs = tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in self._shapes)
        return Forward(outputs, torch.zeros(()) if with_loss else None, tuple(inputs) if differentiable else None)

    def backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        time.sleep(self._seconds[Kind.B])
        self.fill_gradients()
        pairs = zip(saved, self._input_gradients, strict=True)
        return tuple(torch.zeros_like(tensor) if needs_grad else None for tensor, needs_grad in pairs)

    def fill_gradients(self) -> None:
        """Give each parameter a gradient. New memory for it is a part of the seconds that are slept through."""
        for parameter, zeros in zip(self._parameters, self._zeros, strict=True):
            if parameter.grad is None:
                parameter.grad = zeros

    def input_backward(self, saved: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        raise NotImplementedError("the schedules here have whole backwards")

    def weight_backward(self, saved: Any) -> None:
        raise NotImplementedError("the schedules here have whole backwards")


def sleeping(manifest: Manifest, index: int, seconds: Mapping[Kind, float]) -> Any:
    """Return the maker of the kernels of a stage that sleep for so long.

    Its outputs have the shapes of the manifest: of a pipeline with tp, which may send parts, that of the pipeline.
    """
    manifest = manifest.at_capture()
    shapes = [
        (tuple(map(int, manifest.values[name].shape)), getattr(torch, manifest.values[name].dtype))
        for name in manifest.stages[index].outputs
    ]

    def make(
        stage: nn.Module, input_gradients: Sequence[bool], arriving: Sequence[bool], loss: Loss | None
    ) -> PlannedKernels:
        return PlannedKernels(stage, shapes, input_gradients, seconds)

    return make
