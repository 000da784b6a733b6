"""What a step takes and returns: sizes, a batch that is cut into microbatches once they are known, and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from pipegraph.errors import BatchError, RuntimeFault
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH
from pipegraph.runtime.loss_reduction import LossReduction
from pipegraph.runtime.wiring import torch_dtype, zeros_for

NO_TARGET: Final = object()
"""In the place of a target that the caller left out."""


@dataclass(frozen=True)
class StepRequest:
    """What a step is asked for besides its inputs.

    Attributes:
        target: the second argument of the loss function.
        with_loss: whether the loss is computed.
        microbatches: how many the batch is cut into; None for as many as the pipeline has.
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


class MicrobatchSizes:
    """The sizes of one microbatch. Microbatches of equal sizes share one."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._shapes: dict[str, tuple[int, ...]] = {}

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value in this microbatch."""
        if value.name not in self._shapes:
            self._shapes[value.name] = value.shape_at(self.sizes)
        return self._shapes[value.name]


class StepSizes:
    """The sizes of a step.

    Rows are cut as evenly as they go: 10 rows in 4 microbatches are 3, 3, 2 and 2. If the model fixes its batch, each
    microbatch has that many rows.

    Args:
        rows: those of each microbatch, if the caller has cut the batch.

    Attributes:
        sizes: of the whole batch, by name.
        microbatches: the sizes of each microbatch.
    """

    def __init__(self, sizes: Mapping[str, int], microbatches: int, rows: Sequence[int] | None = None) -> None:
        self.sizes = dict(sizes)
        if BATCH not in sizes:
            self.microbatches = [MicrobatchSizes(sizes)] * microbatches
            return
        if rows is None:
            rows = even_rows(sizes[BATCH], microbatches)
        by_rows = {each: MicrobatchSizes({**sizes, BATCH: each}) for each in rows}
        self.microbatches = [by_rows[each] for each in rows]

    @cached_property
    def weights(self) -> list[float]:
        """The share of each microbatch in the mean over the rows of the batch."""
        if BATCH not in self.sizes:
            return [1 / len(self.microbatches)] * len(self.microbatches)
        return [each.sizes[BATCH] / self.sizes[BATCH] for each in self.microbatches]

    @property
    def is_even(self) -> bool:
        """Whether all microbatches have equally many rows."""
        return all(each is self.microbatches[0] for each in self.microbatches)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the rows of the batch of one number for each microbatch [microbatches]."""
        if self.is_even:
            return numbers.mean()
        return (numbers * torch.tensor(self.weights, dtype=numbers.dtype, device=numbers.device)).sum()

    def lengths(self, value: Value) -> list[int]:
        """The length of each microbatch along the dimension in which a value is cut."""
        assert value.batch_dim is not None
        return [each.shape(value)[value.batch_dim] for each in self.microbatches]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value for the whole batch."""
        shape = list(self.microbatches[0].shape(value))
        if value.batch_dim is not None:
            shape[value.batch_dim] = sum(self.lengths(value))
        return tuple(shape)


def even_rows(rows: int, microbatches: int) -> list[int]:
    """The rows of each microbatch if they are cut as evenly as they go, the larger ones first."""
    fewer, left = divmod(rows, microbatches)
    return [fewer + 1] * left + [fewer] * (microbatches - left)


