"""What the executors of a step read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipegraph.package import Value
from pipegraph.runtime.loss_reduction import LossScale
from pipegraph.runtime.microbatches import Microbatches
from pipegraph.runtime.wiring import torch_dtype, zeros_for


@dataclass(frozen=True)
class StepInputs:
    """The microbatches of a step, and how they are computed.

    Attributes:
        scale: of the losses.
        with_loss: whether the loss is computed.
        keep_outputs: whether the result has the model's outputs.
        dtypes: of values that have another dtype in this step than in the manifest.
    """

    batch: Microbatches
    scale: LossScale
    with_loss: bool
    keep_outputs: bool
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """The shape of a value in a microbatch."""
        return self.batch.sizes.microbatches[microbatch].shape(value)

    def dtype(self, value: Value) -> torch.dtype:
        """The dtype of a value in this step."""
        return self.dtypes.get(value.name) or torch_dtype(value)

    def zeros(self, value: Value, microbatch: int, device: torch.device) -> Tensor:
        """Zeros in the place of a value of a microbatch."""
        return zeros_for(value, self.shape(value, microbatch), self.dtype(value), device)
