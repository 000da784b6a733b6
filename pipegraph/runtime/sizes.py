"""The sizes of a step: how a batch of any size is cut into microbatches, and the shape of each value in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from pipegraph.package import Manifest, Value
from pipegraph.package.sizes import BATCH


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

    Attributes:
        sizes: of the whole batch, by name.
        microbatches: the sizes of each microbatch.
    """

    def __init__(self, sizes: Mapping[str, int], microbatches: int) -> None:
        self.sizes = dict(sizes)
        if BATCH not in sizes:
            self.microbatches = [MicrobatchSizes(sizes)] * microbatches
            return
        fewer, left = divmod(sizes[BATCH], microbatches)
        more, less = (MicrobatchSizes({**sizes, BATCH: rows}) for rows in (fewer + 1, fewer))
        self.microbatches = [more] * left + [less] * (microbatches - left)

    @cached_property
    def weights(self) -> list[float]:
        """The share of each microbatch in the mean over the rows of the batch."""
        if BATCH not in self.sizes:
            return [1 / len(self.microbatches)] * len(self.microbatches)
        return [each.sizes[BATCH] / self.sizes[BATCH] for each in self.microbatches]

    @property
    def is_even(self) -> bool:
        """Whether all microbatches have equally many rows."""
        return self.microbatches[0] is self.microbatches[-1]

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
