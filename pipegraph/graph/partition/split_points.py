"""Split points: named by the user, found in the graph, and marked on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torch import fx

from pipegraph.errors import PlanError, closest
from pipegraph.graph.captured import Captured, split_point
from pipegraph.graph.nodes import path_of
from pipegraph.graph.partition.replicated_values import parameter_free


class SplitPoint(Enum):
    """On which side of a module the graph is cut."""

    BEGINNING = "beginning"
    END = "end"


@dataclass(frozen=True)
class Point:
    """``layers.4`` starts a stage at that module; ``layers.3:end`` starts one behind it."""

    fqn: str
    side: SplitPoint = SplitPoint.BEGINNING

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a point as the command line writes it."""
        name, colon, side = text.strip().rpartition(":")
        if colon and side in ("end", "beginning"):
            return cls(name, SplitPoint(side))
        return cls(text.strip())

    def __str__(self) -> str:
        return self.fqn if self.side is SplitPoint.BEGINNING else f"{self.fqn}:end"


def locate(captured: Captured, points: Sequence[Point]) -> list[int]:
    """The position in ``captured.nodes`` at which each point starts a stage.

    Raises:
        PlanError: a point names no module that the model calls, cuts nothing, or stands twice or out of order.
    """
    starts: list[int] = []
    for point in points:
        start = _position(captured, point)
        if starts and start <= starts[-1]:
            earlier = points[len(starts) - 1]
            if point == earlier:
                problem = "was given twice."
            elif start == starts[-1]:
                problem = f"is the same cut as {earlier}."
            else:
                problem = f"lies before {earlier}: points follow the order in which the model runs."
            raise PlanError(
                f"Split point {point} {problem}\n"
                f"Try: --points {','.join(str(each) for each in _ordered(captured, points))}."
            )
        starts.append(start)
    return starts


def _position(captured: Captured, point: Point) -> int:
    inside = [index for index, node in enumerate(captured.nodes) if _runs_in(node, point.fqn)]
    if not inside:
        raise PlanError(_unknown(captured, point))
    start = inside[0] if point.side is SplitPoint.BEGINNING else inside[-1] + 1
    work = [index for index, node in enumerate(captured.nodes) if node not in parameter_free(captured)]
    if not work or start <= work[0]:
        raise PlanError(
            f"Split point {point} cuts nothing: the model's work begins there, so the first stage would be empty.\n"
            f"Try: a module that runs later, such as {_examples(captured, start)}."
        )
    if start > work[-1]:
        raise PlanError(
            f"Split point {point} cuts nothing: the model's work ends there, so the last stage would be empty.\n"
            "Try: a module that runs earlier."
        )
    return start


def _runs_in(node: fx.Node, fqn: str) -> bool:
    return any(each == fqn or each.startswith(f"{fqn}.") for _, each in path_of(node))


def _choices(captured: Captured, side: SplitPoint) -> list[str]:
    """FQNs of the modules that the model calls and on whose ``side`` a stage could begin, in order."""
    free = parameter_free(captured)
    work = next((index for index, node in enumerate(captured.nodes) if node not in free), len(captured.nodes))
    first: dict[str, int] = {}
    for index, node in enumerate(captured.nodes):
        for _, fqn in path_of(node):
            first.setdefault(fqn, index)
    return [fqn for fqn, index in first.items() if index > work or side is SplitPoint.END]


def _unknown(captured: Captured, point: Point) -> str:
    choices = _choices(captured, point.side)
    meant = closest(point.fqn, choices)
    asked = f' Did you mean "{meant}"?' if meant is not None else ""
    advice = _advice(captured, point, choices, meant)
    if point.fqn in captured.modules and point.fqn:
        return (
            f"Split point {point}: the module {point.fqn} computes nothing in forward, so there is nothing to cut at."
            f"{asked}\nTry: {advice}."
        )
    named = f"the model has no module {point.fqn}" if point.fqn else "the name of a module is missing"
    if ":" in point.fqn:
        named += ' (behind a colon stands "end" or "beginning")'
    return f"Split point {point}: {named}.{asked}\nTry: {advice}."


def _advice(captured: Captured, point: Point, choices: Sequence[str], meant: str | None) -> str:
    """The module that is meant and those beside it; else those in the part of the name that exists, or the segments."""
    parent = (meant or point.fqn).rpartition(".")[0]
    while parent and parent not in captured.modules:
        parent = parent.rpartition(".")[0]
    inside = [fqn for fqn in choices if (parent or meant) and fqn.rpartition(".")[0] == parent and fqn != meant]
    names = inside or ([] if meant else [segment.fqn for segment in captured.segments[1:]])
    listed = f"one of {', '.join(names)}" if len(names) <= 8 else f"one of {', '.join(names[:7])}, …, {names[-1]}"
    if meant is None:
        return listed
    return f"{meant}, or {listed}" if names else meant


def _examples(captured: Captured, start: int) -> str:
    later = dict.fromkeys(path_of(node)[0][1] for node in captured.nodes[start:] if path_of(node))
    here = {fqn for _, fqn in path_of(captured.nodes[start])}
    return ", ".join([fqn for fqn in later if fqn not in here][:3]) or "one of its children"


def _ordered(captured: Captured, points: Iterable[Point]) -> list[Point]:
    """The points in the order in which they cut, each cut once."""
    found: dict[int, Point] = {}
    for point in points:
        found.setdefault(_position(captured, point), point)
    return [found[start] for start in sorted(found)]


def mark(captured: Captured, points: Sequence[Point], starts: Sequence[int]) -> Captured:
    """A copy of the graph with a ``split_point`` node where each stage but the first begins."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    marked = {captured.nodes[start]: point for start, point in zip(starts, points, strict=True)}
    for node in captured.graph.nodes:
        if node in marked:
            graph.call_function(split_point, (marked[node].fqn, marked[node].side.value))
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    return replace(captured, graph=graph)
