"""The chain of segments: the repeated layers of a model and the glue between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from torch import nn

from pipegraph.graph.calls import CallTree, call_tree
from pipegraph.graph.captured import Captured, Segment


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
