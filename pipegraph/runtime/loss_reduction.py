"""How the loss of a step is made of the losses of its microbatches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from pipegraph.arguments import require_type
from pipegraph.errors import ArgumentError, BatchError
from pipegraph.runtime.batch import StepSizes

LOSS_REDUCTIONS: Final = ("mean", "sum")
"""The mean over microbatches, weighed by their rows, or the sum."""

LOSS_OVER: Final = ("rows", "batch", "microbatch")
"""A loss of which the rows of a batch are independent, which is checked; one over the whole batch; one over a
microbatch, however that was cut."""

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, dict[str, Tensor]]]
"""(output, target) → the loss of one microbatch, or (loss, metrics)"""

LossWeight = Callable[[Any], Tensor | float]
"""target of a microbatch → how many of its items count"""


@dataclass(frozen=True)
class LossReduction:
    """The mean over rows of what `loss_fn` returns, its sum, or its sum over the items that count.

    Attributes:
        sums: whether the losses of microbatches are added up and divided by nothing.
        weight_of: how many items of a microbatch count; None if its rows do.
        over: one of `LOSS_OVER`.
        broadcast: whether every rank gets the loss of a step.
    """

    sums: bool = False
    weight_of: LossWeight | None = None
    over: str = "rows"
    broadcast: bool = True

    @classmethod
    def from_arguments(
        cls, reduction: object, weight_of: LossWeight | None, over: object = "rows", broadcast: object = True
    ) -> LossReduction:
        """The reduction that the arguments of a pipeline ask for. Raises ArgumentError."""
        if reduction not in LOSS_REDUCTIONS:
            raise ArgumentError(
                f"loss_reduction cannot be {reduction!r}.",
                '"mean" if loss_fn returns the mean of its microbatch, "sum" if it returns a sum.',
            )
        if weight_of is not None:
            require_type(
                weight_of, Callable, "loss_weight is a function of a target", "loss_weight=lambda t: (t >= 0).sum()"
            )
            if reduction == "sum":
                raise ArgumentError(
                    'loss_weight divides the sum of losses, and loss_reduction="sum" divides by nothing.',
                    "one of the two.",
                )
        if over not in LOSS_OVER:
            raise ArgumentError(
                f"loss_over cannot be {over!r}.",
                '"rows" for a mean over rows, "batch" for a loss that compares '
                'the rows of a batch, or "microbatch" for one that is taken as it is for each microbatch.',
            )
        if over == "batch" and (reduction == "sum" or weight_of is not None):
            raise ArgumentError(
                'loss_over="batch" evaluates the loss once, so that no losses are added up, as '
                f"{'loss_weight' if weight_of is not None else 'loss_reduction'} asks for.",
                "one of the two.",
            )
        require_type(broadcast, bool, "broadcast_loss is True or False", "broadcast_loss=True")
        return cls(reduction == "sum", weight_of, str(over), bool(broadcast))

    def weigh(self, targets: Sequence[Any]) -> float:
        """Return the number of items that count in microbatches. Raises BatchError for an invalid number of items."""
        assert self.weight_of is not None
        return math.fsum(_number(self.weight_of(target)) for target in targets)


def checked_weight(weight: Any, reduction: LossReduction) -> float | None:
    """The weight of a step, if it has one. Raises ArgumentError."""
    if weight is None:
        return None
    if reduction.weight_of is None:
        raise ArgumentError(
            "weight is the divisor of a loss that counts items.",
            "Pipeline(…, loss_weight=lambda target: (target >= 0).sum()), or the step without weight.",
        )
    number = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < math.inf:
        raise ArgumentError(
            f"weight cannot be {weight!r}: it is how many items count in all accumulated steps, over all ranks.",
            "a number above 0.",
        )
    return float(number)


def _number(weight: Any) -> float:
    number = weight.item() if isinstance(weight, Tensor) and weight.numel() == 1 else weight
    if not isinstance(number, int | float) or not 0 <= number < math.inf:
        description = f"a tensor of shape {list(weight.shape)}" if isinstance(number, Tensor) else repr(number)
        raise BatchError(
            f"loss_weight(target) returned {description}; it is one number of items, 0 or more.", "take its sum."
        )
    return float(number)


# ---- loss scale ------------------------------------------------------------------------------------------------------
# The factors of the losses of a step: of each microbatch in the loss of the batch of all data-parallel ranks.


@dataclass(frozen=True)
class LossScale:
    """What the losses of a step are divided by.

    rank (dp 0)   6 rows ─▶ 2 microbatches of 3      loss · 6/10 ─┐
    rank (dp 1)   4 rows ─▶ 2 microbatches of 2      loss · 4/10 ─┴─ sum: the loss of the whole batch

    So a gradient is a part of that of the whole batch as soon as it is computed, and ranks only add theirs.

    Attributes:
        sizes: of this rank's microbatches.
        reduction: of the losses of microbatches.
        counts_items: whether the loss is divided by a number of items, and not of rows.
        local: the weight of this rank's batch: its rows, or the number of its items that count.
        total: the weight of the batches of all data-parallel ranks.
        divisor: what the loss is a mean over: the total, or the number that the caller passed.
        replicas: of the last stage, over which the mean of gradients is taken.
    """

    sizes: StepSizes
    reduction: LossReduction
    counts_items: bool
    local: float
    total: float
    divisor: float
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.counts_items and self.divisor == 0:
            raise BatchError(
                "loss_weight counts nothing in this batch, over all ranks: its loss would be divided by 0.",
                "leave the batch out, or step(…, weight=…) with what counts in all accumulated steps.",
            )

    def gradient(self, microbatch: int) -> float:
        """The gradient that the backward of a microbatch's loss begins with.

        A sum over replicas is their mean with this factor.
        """
        if self.reduction.sums:
            return float(self.replicas)
        if self.counts_items:
            return 1 / self.divisor
        return self.sizes.weights[microbatch] * self.local / self.total

    def reduce(self, numbers: Tensor) -> Tensor:
        """Reduce the losses [microbatches], or one of their metrics, to this rank's part of the step's.

        Those of all data-parallel ranks add up to it. Both are done with twice the digits of float32, so that the
        result is the same to the last digit for any division of microbatches among ranks.
        """
        numbers = numbers.detach().to(torch.complex128 if numbers.is_complex() else torch.float64)
        if self.reduction.sums:
            return numbers.sum()
        if self.counts_items:
            return numbers.sum() / self.divisor
        return self.sizes.mean(numbers) * (self.local / self.total)

    def reduced_dtype(self, numbers: Tensor) -> torch.dtype:
        """The dtype of the loss, or of a metric, of the step."""
        if numbers.is_floating_point() or numbers.is_complex():
            return numbers.dtype
        return torch.int64 if self.reduction.sums else torch.get_default_dtype()
