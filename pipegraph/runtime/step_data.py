"""The request and the result of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

NO_TARGET: Final = object()
"""In the place of a target that the caller left out."""


@dataclass(frozen=True)
class StepRequest:
    """The arguments of a step, without its inputs.

    Attributes:
        target: the second argument of the loss function.
        with_loss: whether the loss is computed.
        microbatches: the number of microbatches; None for the pipeline's number.
        evaluates: whether only the forward runs.
        weight: the divisor of the loss, if the caller gave it.
    """

    target: Any
    with_loss: bool
    return_outputs: bool
    return_losses: bool
    microbatches: int | None
    evaluates: bool = False
    weight: float | None = None

    @property
    def has_target(self) -> bool:
        return self.target is not None and self.target is not NO_TARGET


@dataclass(frozen=True)
class StepResult:
    """The result of a step. On ranks without the last stage everything but the loss and its weight is None.

    Attributes:
        loss: the mean over microbatches, each weighed by its rows, with loss_reduction="sum" their sum, or with
            loss_weight their sum over what counts, in a mesh over all data-parallel ranks: the same number on every
            rank, or with broadcast_loss=False on those of the last stage alone. None without a loss function.
        losses: one number for each microbatch of this rank's share of the batch, if asked for.
        outputs: the model's outputs for this share, if asked for: joined along their rows, or a list with one for each
            microbatch if their lengths differ; without rows as they are if all are equal, else their mean over rows.
        metrics: what `loss_fn` returned with the loss, by name, put together as the loss is.
        weight: what the loss is a mean over, on all ranks together: rows, with loss_weight what counts, or the weight
            that the step was given. The mean loss of several calls is the sum of loss · weight over the sum of weight;
            that of steps which were given one weight for all of them is the sum of loss.

    No tensor carries a graph.
    """

    loss: Tensor | None
    losses: Tensor | None
    outputs: Any
    metrics: Mapping[str, Tensor] | None = None
    weight: float | None = None
