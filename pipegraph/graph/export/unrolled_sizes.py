"""Sizes of inputs that ``torch.export`` fixes and the model does not: of a loop of Python over time steps, say.

Export runs such a loop for the steps of the example, and the program is that of their number alone. The source that is
written of it may have the loop again. To know, the model is captured with another number of steps too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from pipegraph.graph.export.dynamic_shapes import BATCH
from pipegraph.graph.export.operation_record import without_memory
from pipegraph.graph.export.trace import Example
from pipegraph.graph.symbolic_size import FixedSize, InputDimension
from pipegraph.torch_private.fake_tensors import TorchDispatchMode, values_of
from pipegraph.torch_private.pytrees import pytree

# Counts may grow with the square of a size: each iteration of a loop may loop over all elements again.
_DEGREE = 2
# Beyond what models often take at once: windows and chunks of 64.
_LARGE = 67
_SMALL = (5, 4, 3, 2, 1)
# Operators that take the values of a tensor made in Python: `torch.tensor([…])`.
_CONSTANTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# Keys of the counts, in addition to operators and constants.
_RUNS, _NUMBERS = "operations", "numbers"


class UnrolledSize(NamedTuple):
    """A size of inputs that is the number of iterations of a loop, as it seems.

    Attributes:
        name: of the size.
        dimensions: the dimensions of inputs that have it.
        size: in the example.
        other_size: another one.
        lowest: the smallest one with which the model does the same.
        example: inputs of the other size.
    """

    name: str
    dimensions: frozenset[InputDimension]
    size: int
    other_size: int
    lowest: int
    example: Example


def unrolled_sizes(
    model: nn.Module,
    modes: Sequence[Mapping[nn.Module, bool]],
    example: Example,
    fixed: Mapping[InputDimension, FixedSize],
    names: Mapping[InputDimension, str],
) -> Iterator[UnrolledSize]:
    """The fixed sizes of an example with which the model does more the larger they are, as a loop does.

    Args:
        model: is left as it was.
        modes: whether each module is in training mode, for each mode in which the model differs.
        example: its inputs.
        fixed: the sizes that export fixed.
        names: of sizes, if they are not to be called by their input: ``tokens_1``.
    """
    counted = _Counts(model, modes, example)
    by_size: dict[int, list[InputDimension]] = {}
    for dimension, fixed_size in fixed.items():
        if fixed_size.size > 1:
            by_size.setdefault(fixed_size.size, []).append(dimension)
    for dimensions in by_size.values():
        alone = [_unrolled(counted, frozenset([dimension]), example, fixed, names) for dimension in dimensions]
        sizes = [size for size in alone if size is not None]
        if not sizes and len(dimensions) > 1:  # those of a text and its mask are one size
            together = _unrolled(counted, frozenset(dimensions), example, fixed, names)
            sizes = [together] if together is not None else []
        yield from sizes


def _unrolled(
    counted: _Counts,
    dimensions: frozenset[InputDimension],
    example: Example,
    fixed: Mapping[InputDimension, FixedSize],
    names: Mapping[InputDimension, str],
) -> UnrolledSize | None:
    """The size that some dimensions have; None if the model does not take others, or does no more with more."""
    first = min(dimensions)
    size = fixed[first].size
    other_size = size // 2 + 1 if size > 4 else 2 * size + 1
    counts, other_counts = counted.at(dimensions, size), counted.at(dimensions, other_size)
    if counts is None or other_counts is None or counts[_RUNS] == other_counts[_RUNS]:
        return None
    lowest = _lowest(counted, dimensions, size, other_size)
    usual = BATCH if first == (example.tensors()[0][0], 0) else fixed[first].place.replace(".shape[", "_")[:-1]
    name = names.get(first, usual)
    if lowest is None or not (name.isidentifier() and name.isascii()):
        return None
    return UnrolledSize(name, dimensions, size, other_size, lowest, _resized(example, dimensions, other_size))


Counts = Mapping[Any, int]
"""How often each operator runs, also with each constant that it is given; the sum of its whole numbers and sizes."""


class _Counts:
    """What a model runs with other inputs."""

    def __init__(self, model: nn.Module, modes: Sequence[Mapping[nn.Module, bool]], example: Example) -> None:
        self._model, self._modes, self._example = model, modes, example
        self._cache: dict[tuple[frozenset[InputDimension], int | None], Counts | None] = {}

    def at(self, dimensions: frozenset[InputDimension], size: int) -> Counts | None:
        """The counts with inputs of this size in these dimensions; None if the model refuses them."""
        leaves = pytree.tree_leaves(self._example)
        # The sizes of the example itself are the same for all dimensions.
        resized = frozenset((position, dim) for position, dim in dimensions if leaves[position].shape[dim] != size)
        key = resized, size if resized else None
        if key not in self._cache:
            self._cache[key] = self._count(_resized(self._example, resized, size))
        return self._cache[key]

    def _count(self, example: Example) -> Counts | None:
        counts: Counter[Any] = Counter()
        for number, mode in enumerate(self._modes):
            with without_memory(self._model, *example) as (args, kwargs):
                for module, training in mode.items():
                    module.training = training
                try:
                    with _OperationCount(number, counts):
                        self._model(*args, **kwargs)
                except Exception:  # whatever the model raises on sizes that it does not take
                    return None
        return counts


class _OperationCount(TorchDispatchMode):
    """Counts the operations that run, and what they are given."""

    def __init__(self, mode: int, counts: Counter[Any]) -> None:
        super().__init__()
        self._mode, self._counts = mode, counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self._counts[_RUNS] += 1
        self._counts[self._mode, func] += 1
        for leaf in _leaves((args, kwargs or {})):
            if isinstance(leaf, torch.Tensor):
                self._counts[self._mode, func, _NUMBERS] += leaf.numel()
                if func in _CONSTANTS:
                    self._counts[self._mode, func, values_of(leaf)] += 1
            elif type(leaf) is int:
                self._counts[self._mode, func, _NUMBERS] += leaf if abs(leaf) < 2**31 else 0  # slices end beyond
            else:
                self._counts[self._mode, func, repr(leaf)] += 1
        return func(*args, **(kwargs or {}))


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of arguments; written out, because a tree of them takes three times as long."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, dict):
        yield from _leaves([*value.values()])
    else:
        yield value


def _lowest(counted: _Counts, dimensions: frozenset[InputDimension], size: int, second: int) -> int | None:
    """The smallest size from which on all counts are polynomials of the size; None if they are not at the sizes of the
    captures."""
    smallest = min(size, second)
    sizes = sorted({smallest, smallest + 1, max(size, second), max(size, second) + 1, max(_LARGE, 2 * size + 1)})
    if not _is_polynomial(counted, dimensions, sizes):
        return None
    for smaller in (candidate for candidate in _SMALL if candidate < sizes[0]):
        if not _is_polynomial(counted, dimensions, [smaller, *sizes]):
            break
        sizes.insert(0, smaller)
    return sizes[0]


def _is_polynomial(counted: _Counts, dimensions: frozenset[InputDimension], sizes: Sequence[int]) -> bool:
    """Return whether all counts are polynomials of the size. The largest size takes longest, and comes last."""
    counts: list[Counts] = []
    for number, size in enumerate(sorted(sizes), 1):
        size_counts = counted.at(dimensions, size)
        if size_counts is None:
            return False
        counts.append(size_counts)
        if number > _DEGREE + 1 and not _fit(sorted(sizes)[:number], counts):
            return False
    return True


def _fit(sizes: Sequence[int], counts: Sequence[Counts]) -> bool:
    keys = {key for size_counts in counts for key in size_counts}
    return all(_fits(sizes, [size_counts.get(key, 0) for size_counts in counts]) for key in keys)


def _fits(places: Sequence[int], values: Iterable[int]) -> bool:
    """Return whether values are a polynomial of low degree of their places: its divided differences vanish."""
    differences = [Fraction(value) for value in values]
    for order in range(1, _DEGREE + 2):
        differences = [
            (next_difference - difference) / (places[at + order] - places[at])
            for at, (difference, next_difference) in enumerate(pairwise(differences))
        ]
    return not any(differences)


def _resized(example: Example, dimensions: frozenset[InputDimension], size: int) -> Example:
    """The inputs with another size in some dimensions, and no values there."""
    leaves, form = pytree.tree_flatten(example)
    for position in {position for position, _ in dimensions}:
        shape = [size if (position, dim) in dimensions else old for dim, old in enumerate(leaves[position].shape)]
        leaves[position] = leaves[position].new_zeros(shape).requires_grad_(leaves[position].requires_grad)
    resized: Example = pytree.tree_unflatten(leaves, form)
    return resized
