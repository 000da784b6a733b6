"""The chain of fine segments: every place where a model may usefully be cut, and what would cross there.

Candidate cuts are the beginnings and ends of module calls at every depth. Of those, a cut is kept where

- each side has work, every value that crosses is a tensor, and no write in place is parted from its tensor;
- it is the lightest between two heavy operations: a norm, an activation or an addition is not worth a separate cut;
- it is not much heavier than lighter ones close by: within a layer, q, k and v are not parted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, pairwise

import torch
from torch import fx

from pipegraph.arguments import argument
from pipegraph.cost.stage_cost import count_flops
from pipegraph.errors import PlanError
from pipegraph.graph.captured import BRANCH, Captured
from pipegraph.graph.nodes import path_of, value_bytes
from pipegraph.graph.partition.split_points import Point, SplitPoint
from pipegraph.graph.partition.stages import parameter_free, replication_of
from pipegraph.units import format_number_of

# A cut inside a layer is left out if it carries more than this many times the bytes of lighter cuts around it.
_HEAVIER = 2


@dataclass(frozen=True)
class FineSegment:
    """Operations ``start`` … ``stop`` − 1 of ``Captured.nodes``.

    Attributes:
        point: the split point that would start a stage here; None for the first segment.
        begins_layer: whether one of ``Captured.segments`` begins here, light operations aside.
        boundary_bytes: bytes that cross a cut right after the segment, for one microbatch: of each value that any
            later segment reads and does not compute again. 0 for the last segment.
        gradient_bytes: bytes that come back over that cut: of those values that a gradient flows through.
    """

    start: int
    stop: int
    point: Point | None
    begins_layer: bool
    boundary_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, eq=False)
class Chain:
    """The segments of a model, in order and without a gap."""

    captured: Captured = field(repr=False)
    segments: tuple[FineSegment, ...]

    def check_stages(self, stages: int) -> None:
        """Raise PlanError if there are fewer segments than ``stages``."""
        if stages > len(self.segments):
            segments = format_number_of("segment", len(self.segments))
            raise PlanError(
                f"{self.captured.model_name} can be cut into {segments}, which is too few for {stages} stages.",
                f"{argument('stages', len(self.segments))} or fewer.",
            )

    def nodes(self, start: int, stop: int) -> tuple[fx.Node, ...]:
        """The operations of the segments ``start`` … ``stop`` − 1."""
        return self.captured.nodes[self.segments[start].start : self.segments[stop - 1].stop]

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(producer, consumer) pairs of segments between which a value passes, ascending.

        Values that each stage makes for itself, such as positions, are left out.
        """
        return self._edges(lambda value: not replication_of(self.captured, value))

    @cached_property
    def gradient_edges(self) -> tuple[tuple[int, int], ...]:
        """Those of `edges` over which a gradient returns."""
        return self._edges(lambda value: bool(value.meta["requires_grad"]))

    def _edges(self, passes: Callable[[fx.Node], bool]) -> tuple[tuple[int, int], ...]:
        segment_of = {node: index for index in range(len(self.segments)) for node in self.nodes(index, index + 1)}
        crossing = (
            (value, segment_of[value], index)
            for node, index in segment_of.items()
            for value in node.all_input_nodes
            if segment_of.get(value, index) != index
        )
        return tuple(sorted({(producer, consumer) for value, producer, consumer in crossing if passes(value)}))

    @cached_property
    def branch_starts(self) -> tuple[int, ...]:
        """The segments that take nothing from the segment before: a branch begins with each, or two join."""
        following = {consumer for producer, consumer in self.edges if producer + 1 == consumer}
        return tuple(index for index in range(1, len(self.segments)) if index not in following)

    @property
    def layers(self) -> tuple[range, ...]:
        """The segments of each layer."""
        begins = [index for index, segment in enumerate(self.segments) if segment.begins_layer]
        return tuple(range(start, stop) for start, stop in pairwise([*begins, len(self.segments)]))

    def points(self, cuts: Iterable[int]) -> tuple[Point, ...]:
        """The split points of the segments that start a stage."""
        chosen = [self.segments[cut].point for cut in cuts]
        return tuple(point for point in chosen if point is not None)


@dataclass(frozen=True)
class _Cut:
    """A candidate: ``position`` in ``Captured.nodes``, and what crosses there.

    ``rank``: the least is the best of its neighbours; the lightest, then where a layer begins, then at the outermost
    module that holds parameters, then the last.
    """

    position: int
    point: Point
    bytes: int
    gradient_bytes: int
    rank: tuple[object, ...]


