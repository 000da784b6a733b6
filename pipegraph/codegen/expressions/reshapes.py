"""Reshapes as the method that names the fewest sizes: ``x.unflatten(-1, (-1, 64))``, ``x.flatten(2)``.

The shapes before and after decide which methods fit. A reshape keeps the order of the elements. Therefore all methods
that give the shape give the same tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

Sizes = tuple[int, ...]
MethodCall = tuple[str, list[Any]]


def shortest_reshape(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> MethodCall | None:
    """A method and its arguments that bring a tensor from one shape to another; None if only ``reshape`` does.

    Args:
        shape, target: the shapes.
        sizes: ``target`` as the model's source has it, with −1 for the size that it leaves open. That dimension has a
            meaning even if its size is 1.
    """
    left_open = list(sizes).index(-1) if -1 in sizes else None
    methods = (_unsqueezed, _squeezed, _flattened, _unflattened)
    return next((call for method in methods for call in method(shape, target, left_open)), None)


# Each of these yields the calls of one method that fit. Later dimensions are tried first, because the first dimension
# is the batch, even if its size is 1, and should stay as it is.


def _unsqueezed(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    for dim in reversed(range(len(target))):
        is_batch = dim == 0 and left_open is None and len(target) > 2
        if target[dim] == 1 and dim != left_open and not is_batch and shape == target[:dim] + target[dim + 1 :]:
            yield "unsqueeze", [_from_end(dim, target)]


def _squeezed(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    for dim in reversed(range(1, len(shape))):
        if shape[dim] == 1 and left_open not in (dim - 1, dim) and target == shape[:dim] + shape[dim + 1 :]:
            yield "squeeze", [_from_end(dim, shape)]


def _flattened(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    count = len(shape) - len(target) + 1
    for dim in sorted(range(len(target) * (count > 1)), key=lambda dim: (dim != left_open, -dim)):
        if target == (*shape[:dim], prod(shape[dim : dim + count]), *shape[dim + count :]):
            yield "flatten", _range(dim, dim + count, shape)


def _unflattened(shape: Sizes, target: Sizes, left_open: int | None) -> Iterator[MethodCall]:
    count = len(target) - len(shape) + 1
    counted_dim = left_open if left_open is not None else 0 if len(shape) > 1 else None
    for dim in reversed(range(len(shape) * (count > 1))):
        sizes = target[dim : dim + count]
        is_split = sum(size != 1 or dim + place == counted_dim for place, size in enumerate(sizes)) > 1
        if is_split and prod(sizes) == shape[dim] and target == shape[:dim] + sizes + shape[dim + 1 :]:
            position = left_open - dim if left_open is not None and dim <= left_open < dim + count else 0
            yield "unflatten", [_from_end(dim, shape), _with_one_open(sizes, position)]


def squeezed_first(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> tuple[list[int], MethodCall] | None:
    """The arguments of a ``squeeze`` and the method that follows it: ``x.squeeze(1).unflatten(-1, (-1, 64))``.

    None if no dimension of size 1 is in the way of a method that names fewer sizes than ``reshape``.
    """
    for dim in range(1, len(shape) - 1):
        if shape[dim] == 1 and dim < len(sizes) and sizes[dim] != 1:
            squeezed_shape = (*shape[:dim], *shape[dim + 1 :])
            following = shortest_reshape(squeezed_shape, target, sizes)
            if following is not None and following[0] == "unflatten":
                return [dim], following
    return None


def reshape_sizes(shape: Sizes, target: Sizes, sizes: Sequence[int]) -> list[int]:
    """The arguments of ``reshape``: −1 for the batch, unless the source leaves another size open."""
    is_batch = shape[:1] == target[:1] and target[:1] != (1,) if -1 in sizes else len(shape) > 1
    return list(_with_one_open(target, 0)) if is_batch and target else list(sizes)


def expand_sizes(shape: Sizes, target: Sizes) -> list[int]:
    """The arguments of ``expand``: −1 for each size that stays."""
    new = len(target) - len(shape)
    return [size if dim < new or size != shape[dim - new] else -1 for dim, size in enumerate(target)]


def flatten_dims(start: int, end: int, shape: Sizes) -> list[int]:
    """The arguments of ``flatten`` for dimensions ``start`` … ``end``."""
    size = max(len(shape), 1)
    return _range(start % size, end % size + 1, shape)


def _from_end(dim: int, sizes: Sizes) -> int:
    """The number of a dimension; −1 for the last."""
    return -1 if dim == len(sizes) - 1 else dim


def _range(start: int, stop: int, sizes: Sizes) -> list[int]:
    if stop < len(sizes):
        return [start, stop - 1]
    return [start] if start else []


def _with_one_open(sizes: Sizes, position: int) -> Sizes:
    """The sizes with −1 for one of them, if the others determine it (none of them is 0)."""
    product = prod(sizes[:position] + sizes[position + 1 :])
    return (*sizes[:position], -1, *sizes[position + 1 :]) if product else sizes
