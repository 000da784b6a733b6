"""A figure that depends on sizes, as it was measured at some of them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipegraph.errors import PipegraphError

Values = float | tuple["Values", ...]
"""A figure, or one for each size along the first axis."""


@dataclass(frozen=True)
class SizeTable:
    """Positive figures over sizes such as m, n and k: ``values[i][j]`` belongs to the i-th size along the first axis.

    Between its sizes it is interpolated, logarithm over logarithm: what hardware attains follows powers of sizes, and
    they span decades. Outside of them it is constant. Without axes it is one figure.
    """

    axes: Mapping[str, tuple[float, ...]]
    values: Values

    def __post_init__(self) -> None:
        for name, sizes in self.axes.items():
            if not sizes or sizes[0] <= 0 or any(low >= high for low, high in itertools.pairwise(sizes)):
                raise PipegraphError(f"the sizes along {name} have to be positive and ascend, unlike {list(sizes)}")
        _check(self.values, [(name, len(sizes)) for name, sizes in self.axes.items()])

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
        """Tables over the same sizes, one for each size along another axis; one table by itself stays as it is."""
        if len(tables) == 1:
            return next(iter(tables.values()))
        inner = next(iter(tables.values())).axes
        return cls({axis: tuple(tables), **inner}, tuple(table.values for table in tables.values()))

    @classmethod
    def from_json(cls, found: Any) -> SizeTable:
        """Read a number, or ``{"axes": {"m": [16, 64], …}, "values": [[…], …]}``."""
        if not isinstance(found, dict):
            return cls({}, float(found))
        return cls({name: tuple(sizes) for name, sizes in found["axes"].items()}, _tuples(found["values"]))

    def to_json(self) -> Any:
        """What `from_json` reads."""
        if not self.axes:
            return self.values
        return {"axes": {name: list(sizes) for name, sizes in self.axes.items()}, "values": _lists(self.values)}


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
    (index, part), *rest = places
    low = _interpolate(values[index], rest)
    return low + part * (_interpolate(values[index + 1], rest) - low) if part else low


def _check(values: Values, axes: Sequence[tuple[str, int]]) -> None:
    if not axes:
        if isinstance(values, tuple) or not 0 < values < math.inf:
            raise PipegraphError(f"{values} stands where one positive figure has to")
        return
    (name, length), *rest = axes
    if not isinstance(values, tuple) or len(values) != length:
        count = len(values) if isinstance(values, tuple) else 1
        raise PipegraphError(f"sizes and values along {name} differ in number: {length} and {count}")
    for each in values:
        _check(each, rest)


def _mapped(values: Values, change: Callable[[float], float]) -> Values:
    return tuple(_mapped(each, change) for each in values) if isinstance(values, tuple) else change(values)


def _figures(values: Values) -> Iterator[float]:
    if not isinstance(values, tuple):
        yield values
        return
    for each in values:
        yield from _figures(each)


def _tuples(values: Any) -> Values:
    return tuple(map(_tuples, values)) if isinstance(values, list) else float(values)


def _lists(values: Values) -> Any:
    return list(map(_lists, values)) if isinstance(values, tuple) else values
