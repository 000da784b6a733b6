"""Sizes that have to be fixed because what a model computes from them is too long, or no stage's source can say it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any, Final

import sympy
import torch

from pipegraph.errors import current_user_line
from pipegraph.graph.symbolic_size import InputDimension
from pipegraph.torch_private.export import size_expressions_seen
from pipegraph.torch_private.pytrees import pytree

_LONGEST: Final = 250
"""Numbers, sizes and operations in an expression. The models of docs/models.md have 194 at most, but for two: a Swin,
which pads images and cuts them into windows, has over a thousand after four layers, and takes minutes; a FocalNet has
over 400 at the end of its export, which is made three times if only these are too long."""

_DIMENSION: Final = re.compile(r"\.size\(\)\[(\d+)\]$")


class FixedSizeNeededError(Exception):
    """A program computes something from sizes that only numbers can express in a stage's source.

    Attributes:
        dimensions: the dimensions of inputs whose sizes have to be fixed.
        line: the line of the model's source; "" if it is not known.
    """

    def __init__(self, dimensions: frozenset[InputDimension], line: str = "") -> None:
        super().__init__(str(sorted(dimensions)))
        self.dimensions = dimensions
        self.line = line


class ShapeExpressionLimit:
    """Watches an export for expressions of sizes that are too long to continue with.

    Args:
        args, kwargs: what the model is exported on.
        free_dims: the dimensions that have to vary however long it takes.

    Attributes:
        refusal: the error for the first expression that is too long; None before that.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], free_dims: AbstractSet[InputDimension]) -> None:
        self._free_dims = free_dims
        self._leaves = pytree.tree_leaves((args, kwargs))
        self.refusal: FixedSizeNeededError | None = None

    def refused(self) -> AbstractContextManager[None]:
        """A context in which FixedSizeNeededError is raised for an expression that is too long."""
        return size_expressions_seen(self._see)

    def _see(self, expression: sympy.Basic, names_of: Callable[[sympy.Basic], list[str]]) -> None:
        if self.refusal is None and is_long(expression):
            dimensions = self._dimensions(expression, names_of) - self._free_dims
            if dimensions:
                self.refusal = FixedSizeNeededError(dimensions, current_user_line())
        if self.refusal is not None:
            raise self.refusal

    def _dimensions(
        self, expression: sympy.Basic, names_of: Callable[[sympy.Basic], list[str]]
    ) -> frozenset[InputDimension]:
        """The dimensions whose sizes occur in it about as often as the one that occurs most.

        torch does not say which input a size is of where inputs are nested, so that the dimension is that of all.
        """
        counts = Counter(part for part in sympy.preorder_traversal(expression) if isinstance(part, sympy.Symbol))
        most = max(counts.values(), default=0)
        names = [name for symbol, count in counts.items() if 2 * count > most for name in names_of(symbol)]
        dims = {int(match[1]) for match in map(_DIMENSION.search, names) if match}
        tensors = [(at, leaf) for at, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        return frozenset((at, dim) for at, leaf in tensors for dim in dims if dim < leaf.dim())


def is_long(expression: sympy.Basic) -> bool:
    """Whether an expression has more parts than can be handled in time."""
    waiting, count = [expression], 0
    while waiting and count <= _LONGEST:
        waiting.extend(waiting.pop().args)
        count += 1
    return bool(waiting)
