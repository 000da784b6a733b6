"""The kernels of the stages that a process holds, with the loss behind the last one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from pipegraph.kernels import Loss, Maker, SizedKernels, StageKernels
from pipegraph.package import Manifest
from pipegraph.runtime.microbatch import fill_structure
from pipegraph.runtime.wiring import StageWiring


def make_kernels(
    make: Maker, stages: Mapping[int, nn.Module], wiring: Sequence[StageWiring], loss: Loss | None
) -> dict[int, StageKernels]:
    """Return the kernels of each stage. The last stage computes the loss as well."""
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


def packed_loss(manifest: Manifest, loss_fn: Callable[[Any, Any], Tensor] | None) -> Loss | None:
    """Return the loss of the last stage's outputs: `loss_fn` takes them in the model's own structure."""
    if loss_fn is None:
        return None
    names, structure = manifest.stages[-1].outputs, manifest.outputs
    return lambda outputs, target: loss_fn(fill_structure(structure, dict(zip(names, outputs, strict=True))), target)
