"""The factors of the losses of a step: of each microbatch in the loss of the batch of all data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipegraph.errors import BatchError
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.step_sizes import StepSizes


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
                "loss_weight counts nothing in this batch, over all ranks: its loss would be divided by 0.\n"
                "Try: leave the batch out, or step(…, weight=…) with what counts in all accumulated steps."
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