def find_chain(captured: Captured, inside_layers: bool = True, cut_positions: Collection[int] = ()) -> Chain:
    """Return the chain of a model, cut inside its layers too, or only at the segments of ``Captured.segments``.

    It is always cut at the positions ``cut_positions`` in ``Captured.nodes``, if a module begins or ends there.
    """
    heavy = _heavy(captured)
    starts = {segment.start for segment in captured.segments}
    begins = {bisect_left(heavy, start) for start in starts}
    every = cuts = _candidates(captured)
    if inside_layers:
        cuts = _without_heavier(captured, _lightest(cuts, heavy))
    else:
        cuts = [cut for cut in cuts if cut.position in starts]
    chosen = {cut.position for cut in cuts}.union(cut_positions)
    cuts = [cut for cut in every if cut.position in chosen]
    bounds = [0, *(cut.position for cut in cuts), len(captured.nodes)]
    segments = [
        FineSegment(
            start=start,
            stop=stop,
            point=None if start_cut is None else start_cut.point,
            begins_layer=start_cut is None or bisect_left(heavy, start) in begins,
            boundary_bytes=0 if end_cut is None else end_cut.bytes,
            gradient_bytes=0 if end_cut is None else end_cut.gradient_bytes,
        )
        for (start, stop), start_cut, end_cut in zip(pairwise(bounds), [None, *cuts], [*cuts, None], strict=True)
    ]
    return Chain(captured, tuple(segments))


def _candidates(captured: Captured) -> list[_Cut]:
    """Every legal cut at a module's boundary, in order, under its simplest name."""
    crossing = _Crossing(captured)
    work = [index for index, node in enumerate(captured.nodes) if node not in parameter_free(captured)]
    parameters = (fqn for fqn, entry in captured.state.items() if entry.kind == "parameter")
    holders = {name for fqn in parameters for name in _around(fqn)}
    layers = {segment.start for segment in captured.segments}

    def plainness(point: Point) -> tuple[bool, bool, bool, int]:
        return point.fqn not in holders, point.call is not None, point.side is SplitPoint.END, point.fqn.count(".")

    names: dict[int, Point] = {}
    for point, position in (*_points(captured), *_points_of_calls(captured, holders)):
        names[position] = min(names.get(position, point), point, key=plainness)
    cuts = []
    for position, point in sorted(names.items(), key=lambda item: item[0]):
        if work and work[0] < position <= work[-1] and not crossing.illegal[position]:
            weight = crossing.bytes[position]
            empty, _, ends, depth = plainness(point)
            rank = (weight, position not in layers, empty, depth, ends, -position)
            cuts.append(_Cut(position, point, weight, crossing.gradient_bytes[position], rank))
    return cuts


