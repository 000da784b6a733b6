"""Which part of each segment the ranks along tp divide, and what they exchange, by the model's tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import fx

from pipegraph.cost.collectives import ALL_REDUCE, collective_seconds
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.segments.chain import Chain
from pipegraph.cost.stage_cost import count_flops
from pipegraph.graph.nodes import path_of, value_bytes

_DIVIDES_OUTPUT = ("colwise",)
_DIVIDES_INPUT = ("rowwise",)


@dataclass(frozen=True)
class TensorShare:
    """Of one segment and one microbatch.

    Attributes:
        time, saved, parameters: the parts of its time, of what it keeps and of its parameters that are divided.
        forward, backward: bytes of each tensor that all ranks along tp reduce in F, and in I.
    """

    time: float
    saved: float
    parameters: float
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def exchange_seconds(self, hardware: Hardware, ranks: int, rows: float) -> tuple[float, float]:
        """Return what the exchanges of F and of I take, for ``rows`` times the rows."""
        forward, backward = (
            sum(collective_seconds(hardware.links, ALL_REDUCE, rows * size, ranks) for size in sizes)
            for sizes in (self.forward, self.backward)
        )
        return forward, backward


def tensor_shares(chain: Chain, plan: Mapping[str, str], hardware: Hardware) -> list[TensorShare]:
    """Return the share of each segment.

    A value is divided from a module of the style "colwise" on up to one of "rowwise", whose results all ranks reduce.
    What goes into the former has a gradient that all reduce. Other styles divide nothing here.
    """
    styles = {node: _style(node, plan) for node in chain.captured.nodes}
    divided: set[fx.Node] = set()
    for node in chain.captured.nodes:
        if (
            styles[node] in _DIVIDES_OUTPUT
            or styles[node] in _DIVIDES_INPUT
            or any(each in divided and styles.get(each) not in _DIVIDES_INPUT for each in node.all_input_nodes)
        ):
            divided.add(node)
    return [_share(chain.nodes(index, index + 1), styles, divided, hardware) for index in range(len(chain.segments))]


def _share(
    nodes: Sequence[fx.Node], styles: Mapping[fx.Node, str], divided: set[fx.Node], hardware: Hardware
) -> TensorShare:
    seconds = [
        max(flops / _peak(node, hardware), _moved(node) / hardware.memory_bandwidth)
        for node, flops in zip(nodes, count_flops(nodes), strict=True)
    ]
    kept = [_size(node) if node.meta.get("requires_grad") else 0 for node in nodes]
    whole = [node in divided and styles[node] not in _DIVIDES_INPUT for node in nodes]
    state = dict.fromkeys(each for node in nodes for each in node.all_input_nodes if each.op == "get_attr")
    held = [(each, any(user in divided and styles[user] for user in each.users)) for each in state]
    reduced = {node for node in nodes if styles[node] in _DIVIDES_INPUT and not _continues(node, styles)}
    entered = {
        each
        for node in nodes
        if styles[node] in _DIVIDES_OUTPUT
        for each in node.all_input_nodes
        if each.op == "call_function" and each not in divided and each.meta.get("requires_grad")
    }
    return TensorShare(
        _part(seconds, [node in divided for node in nodes]),
        _part(kept, whole),
        _part([_size(each) for each, _ in held], [is_divided for _, is_divided in held]),
        tuple(map(_size, reduced)),
        tuple(map(_size, entered)),
    )


def _peak(node: fx.Node, hardware: Hardware) -> float:
    """Return the operations per second at most, in the dtype of a node's result."""
    dtype = str(getattr(node.meta.get("val"), "dtype", "")).removeprefix("torch.")
    return hardware.peak_flops.get(dtype, max(hardware.peak_flops.values()))


def _continues(node: fx.Node, styles: Mapping[fx.Node, str]) -> bool:
    """Whether the same module goes on with the result: only what leaves it is reduced."""
    return bool(node.users) and all(
        user in styles and styles[user] in _DIVIDES_INPUT and path_of(user) == path_of(node) for user in node.users
    )


def _style(node: fx.Node, plan: Mapping[str, str]) -> str:
    for _, name in reversed(path_of(node)):
        for pattern, style in plan.items():
            parts, own = pattern.split("."), name.split(".")
            if len(parts) == len(own) and all(map(fnmatchcase, own, parts)):
                return style
    return ""


def _part(figures: Sequence[float], chosen: Sequence[bool]) -> float:
    total = sum(figures)
    return sum(figure for figure, is_chosen in zip(figures, chosen, strict=True) if is_chosen) / total if total else 0.0


def _size(node: fx.Node) -> int:
    return value_bytes(node) if isinstance(node.meta.get("val"), torch.Tensor) else 0


def _moved(node: fx.Node) -> int:
    return _size(node) + sum(map(_size, node.all_input_nodes))
