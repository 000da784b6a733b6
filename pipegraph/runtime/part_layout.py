"""How a tensor is divided between ranks: into parts of one size, each of which is a row of a message.

[5, 3] along its first dimension between two ranks    row 0 │ [3, 3]
                                                      row 1 │ [2, 3], filled up to [3, 3]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class PartLayout:
    """Parts of a tensor along one of its dimensions.

    Attributes:
        shape: of the whole tensor.
        dim: the dimension.
        ranks: how many parts there are.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int

    @cached_property
    def part(self) -> tuple[int, ...]:
        """The shape of a part, filled up to that of the largest."""
        return *self.shape[: self.dim], math.ceil(self.shape[self.dim] / self.ranks), *self.shape[self.dim + 1 :]

    @cached_property
    def length(self) -> int:
        """The elements of a row."""
        return math.prod(self.part)

    @property
    def is_even(self) -> bool:
        """Whether all parts have the same size: then none is filled up."""
        return self.shape[self.dim] == self.part[self.dim] * self.ranks

    def part_in(self, row: Tensor, size: int) -> Tensor:
        """A rank's part, which has this size along the dimension, in its row [length]; a view."""
        return row.view(self.part).narrow(self.dim, 0, size)

    def read(self, rows: Tensor, tensor: Tensor) -> None:
        """Fill a whole tensor from rows [ranks, length]."""
        parts = rows.view(self.ranks, *self.part).movedim(0, self.dim)
        if self.is_even:
            tensor.unflatten(self.dim, (self.ranks, self.part[self.dim])).copy_(parts)
        else:
            tensor.copy_(parts.flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.shape[self.dim]))

    def write(self, tensor: Tensor, rows: Tensor) -> None:
        """Write a whole tensor to rows [ranks, length]. What fills them up is zero."""
        if not self.is_even:
            filled = list(self.shape)
            filled[self.dim] = self.part[self.dim] * self.ranks
            source, tensor = tensor, tensor.new_zeros(filled)
            tensor.narrow(self.dim, 0, self.shape[self.dim]).copy_(source)
        parts = tensor.unflatten(self.dim, (self.ranks, self.part[self.dim])).movedim(self.dim, 0)
        rows.view(parts.shape).copy_(parts)
