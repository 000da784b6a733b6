"""A figure that depends on sizes, as it was measured at some of them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, structs

from pipegraph.package.json_file import Entry, FieldError

Values = float | tuple["Values", ...]
"""A figure, or one for each size along the first axis."""

Sizes = Annotated[tuple[Annotated[float, Meta(gt=0, le=1e30)], ...], Meta(min_length=1)]


class SizeTable(Entry, frozen=True):
    """Positive figures over sizes such as m, n and k: ``values[i][j]`` belongs to the i-th size along the first axis.

    Between its sizes it is interpolated, logarithm over logarithm: what hardware attains follows powers of sizes, and
    they span decades. Outside of them it is constant. Without axes it is one figure.
    """

    axes: dict[str, Sizes]
    values: Any  # Values, for which msgspec has no type

    def __post_init__(self) -> None:
        for name, sizes in self.axes.items():
            if sizes[0] <= 0 or any(low >= high for low, high in itertools.pairwise(sizes)):
                raise FieldError(f"axes.{name}", f"sizes must be positive and ascend, unlike {list(sizes)[:8]}")
        axes = [(name, len(sizes)) for name, sizes in self.axes.items()]
        structs.force_setattr(self, "values", _checked(self.values, axes, "values" if axes else ""))

    def at(self, **sizes: float) -> float:
        """The figure at these sizes, one for each axis; others are ignored."""
        places = [_place(along, sizes[name]) for name, along in self.axes.items()]
        return math.exp(_interpolate(self.values, places))

    def map(self, change: Callable[[float], float]) -> SizeTable:
        """The same table of other figures."""
        return SizeTable(self.axes, _mapped(self.values, change))

    @property
    def largest(self) -> float:
        """The largest figure."""
        return max(_figures(self.values))

    @property
    def smallest(self) -> float:
        """The smallest figure."""
        return min(_figures(self.values))

    @classmethod
    def stacked(cls, axis: str, tables: Mapping[float, SizeTable]) -> SizeTable:
        """Stack tables over the same sizes along another axis, in which each has a size. One table stays as it is."""
        if len(tables) == 1:
            return next(iter(tables.values()))
        inner = next(iter(tables.values())).axes
        return cls({axis: tuple(tables), **inner}, tuple(table.values for table in tables.values()))


def _place(along: Sequence[float], size: float) -> tuple[int, float]:
    """(index, how far from there to the next one, 0 to 1)."""
    if size <= along[0]:
        return 0, 0.0
    if size >= along[-1]:
        return len(along) - 1, 0.0
    index = bisect.bisect_right(along, size) - 1
    return index, math.log(size / along[index]) / math.log(along[index + 1] / along[index])


def _interpolate(values: Values, places: Sequence[tuple[int, float]]) -> float:
    """The logarithm of the figure."""
    if not isinstance(values, tuple):
        return math.log(values)
    (index, part), *inner_places = places
    low = _interpolate(values[index], inner_places)
    return low + part * (_interpolate(values[index + 1], inner_places) - low) if part else low


def _checked(values: Any, axes: Sequence[tuple[str, int]], place: str) -> Values:
    """The figures as nested tuples, if they are as many as the sizes. Raises FieldError."""
    if not axes:
        if isinstance(values, bool) or not isinstance(values, (int, float)) or not 0 < values <= 1e30:
            description = values if isinstance(values, (int, float, str)) else f"a {type(values).__name__}"
            raise FieldError(place, f"{str(description)[:40]!r} must be one positive number")
        return float(values)
    (name, length), *inner_axes = axes
    count = len(values) if isinstance(values, (list, tuple)) else 0
    if count != length:
        raise FieldError(place, f"it has {count} entries, and there are {length} sizes along {name}")
    return tuple(_checked(value, inner_axes, f"{place}[{index}]") for index, value in enumerate(values))


def _mapped(values: Values, change: Callable[[float], float]) -> Values:
    return tuple(_mapped(value, change) for value in values) if isinstance(values, tuple) else change(values)


def _figures(values: Values) -> Iterator[float]:
    if not isinstance(values, tuple):
        yield values
        return
    for value in values:
        yield from _figures(value)
