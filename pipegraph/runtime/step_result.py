"""What a step returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipegraph.runtime.sizes import StepSizes


@dataclass(frozen=True)
class StepResult:
    """The result of a step on the rank of the last stage. On other ranks everything is None.

    Attributes:
        loss: the mean over microbatches, each weighed by its rows; None without a loss function.
        losses: one number for each microbatch, if asked for.
        outputs: the model's outputs joined along the batch, if asked for.

    No tensor carries a graph.
    """

    loss: Tensor | None
    losses: Tensor | None
    outputs: Any


def mean_loss(losses: Tensor, sizes: StepSizes) -> Tensor:
    """Return the mean of the losses [microbatches] over the rows of the batch."""
    if sizes.is_even:
        return losses.mean()
    return (losses * torch.tensor(sizes.weights, dtype=losses.dtype, device=losses.device)).sum()
