"""Split points: named by the user, found in the graph, and marked on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise

from torch import fx, nn

from pipegraph.arguments import argument
from pipegraph.errors import PlanError, closest
from pipegraph.graph.calls import CallTree, call_tree
from pipegraph.graph.captured import Captured, Segment, split_point
from pipegraph.graph.nodes import path_of
from pipegraph.graph.partition.stages import parameter_free

# ---- segments --------------------------------------------------------------------------------------------------------
# The chain of segments: the repeated layers of a model and the glue between them.


def find_segments(captured: Captured) -> tuple[Segment, ...]:
    """Cut the model at its repeated layers and their neighbours: ``embed``, ``layers.0`` … ``norm``, ``head``.

    A module that holds repeated layers is opened (``model``, ``encoder``); everything else stays whole. What holds no
    parameter (a dropout, a mask, operations between two calls) belongs to the segment before.
    """
    position = {node: index for index, node in enumerate(captured.nodes)}
    calls = whole_calls(captured, call_tree(captured.nodes))
    led = [(call.fqn, position[next(call.nodes())]) for call in calls if holds_parameter(captured, call)]
    if not led:
        return (Segment("", 0, len(position)),)
    starts = [0, *(start for _, start in led[1:]), len(position)]
    return tuple(Segment(fqn, start, stop) for (fqn, _), start, stop in zip(led, starts[:-1], starts[1:], strict=True))


def holds_parameter(captured: Captured, call: CallTree) -> bool:
    """Return whether an operation of the call reads a parameter."""
    return any(
        parent.op == "get_attr" and captured.state[str(parent.target)].kind == "parameter"
        for node in call.nodes()
        for parent in node.all_input_nodes
    )


def whole_calls(captured: Captured, root: CallTree) -> Iterator[CallTree]:
    """The calls in ``root`` that are not opened, in order."""
    opened = opened_calls(captured)
    for call in root.calls():
        if call.call in opened:
            yield from whole_calls(captured, call)
        else:
            yield call


@lru_cache(maxsize=4)  # asked for by every stage
def opened_calls(captured: Captured) -> frozenset[str]:
    """The calls on the way to repeated layers, the model itself included; without layers, to the parts of sequences."""

    def visit(call: CallTree, inside_layer: bool) -> bool:
        layers = _layers(captured, call)
        children = [visit(child, inside_layer or child.fqn in layers) for child in call.calls()]
        # A layer is opened only if it holds layers itself, not if a part of it does.
        is_opened = bool(layers) or (any(children) and not inside_layer)
        if is_opened:
            opened.add(call.call)
        return is_opened

    root = call_tree(captured.nodes)
    opened: set[str] = {root.call}
    if not visit(root, inside_layer=False):
        opened |= _sequences(captured, root)
    return frozenset(opened)


def _sequences(captured: Captured, within: CallTree) -> set[str]:
    """The calls of each ``nn.Sequential`` that is in no other kind of module, as in VGG, which repeats no module."""
    sequences: set[str] = set()
    for call in within.calls():
        if type(captured.modules[call.fqn].module).forward is nn.Sequential.forward:
            sequences |= {call.call} | _sequences(captured, call)
    return sequences


def _layers(captured: Captured, call: CallTree) -> set[str]:
    """FQNs of two or more calls of one class in a list, dict or Sequential of ``call``, each of which reads what the
    one before made. Experts, which all read the same value, are no layers."""
    groups: dict[tuple[str, str], list[CallTree]] = {}
    for child in call.calls():
        container, _, name = child.fqn.rpartition(".")
        listed = container != call.fqn or name.isdigit()
        if listed and any(True for _ in child.calls()):
            groups.setdefault((container, captured.modules[child.fqn].class_name), []).append(child)
    chains = [group for group in groups.values() if len(group) > 1 and _depends(group[1], group[0], call)]
    return {child.fqn for chain in chains for child in chain}


def _depends(consumer: CallTree, producer: CallTree, within: CallTree) -> bool:
    """Return whether a value of ``producer`` flows into ``consumer``, through operations of ``within``."""
    inside, source = set(within.nodes()), set(producer.nodes())
    waiting = list(consumer.nodes())
    visited = set(waiting)
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent in source:
                return True
            if parent in inside and parent not in visited:
                visited.add(parent)
                waiting.append(parent)
    return False


# ---- split points ----------------------------------------------------------------------------------------------------


class SplitPoint(Enum):
    """On which side of a module the graph is cut."""

    BEGINNING = "beginning"
    END = "end"


@dataclass(frozen=True)
class Point:
    """``layers.4`` starts a stage at that module; ``layers.3:end`` starts one after it.

    Attributes:
        fqn: the name of the module.
        side: of the module.
        call: which of its calls, from 1, if the model calls it more than once: ``layer@2`` is the second. None is the
            beginning of the first call, and the end of the last.
    """

    fqn: str
    side: SplitPoint = SplitPoint.BEGINNING
    call: int | None = None

    @classmethod
    def parse(cls, text: str) -> Point:
        """Read a point as the command line writes it."""
        name, colon, written = text.strip().rpartition(":")
        side = SplitPoint(written) if colon and written in ("end", "beginning") else None
        name = text.strip() if side is None else name
        fqn, at, number = name.rpartition("@")
        is_call = bool(at) and number.isdecimal() and number.isascii() and len(number) < 10
        return cls(fqn if is_call else name, side or SplitPoint.BEGINNING, int(number) if is_call else None)

    def __str__(self) -> str:
        return self.module if self.side is SplitPoint.BEGINNING else f"{self.module}:end"

    @property
    def module(self) -> str:
        """The module and its call, without the side."""
        return self.fqn if self.call is None else f"{self.fqn}@{self.call}"


def locate(captured: Captured, points: Sequence[Point]) -> list[int]:
    """The position in ``captured.nodes`` at which each point starts a stage.

    Raises:
        PlanError: a point names no module that the model calls, cuts nothing, comes twice or is out of order.
    """
    starts = [_position(captured, point) for point in points]
    for (previous_point, previous_start), (point, start) in pairwise(zip(points, starts, strict=True)):
        if start > previous_start:
            continue
        if point == previous_point:
            problem = "was given twice."
        elif start == previous_start:
            problem = f"is the same cut as {previous_point}."
        else:
            problem = f"lies before {previous_point}: points follow the order in which the model runs."
        first_of = dict(reversed(list(zip(starts, points, strict=True))))
        ordered = [str(first_of[position]) for position in sorted(first_of)]
        raise PlanError(f"Split point {point} {problem}", f"{argument('points', ordered)}.")
    return starts


def points_of_pipe_splits(captured: Captured) -> tuple[Point, ...]:
    """The model's own calls of ``torch.distributed.pipelining.pipe_split()``, as points.

    Raises:
        PlanError: one is inside a module, or cuts nothing.
    """
    points: list[Point] = []
    for position, line in captured.pipe_splits:
        previous_fqns = [fqn for _, fqn in path_of(captured.nodes[position - 1])] if position else []
        next_fqns = [fqn for _, fqn in path_of(captured.nodes[position])]
        candidates = [
            *(Point(fqn) for fqn in next_fqns if fqn not in previous_fqns),
            *(Point(fqn, SplitPoint.END) for fqn in previous_fqns if fqn not in next_fqns),
        ]
        matching_point = next((point for point in candidates if _position(captured, point) == position), None)
        if matching_point is None:
            raise PlanError(
                f"pipe_split() neither stands before a module that is called there for the first time nor after one.\n"
                f"  at {line}",
                f"move it between two modules, or give {argument('points')}.",
            )
        points.append(matching_point)
    return tuple(points)


def point_before(captured: Captured, segment: Segment) -> Point:
    """The point that starts a stage with a segment."""
    call = next((call for call, fqn in path_of(captured.nodes[segment.start]) if fqn == segment.fqn), None)
    calls = _calls(captured, segment.fqn)
    return Point(segment.fqn, call=calls.index(call) + 1 if call in calls[1:] else None)


def _position(captured: Captured, point: Point) -> int:
    if point.module in captured.modules:  # the name of a module may end as a call does
        point = Point(point.module, point.side)
    inside = [index for index, node in enumerate(captured.nodes) if _runs_in(node, point.fqn)]
    if not inside:
        raise PlanError(_unknown(captured, point))
    if point.call is not None:
        calls = _calls(captured, point.fqn)
        if not 0 < point.call <= len(calls):
            raise PlanError(_no_such_call(point, len(calls)))
        call = calls[point.call - 1]
        inside = [index for index, node in enumerate(captured.nodes) if (call, point.fqn) in path_of(node)]
    start = inside[0] if point.side is SplitPoint.BEGINNING else inside[-1] + 1
    work = _work(captured)
    if not work or start <= work[0]:
        raise PlanError(
            f"Split point {point} cuts nothing: the model's work begins there, so the first stage would be empty.",
            f"a module that runs later, such as {_examples(captured, start)}.",
        )
    if start > work[-1]:
        raise PlanError(
            f"Split point {point} cuts nothing: the model's work ends there, so the last stage would be empty.",
            "a module that runs earlier.",
        )
    return start


def _runs_in(node: fx.Node, fqn: str) -> bool:
    return any(path_fqn == fqn or path_fqn.startswith(f"{fqn}.") for _, path_fqn in path_of(node))


def _calls(captured: Captured, fqn: str) -> list[str]:
    """The calls of a module, in order."""
    return list(dict.fromkeys(call for node in captured.nodes for call, path_fqn in path_of(node) if path_fqn == fqn))


def _no_such_call(point: Point, count: int) -> str:
    """The message for a call of a module that the model does not make."""
    if not count:
        return f"Split point {point}: {point.fqn} is never called itself.\nTry: {replace(point, call=None)}."
    choices = [str(replace(point, call=call)) for call in (1, count)]
    times = "once" if count == 1 else f"{count} times"
    return f"Split point {point}: {point.fqn} is called {times}.\nTry: {' to '.join(dict.fromkeys(choices))}."


def _work(captured: Captured) -> list[int]:
    """The positions of the operations that every stage could not do for itself."""
    free = parameter_free(captured)
    return [index for index, node in enumerate(captured.nodes) if node not in free]


def _examples(captured: Captured, start: int) -> str:
    """Up to three outermost modules that are called later."""
    outermost_fqns = dict.fromkeys(path_of(node)[0][1] for node in captured.nodes[start:] if path_of(node))
    start_fqns = {fqn for _, fqn in path_of(captured.nodes[start])}
    return ", ".join([fqn for fqn in outermost_fqns if fqn not in start_fqns][:3]) or "one of its children"


def _unknown(captured: Captured, point: Point) -> str:
    """The message for a point at a module that runs nothing or does not exist."""
    choices = _choices(captured, point.side)
    guess = closest(point.fqn, choices)
    question = f' Did you mean "{guess}"?' if guess is not None else ""
    if point.fqn in captured.modules and point.fqn:
        problem = f"the module {point.fqn} computes nothing in forward, so there is nothing to cut at."
    else:
        named = f"the model has no module {point.fqn}" if point.fqn else "the name of a module is missing"
        sides = ' (after a colon comes "end" or "beginning")' if ":" in point.fqn else ""
        problem = f"{named}{sides}."
    return f"Split point {point}: {problem}{question}\nTry: {_advice(captured, point, choices, guess)}."


def _choices(captured: Captured, side: SplitPoint) -> list[str]:
    """FQNs of the modules that the model calls and on whose ``side`` a stage could begin, in order."""
    work = next(iter(_work(captured)), len(captured.nodes))
    first: dict[str, int] = {}
    for index, node in enumerate(captured.nodes):
        for _, fqn in path_of(node):
            first.setdefault(fqn, index)
    return [fqn for fqn, index in first.items() if index > work or side is SplitPoint.END]


def _advice(captured: Captured, point: Point, choices: Sequence[str], guess: str | None) -> str:
    """The module that is meant and its siblings; else modules in the part of the name that exists, or the segments."""
    parent = (guess or point.fqn).rpartition(".")[0]
    while parent and parent not in captured.modules:
        parent = parent.rpartition(".")[0]
    inside = [fqn for fqn in choices if (parent or guess) and fqn.rpartition(".")[0] == parent and fqn != guess]
    names = inside or ([] if guess else [segment.fqn for segment in captured.segments[1:]])
    listed = f"one of {', '.join(names)}" if len(names) <= 8 else f"one of {', '.join(names[:7])}, …, {names[-1]}"
    return listed if guess is None else f"{guess}, or {listed}" if names else guess


def mark(captured: Captured, points: Sequence[Point], starts: Sequence[int]) -> Captured:
    """A copy of the graph with a ``split_point`` node where each stage but the first begins."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    marked = {captured.nodes[start]: point for start, point in zip(starts, points, strict=True)}
    for node in captured.graph.nodes:
        if node in marked:
            graph.call_function(split_point, (marked[node].fqn, marked[node].side.value))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return replace(captured, graph=graph)