def _points(captured: Captured) -> Iterator[tuple[Point, int]]:
    """The beginning and end of every module that is called, as ``split_points.locate`` finds them."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    around: dict[str, tuple[str, ...]] = {}
    called: dict[str, None] = {}
    for position, node in enumerate(captured.nodes):
        for _, fqn in path_of(node):
            called[fqn] = None
            if fqn not in around:
                around[fqn] = _around(fqn)
            for name in around[fqn]:
                first.setdefault(name, position)
                last[name] = position
    for fqn in called:
        yield Point(fqn), first[fqn]
        yield Point(fqn, SplitPoint.END), last[fqn] + 1


def _points_of_calls(captured: Captured, holders: Container[str]) -> Iterator[tuple[Point, int]]:
    """The beginning and end of every call of a module that holds parameters and is called more than once."""
    spans: dict[str, dict[str, tuple[int, int]]] = {}
    for position, node in enumerate(captured.nodes):
        for call, fqn in path_of(node):
            if fqn in holders:
                calls = spans.setdefault(fqn, {})
                calls[call] = (calls.get(call, (position,))[0], position + 1)
    for fqn, calls in spans.items():
        if len(calls) > 1:
            for number, (start, stop) in enumerate(calls.values(), 1):
                yield Point(fqn, call=number), start
                yield Point(fqn, SplitPoint.END, number), stop


def _around(fqn: str) -> tuple[str, ...]:
    """``a.b.c`` → ``a``, ``a.b``, ``a.b.c``."""
    return tuple(accumulate(fqn.split("."), "{}.{}".format))


class _Crossing:
    """The values that cross a cut at each position, found in one pass: a value crosses from its maker to its last
    reader.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._end = len(captured.nodes)
        self._position = {node: index for index, node in enumerate(captured.nodes)}
        bytes_, gradients, illegal = ([0] * (self._end + 2) for _ in range(3))
        for start, node in enumerate(captured.nodes):
            stop = self._last(node.users, start)
            if stop > start and not replication_of(captured, node):
                if isinstance(node.meta["val"], torch.Tensor):
                    _span(bytes_, start, stop, value_bytes(node))
                    _span(gradients, start, stop, value_bytes(node) if node.meta["requires_grad"] else 0)
                else:
                    _span(illegal, start, stop, 1)
        for start, stop in (*self._writes(), *self._branches(), *self._hooked()):
            _span(illegal, start, stop, 1)
        self.bytes = list(accumulate(bytes_))
        self.gradient_bytes = list(accumulate(gradients))
        self.illegal = list(accumulate(illegal))

    def _last(self, readers: Iterable[fx.Node], default: int) -> int:
        """The position of the last reader; the end for a value that the model returns."""
        places = (self._end if node.op == "output" else self._position.get(node, default) for node in readers)
        return max(places, default=default)

    def _writes(self) -> Iterator[tuple[int, int]]:
        """Yield the range from a tensor to the last write into it; of a buffer, from its first to its last reader."""
        by_name = {node.name: node for node in self._captured.graph.nodes}
        for node, position in self._position.items():
            if "writes" in node.meta:
                root = by_name[node.meta["writes"]]
                readers = [self._position[user] for user in root.users if user in self._position]
                if root.op == "get_attr":
                    yield min([position, *readers]), max([position, *readers])
                else:
                    yield self._position.get(root, position), position

    def _branches(self) -> Iterator[tuple[int, int]]:
        """Yield the range of what one mode runs and the other does not."""
        places: dict[int, list[int]] = {}
        for node, position in self._position.items():
            if BRANCH in node.meta:
                places.setdefault(node.meta[BRANCH].number, []).append(position)
        yield from ((min(positions), max(positions)) for positions in places.values())

    def _hooked(self) -> Iterator[tuple[int, int]]:
        """Yield the range of each call of a module with a hook for its backward."""
        owners = {hook.owner for hook in self._captured.hooks if hook.is_of_module}
        places: dict[str, list[int]] = {}
        for node, position in self._position.items():
            for call, fqn in path_of(node) if owners else ():
                if fqn in owners:
                    places.setdefault(call, []).append(position)
        yield from ((min(positions), max(positions)) for positions in places.values())


def _span(counts: list[int], start: int, stop: int, amount: int) -> None:
    """Add to the cuts after the operation ``start`` and before the operation ``stop``, as differences."""
    counts[start + 1] += amount
    counts[stop + 1] -= amount


def _lightest(cuts: Sequence[_Cut], heavy: Sequence[int]) -> list[_Cut]:
    """Return the best of the cuts between two heavy operations; none if one side has no heavy operation."""
    groups = groupby(cuts, key=lambda cut: bisect_left(heavy, cut.position))
    return [min(group, key=lambda cut: cut.rank) for heavy_count, group in groups if 0 < heavy_count < len(heavy)]


def _heavy(captured: Captured) -> list[int]:
    """Positions of the operations that are work of their own: those that torch counts as floating-point operations,
    and those that read a matrix of parameters, which counts in memory. Without any: those that read a parameter."""
    weights = [_weight_dimensions(captured, node) for node in captured.nodes]
    counted = count_flops(captured.nodes)
    positions = [index for index in range(len(counted)) if weights[index] > 1 or counted[index]]
    return positions or [index for index, dimensions in enumerate(weights) if dimensions >= 0]


def _weight_dimensions(captured: Captured, node: fx.Node) -> int:
    """The number of dimensions larger than one of the parameters that an operation reads; −1 if it reads none."""
    read = [captured.state[str(source.target)] for source in node.all_input_nodes if source.op == "get_attr"]
    return max((sum(size > 1 for size in entry.shape) for entry in read if entry.kind == "parameter"), default=-1)


def _without_heavier(captured: Captured, cuts: Sequence[_Cut]) -> list[_Cut]:
    """Leave out each cut inside a segment of ``Captured.segments`` that carries much more than a cut before it and a
    cut after it, in the segment or at its ends."""
    positions = [cut.position for cut in cuts]
    dropped: set[int] = set()
    for segment in captured.segments:
        first = max(0, bisect_right(positions, segment.start) - 1)
        window = cuts[first : bisect_left(positions, segment.stop) + 1]
        lightest_before = list(accumulate((cut.bytes for cut in window), min))
        lightest_behind = list(accumulate((cut.bytes for cut in reversed(window)), min))[::-1]
        for cut, *least in zip(window, lightest_before, lightest_behind, strict=True):
            if segment.start < cut.position < segment.stop and cut.bytes > _HEAVIER * max(least):
                dropped.add(cut.position)
    return [cut for cut in cuts if cut.position not in dropped]