def sizes_of_inputs(manifest: Manifest, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The sizes that the shapes of inputs show, as far as an input has one as a dimension. The first input decides.

    Args:
        shapes: input → its shape, with as many dimensions as in the manifest.
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        for dimension, size in zip(manifest.values[name].shape, shape, strict=True):
            if dimension in manifest.sizes:
                sizes.setdefault(str(dimension), size)
    return sizes


class StepBatch(NamedTuple):
    """A batch in microbatches: their sizes, every input by name, and the target, each as one item per microbatch."""

    sizes: StepSizes
    inputs: Mapping[str, Sequence[Any]]
    targets: Sequence[Any]


@dataclass(frozen=True)
class LossScale:
    """What the losses of a step are divided by.

    Attributes:
        own: what this rank's batch weighs: its rows, if it has any, or what counts in it.
        total: what the batches of all data-parallel ranks weigh together.
        divisor: what the loss is a mean over: the total, or what the caller gave.
    """

    own: float
    total: float
    divisor: float

    @property
    def share(self) -> float:
        """This rank's part of the mean over all rows."""
        return self.own / self.total


class StepInputs:
    """What a step takes.

    A process that is given no input with some size learns it from the first message that it receives. Until then its
    batch is not cut.

    Args:
        known: the sizes that the inputs of this process show, by name.
        names: all sizes, in the order of the manifest.
        cut: cuts the batch, given all sizes, the rows of each microbatch if the caller has cut it, and how many
            microbatches there are at most. Raises BatchError.
        microbatches: how many were asked for. There are fewer if the batch has too few rows.
        request: what is asked for besides.
        reduction: of the losses of microbatches.
        replicas: of the last stage, over which the mean of gradients is taken.
        rows: those of each microbatch, if the inputs of this process are cut.

    Attributes:
        dtypes: of values that have another dtype in this call than in the manifest.
        scale: of the loss, once `scale_loss` has made it.
    """

    scale: LossScale

    def __init__(
        self,
        known: Mapping[str, int],
        names: Sequence[str],
        cut: Callable[[Mapping[str, int], Sequence[int] | None, int], StepBatch],
        microbatches: int,
        request: StepRequest,
        reduction: LossReduction,
        replicas: int = 1,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._rows = rows
        self.microbatches, self.with_loss, self.keep_outputs = microbatches, request.with_loss, request.return_outputs
        self._reduction, self._replicas = reduction, replicas
        self._divisor = request.weight
        self._known, self._names, self._cut = dict(known), names, cut
        self._batch: StepBatch | None = None
        self.dtypes: Mapping[str, torch.dtype] = {}

    @property
    def unknown(self) -> list[str]:
        """The sizes that this process does not know yet."""
        return [name for name in self._names if name not in self._known]

    @property
    def numbers(self) -> tuple[int, ...]:
        """All sizes in the order of the manifest; −1 for one that is not known."""
        return tuple(self._known.get(name, -1) for name in self._names)

    @property
    def known_rows(self) -> tuple[int, ...] | None:
        """The rows of each microbatch; empty if the batch is cut evenly; None if they are not known."""
        if BATCH in self.unknown:
            return None
        rows = [*(self._rows or ())]
        return () if not rows or rows == even_rows(sum(rows), len(rows)) else tuple(rows)

    def learn(self, sizes: Mapping[str, int]) -> None:
        """Take over the sizes that this process does not know, and cut the batch. Raises BatchError."""
        self._known = {**sizes, **self._known}
        if not self.unknown:
            self._batch = self._cut(self._known, self._rows, self.microbatches)

    @property
    def is_cut_by_caller(self) -> bool:
        """Whether the caller has cut the batch, so that it has as many microbatches as the caller made."""
        return self._rows is not None

    @cached_property
    def own_weight(self) -> float:
        """What the batch weighs beside those of other data-parallel ranks. Raises BatchError if that is no number."""
        sizes = self.batch.sizes
        if self._counts_items:
            return self._reduction.weigh(self.batch.targets)
        return sizes.sizes.get(BATCH, len(sizes.microbatches))

    @property
    def _counts_items(self) -> bool:
        return self.with_loss and self._reduction.weight_of is not None

    def cut_into(self, microbatches: int) -> None:
        """Cut the batch into so many microbatches."""
        if microbatches != len(self.batch.sizes.microbatches):
            self._batch = self._cut(self._known, self._rows, microbatches)

    def scale_loss(self, total: float) -> None:
        """Make the scale of the loss, of a whole that weighs so much over all data-parallel ranks.

        Raises:
            BatchError: nothing counts there, and the loss would be divided by 0.
        """
        self.scale = LossScale(self.own_weight, total, self._divisor or total)
        if self._counts_items and self.scale.divisor == 0:
            raise BatchError(
                "loss_weight counts nothing in this batch, over all ranks: its loss would be divided by 0.\n"
                "Try: leave the batch out, or step(…, weight=…) with what counts in all accumulated steps."
            )

    def learn_numbers(self, numbers: Sequence[int], rows: Sequence[int] | None) -> None:
        """Take over sizes in the form of `numbers`, and rows in that of `known_rows`."""
        named = zip(self._names, numbers, strict=True)
        self._rows = rows or None if BATCH in self.unknown else self._rows
        self.learn({name: number for name, number in named if number >= 0})

    @property
    def batch(self) -> StepBatch:
        """The batch. Raises RuntimeFault if a size is not known."""
        if self._batch is None:
            raise RuntimeFault(
                f"this rank does not know {', '.join(self.unknown)}, and no message brought it: pass every input of "
                "the model to every rank."
            )
        return self._batch

    def loss_gradient(self, microbatch: int) -> float:
        """The gradient that the backward of a microbatch's loss begins with.

        A sum over replicas is their mean with this factor.
        """
        if self._reduction.sums:
            return float(self._replicas)
        if self._counts_items:
            return 1 / self.scale.divisor
        return self.batch.sizes.weights[microbatch] * self.scale.share

    def reduce(self, numbers: Tensor) -> Tensor:
        """Put the losses [microbatches], or one of their metrics, together: this rank's part of the step's.

        Those of all data-parallel ranks add up to it. Both are done with twice the digits of float32, so that the
        result is the same to the last of its own however microbatches are shared among ranks.
        """
        numbers = numbers.detach().to(torch.complex128 if numbers.is_complex() else torch.float64)
        if self._reduction.sums:
            return numbers.sum()
        if self._counts_items:
            return numbers.sum() / self.scale.divisor
        return self.batch.sizes.mean(numbers) * self.scale.share

    def reduced_dtype(self, numbers: Tensor) -> torch.dtype:
        """The dtype of what losses or metrics are put together to."""
        if numbers.is_floating_point() or numbers.is_complex():
            return numbers.dtype
        return torch.int64 if self._reduction.sums else torch.get_default_dtype()

    def shape(self, value: Value, microbatch: int) -> tuple[int, ...]:
        """The shape of a value in a microbatch."""
        return self.batch.sizes.microbatches[microbatch].shape(value)

    def dtype(self, value: Value) -> torch.dtype:
        """The dtype of a value in this call."""
        return self.dtypes.get(value.name) or torch_dtype(value)

    def zeros(self, value: Value, microbatch: int, device: torch.device) -> Tensor:
        """Zeros in the place of a value of a microbatch."""
        return zeros_for(value, self.shape(value, microbatch), self.dtype(value), device)


@dataclass(frozen=True)
class StepResult:
    """The result of a step on the rank of the last stage. On other ranks everything is None.

    Attributes:
        loss: the mean over microbatches, each weighed by its rows, with loss_reduction="sum" their sum, or with
            loss_weight their sum over what counts, in a mesh over all data-parallel ranks; None without a loss
            function.
        losses: one number for each microbatch of this rank's share of the batch, if asked for.
        outputs: the model's outputs for this share joined along the batch, if asked for.
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
