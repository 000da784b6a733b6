"""Where to cut, as users say it: names of modules, Megatron's layouts, so many stages of equally many segments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from pipegraph.arguments import argument, require_type
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured
from pipegraph.graph.partition.split_points import Point, SplitPoint, point_before
from pipegraph.planner.layer_layout import is_layout, layout_points
from pipegraph.units import format_number_of


def parse_points(captured: Captured, points: Sequence[str | Point] | Mapping[str, Enum] | str) -> tuple[Point, ...]:
    """Return the points that are given as names, as a layout of Megatron's, or with torch's sides by name.

    Raises:
        PlanError: a string that is no layout; an unknown side.
        ArgumentError: something of another type.
    """
    if isinstance(points, Mapping):
        return tuple(replace(_without_side(fqn), side=_side(fqn, side)) for fqn, side in points.items())
    if isinstance(points, str) and is_layout(points):
        return layout_points(captured, points)
    if isinstance(points, str):
        raise PlanError(f"points is a string, not a sequence of names.\nTry: points={points.split(',')!r}.")
    require_type(points, Iterable, "points are names of modules", 'points=["layers.4"]')
    for point in points:
        require_type(point, (str, Point), "Each of points is the name of a module", 'points=["layers.4"]')
    return tuple(point if isinstance(point, Point) else Point.parse(point) for point in points)


def _without_side(fqn: str) -> Point:
    return Point(fqn) if ":" in fqn else Point.parse(fqn)


def _side(fqn: str, side: object) -> SplitPoint:
    """The side of a point by its name, because torch has an enumeration of its own with the same names."""
    name = str(getattr(side, "name", ""))
    if name not in SplitPoint.__members__:
        raise PlanError(f"points[{fqn!r}] is {side!r}.\nTry: SplitPoint.BEGINNING or SplitPoint.END.")
    return SplitPoint[name]


def equal_segments(captured: Captured, stages: int) -> tuple[tuple[Point, ...], list[int]]:
    """Return points between which there are equally many segments, and where in the graph the stages begin.

    Raises:
        PlanError: there are fewer segments than stages.
    """
    chain = captured.segments
    if stages > len(chain):
        named = _few([segment.fqn for segment in chain if segment.fqn])
        count = format_number_of("segment", len(chain))
        raise PlanError(
            f"{captured.model_name} has {count}{f' ({named})' if named else ''}, which is too few for {stages} "
            f"stages.\nTry: {argument('stages', len(chain))}, or {argument('points')} inside a segment."
        )
    firsts = [chain[round(index * len(chain) / stages)] for index in range(1, stages)]
    return tuple(point_before(captured, segment) for segment in firsts), [segment.start for segment in firsts]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, …, {names[-1]}"
