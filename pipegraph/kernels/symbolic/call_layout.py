"""Which dimensions of a call's tensors are sizes, and which tensors have one size in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from pipegraph.kernels.symbolic.symbolic_sizes import Numbers, contiguous_strides

Shapes = tuple[tuple[int, ...], ...]

Dimension = int | str | None
"""A number that never changes, the name of a size, or None if nothing is known."""


class Size(NamedTuple):
    """A dimension that is a size of the calls, by its position among them."""

    number: int


@dataclass(frozen=True)
class CallLayout:
    """The shapes of a call's tensors, for all sizes.

    Attributes:
        shapes: of each tensor, its dimensions: numbers and sizes.
        orders: of each tensor, its dimensions from the outermost to the innermost in memory.
        numbers: the sizes of the call that this was made for.
        names: what the sizes are called.
    """

    shapes: tuple[tuple[int | Size, ...], ...]
    orders: tuple[tuple[int, ...], ...]
    numbers: Numbers
    names: tuple[str, ...]

    def match(self, tensors: Sequence[Tensor]) -> Numbers | None:
        """Return the sizes of these tensors, or None if they have other fixed dimensions, or two numbers for a size."""
        numbers = list(self.numbers)
        seen = [False] * len(numbers)
        for shape, tensor in zip(self.shapes, tensors, strict=True):
            for dimension, number in zip(shape, tensor.shape, strict=True):
                if not isinstance(dimension, Size):
                    if dimension != number:
                        return None
                elif not seen[dimension.number]:
                    seen[dimension.number], numbers[dimension.number] = True, number
                elif numbers[dimension.number] != number:
                    return None
        return tuple(numbers)

    def shapes_at(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the shapes for sizes: numbers or symbols."""
        return [
            tuple(values[each.number] if isinstance(each, Size) else each for each in shape) for shape in self.shapes
        ]

    def strides_at(self, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the strides for sizes. A tensor with gaps in memory, or with overlaps, is one without them here."""
        return [
            tuple(
                stride for _, stride in sorted(zip(order, contiguous_strides([shape[i] for i in order]), strict=True))
            )
            for shape, order in zip(self.shapes_at(values), self.orders, strict=True)
        ]


def call_layout(
    tensors: Sequence[Tensor], seen: Sequence[Shapes], names: Sequence[Sequence[Dimension]], ones: bool = True
) -> CallLayout:
    """Return the layout of a call, and of all calls that differ in sizes alone.

    A dimension is a size if it has a name, or was another number in an earlier call. Dimensions with one name are one
    size, and so are those without a name that were equal in all calls. A dimension of unknown meaning that always had
    the number of a named size is that size: a target has the batch's rows, and a row's tokens. What was never more than
    1 is no size: it may be a dimension that broadcasts.

    Args:
        tensors: of this call.
        seen: the shapes of the calls until now, this one included.
        names: of each tensor, what is known of its dimensions.
        ones: whether what is 1 now, and was more, is a size. It is then traced as the number that it was.
    """
    sizes: dict[Any, Size] = {}
    by_history: dict[tuple[int, ...], Size] = {}
    found: dict[tuple[int, int], int | Size] = {}
    numbers: dict[Size, tuple[int, str]] = {}
    places = [
        (position, dim, tuple(shapes[position][dim] for shapes in seen), names[position][dim])
        for position, tensor in enumerate(tensors)
        for dim in range(tensor.dim())
    ]
    places.sort(key=lambda place: not isinstance(place[-1], str))  # those with a name first
    for position, dim, history, name in places:
        is_named, varies = isinstance(name, str), len(set(history)) > 1
        number = history[-1] if history[-1] > 1 or not ones else max(history)
        if number > 1 and (is_named or varies or (name is None and history in by_history)):
            new = Size(len(numbers))
            size = sizes.setdefault((name, history), new) if is_named else by_history.get(history, new)
            by_history.setdefault(history, size)
            numbers.setdefault(size, (number, name if isinstance(name, str) else f"size_{size.number}"))
            found[position, dim] = size
        else:
            found[position, dim] = history[-1]
    return CallLayout(
        shapes=tuple(tuple(found[index, dim] for dim in range(tensor.dim())) for index, tensor in enumerate(tensors)),
        orders=tuple(map(_order, tensors)),
        numbers=tuple(number for number, _ in numbers.values()),
        names=tuple(name for _, name in numbers.values()),
    )


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions of a dense tensor from the outermost to the innermost; of another one, as they stand."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], dim))
    dense = zip(order, contiguous_strides([tensor.shape[dim] for dim in order]), strict=True)
    is_dense = all(strides[dim] == stride or tensor.shape[dim] == 1 for dim, stride in dense)
    return tuple(order if is_dense else range(tensor.dim()))
