"""The kernels of this process's stages, with the loss after the last stage, their precision and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipegraph.arguments import require_type
from pipegraph.kernels import Loss, Maker, SizedKernels, StageKernels
from pipegraph.package import Manifest
from pipegraph.runtime.loss_reduction import LossFunction
from pipegraph.runtime.model_arguments import fill_structure
from pipegraph.runtime.precision import AppliedPrecision
from pipegraph.runtime.random_numbers import RandomNumbers, StageDraws, seed_kernels
from pipegraph.runtime.wiring import StageWiring


def make_kernels(
    makers: Mapping[int, Maker],
    stages: Mapping[int, nn.Module],
    manifest: Manifest,
    wiring: Sequence[StageWiring],
    loss_fn: LossFunction | None,
    precision: AppliedPrecision | None,
    numbers: RandomNumbers,
    replicas: Mapping[int, int],
) -> dict[int, StageKernels]:
    """Return the kernels of each stage of this process.

    Args:
        makers, stages, replicas: by the index of a stage: the maker of its kernels, its module, and its place among
            the replicas that compute other rows of the same batch.
        wiring: the wiring of all stages.
        numbers: the state that random numbers depend on.

    Raises:
        ArgumentError: `loss_fn` is not a function.
    """
    last = len(wiring) - 1
    loss = None if loss_fn is None else packed_loss(manifest, stages.get(last), loss_fn)
    stage_kernels = {}
    for index, stage in stages.items():
        stage_wiring = wiring[index]
        kernels = makers[index](
            stage, stage_wiring.input_gradients, stage_wiring.output_gradients, loss if index == last else None
        )
        if isinstance(kernels, SizedKernels):
            kernels.name_dimensions([value.shape for value in stage_wiring.inputs])
        if precision is not None:
            precision.apply_to(index, kernels)
        if numbers.seed is not None:
            seed_kernels(kernels, StageDraws(numbers, manifest.stages[index], stage, replicas[index]))
        stage_kernels[index] = kernels
    return stage_kernels


def packed_loss(manifest: Manifest, last: nn.Module | None, loss_fn: LossFunction) -> Loss:
    """Return the loss of the last stage's outputs: `loss_fn` takes them in the model's own structure."""
    kinds = type(None) if isinstance(loss_fn, type) else Callable  # the class of a loss is not yet one
    require_type(loss_fn, kinds, "loss_fn is a function of output and target", "loss_fn=nn.MSELoss()")
    names = manifest.stages[-1].outputs

    def loss(outputs: Sequence[Tensor], target: Any) -> Any:
        structure = manifest.outputs_in(last is None or last.training)
        return loss_fn(fill_structure(structure, dict(zip(names, outputs, strict=True))), target)

    return loss
