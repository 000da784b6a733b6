"""The sizes of a step: those that the caller's tensors show, and those of all microbatches.

inputs of a rank ─▶ ShownSizes ─▶ sizes of microbatches ─▶ merged with those of other ranks ─▶ StepSizes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pipegraph.errors import BatchError
from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH
from pipegraph.units import format_number_of

SizeItems = tuple[tuple[str, int], ...]
"""(name, size) for the sizes of a microbatch, in the order of the manifest"""

SizesCache = Callable[[SizeItems], "MicrobatchSizes"]


@dataclass(frozen=True)
class MicrobatchSizes:
    """The sizes of one microbatch. Microbatches of equal sizes share one, also those of different steps."""

    items: SizeItems
    _shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, compare=False, repr=False)  # reading takes time

    @cached_property
    def sizes(self) -> dict[str, int]:
        return dict(self.items)

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value in this microbatch."""
        shape = self._shapes.get(value.name)
        if shape is None:
            shape = self._shapes[value.name] = value.shape_at(self.sizes)
        return shape


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step.

    Attributes:
        microbatches: the sizes of each microbatch.
    """

    microbatches: tuple[MicrobatchSizes, ...]

    @classmethod
    def even(cls, sizes: Mapping[str, int], microbatches: int) -> StepSizes:
        """The sizes of a batch that is cut into microbatches as evenly as possible."""
        tables = microbatch_tables(ShownSizes(sizes), microbatches)
        return cls(tuple(MicrobatchSizes(tuple(table.items())) for table in tables))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The rows of the whole batch, and the sizes that all microbatches have in common."""
        first = self.microbatches[0].sizes
        if self.is_even:
            common = dict(first)
        else:
            common = {
                name: size
                for name, size in first.items()
                if all(microbatch.sizes[name] == size for microbatch in self.microbatches)
            }
        if BATCH in first:
            common[BATCH] = sum(microbatch.sizes[BATCH] for microbatch in self.microbatches)
        return common

    @cached_property
    def rows(self) -> int | None:
        """The rows of the whole batch; None if the model fixes them."""
        return self.sizes.get(BATCH)

    @cached_property
    def weights(self) -> list[float]:
        """The share of each microbatch in the mean over the rows of the batch."""
        if self.rows is None:
            return [1 / len(self.microbatches)] * len(self.microbatches)
        return [microbatch.sizes[BATCH] / self.rows for microbatch in self.microbatches]

    @cached_property
    def is_even(self) -> bool:
        """Whether all microbatches have the same sizes."""
        first = self.microbatches[0]
        return all(microbatch is first or microbatch == first for microbatch in self.microbatches)

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over the rows of the batch of one number for each microbatch [microbatches]."""
        if self.is_even:
            return numbers.mean()
        return (numbers * torch.tensor(self.weights, dtype=numbers.dtype, device=numbers.device)).sum()

    def lengths(self, value: Value) -> list[int]:
        """The length of each microbatch along the dimension in which a value is cut."""
        assert value.batch_dim is not None
        return [microbatch.shape(value)[value.batch_dim] for microbatch in self.microbatches]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value for the whole batch. Its other dimensions are those in the first microbatch."""
        shape = list(self.microbatches[0].shape(value))
        if value.batch_dim is not None:
            shape[value.batch_dim] = sum(self.lengths(value))
        return tuple(shape)

    def __str__(self) -> str:
        return describe_tables([microbatch.sizes for microbatch in self.microbatches])


@dataclass(frozen=True)
class ShownSizes:
    """The sizes that the tensors show which a rank was given.

    Attributes:
        batch_sizes: those of tensors of the whole batch, by name.
        lists: for each microbatch, those of the tensors in lists; empty if there are no lists.
    """

    batch_sizes: Mapping[str, int] = field(default_factory=dict)
    lists: tuple[Mapping[str, int], ...] = ()


def microbatch_tables(known_sizes: ShownSizes, microbatches: int, min_rows: int = 1) -> list[dict[str, int]]:
    """The sizes of each microbatch, as far as they are known.

    Rows are cut as evenly as possible: 10 rows in 4 microbatches are 3, 3, 2 and 2. A batch with too few rows for that
    number has fewer microbatches.

    Args:
        microbatches: the requested number.
        min_rows: of a microbatch.

    Raises:
        BatchError: the batch has too few rows for one microbatch, or for those of lists.
    """
    batch_sizes, count = known_sizes.batch_sizes, len(known_sizes.lists) or microbatches
    rows = batch_sizes.get(BATCH)
    if rows is None or any(BATCH in sizes for sizes in known_sizes.lists):
        return [{**batch_sizes, **sizes} for sizes in known_sizes.lists] or [dict(batch_sizes) for _ in range(count)]
    least = max(min_rows, 1)
    if rows < least:
        raise BatchError(
            f"the batch has {format_number_of('row', rows)}, and a microbatch of this package takes {least} or more.",
            f"{format_number_of('row', least)} or more.",
        )
    if known_sizes.lists and rows < least * count:
        raise BatchError(
            f"lists of {count} microbatches were passed, and the whole tensors have rows for {rows // least}.",
            "lists alone.",
        )
    count = min(count, rows // least)
    lists: Sequence[Mapping[str, int]] = known_sizes.lists or [{}] * count
    return [{**batch_sizes, **sizes, BATCH: part} for sizes, part in zip(lists, even_rows(rows, count), strict=True)]


def step_sizes(tables: Sequence[Mapping[str, int]], names: Sequence[str], shared: SizesCache) -> StepSizes | None:
    """The sizes of a step from those of its microbatches; None if one of them is not known.

    Args:
        names: all sizes, in the order of the manifest.
        shared: returns the same object for equal sizes.
    """
    if any(name not in table for table in tables for name in names):
        return None
    return StepSizes(tuple(shared(tuple((name, table[name]) for name in names)) for table in tables))


def even_rows(rows: int, microbatches: int) -> list[int]:
    """The rows of each microbatch if they are cut as evenly as possible, the larger ones first."""
    fewer, remainder = divmod(rows, microbatches)
    return [fewer + 1] * remainder + [fewer] * (microbatches - remainder)


def sizes_of_inputs(manifest: Manifest, shapes: Iterable[tuple[str, Sequence[int]]]) -> dict[str, int]:
    """The sizes that the shapes of inputs show, as far as an input has one as a dimension. The first input decides.

    Args:
        shapes: (input, its shape, with the number of dimensions that it has in the manifest).
    """
    sizes: dict[str, int] = {}
    for name, shape in shapes:
        for dimension, size in zip(manifest.values[name].shape, shape, strict=True):
            if dimension in manifest.sizes:
                sizes.setdefault(str(dimension), size)
    return sizes


def describe_tables(tables: Sequence[Mapping[str, int]]) -> str:
    """The sizes of microbatches: ``2 microbatches of [2, 1] rows, seq [8, 16]``."""
    rows = [table.get(BATCH, -1) for table in tables]
    text = format_number_of("microbatch", len(tables))
    if rows and min(rows) >= 0:
        text += f" of {rows} rows"
    for name in tables[0]:
        column = [table.get(name, -1) for table in tables]
        if name != BATCH and max(column) >= 0:
            text += f", {name} {column[0] if len(set(column)) == 1 else column}"
    return text
