"""Which part of each segment the ranks along tp divide, and what they exchange, by the model's tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import fx

from pipegraph.cost.collectives import ALL_REDUCE, collective_seconds
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.segments.chain import Chain
from pipegraph.cost.stage_cost import count_flops
from pipegraph.graph.nodes import path_of, value_bytes

_DIVIDES_OUTPUT = ("colwise",)
_DIVIDES_INPUT = ("rowwise",)


class _Work(NamedTuple):
    """What a node computes and moves.

    Attributes:
        flops, bytes: of all ranks along tp together, or of each if it is not divided.
        dtype: of the result.
        m, n, k: the sizes of a product with a weight [n, k]; 0 of anything else.
        divides: what tp divides: "n" of a "colwise" product, "k" of a "rowwise" one, "" of nothing.
    """

    flops: float
    bytes: int
    dtype: str
    m: int
    n: int
    k: int
    divides: str

    @classmethod
    def of(cls, node: fx.Node, flops: float, style: str, is_divided: bool) -> _Work:
        value = node.meta.get("val")
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        weights = [each.meta.get("val") for each in node.all_input_nodes if each.op == "get_attr"]
        n, k = next((each.shape for each in weights if isinstance(each, torch.Tensor) and each.dim() == 2), (0, 0))
        m = value.numel() // n if flops and n and isinstance(value, torch.Tensor) else 0
        divides = ("k" if style in _DIVIDES_INPUT else "n") if is_divided else ""
        return cls(flops, _moved(node), dtype, int(m), int(n), int(k), divides)

    def seconds(self, hardware: Hardware, tp: int) -> float:
        """Return what a rank takes for it by a roofline: smaller products attain less."""
        part = tp if self.divides else 1
        rate = hardware.peak_flops.get(self.dtype, max(hardware.peak_flops.values()))
        if self.m:
            n, k = (size / (tp if self.divides == name else 1) for name, size in (("n", self.n), ("k", self.k)))
            rate = hardware.flops_per_second("matmul", self.dtype, m=self.m, n=n, k=k, flops=self.flops / part)
        return max(self.flops / part / rate, self.bytes / part / hardware.memory_bandwidth)


@dataclass(frozen=True)
class TensorShare:
    """Of one segment and one microbatch.

    Attributes:
        work: what its nodes compute.
        divided: those of its nodes of whose results each rank has a part.
        values, parameters: the parts of its values with a gradient and of its parameters that are divided.
        forward, backward: bytes of each tensor that all ranks along tp reduce in F, and in I.
    """

    work: tuple[_Work, ...]
    divided: frozenset[fx.Node]
    values: float
    parameters: float
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def time_left(self, hardware: Hardware, ranks: int) -> float:
        """Return the part of its time that each of so many ranks along tp takes, by a roofline."""
        whole, left = (sum(each.seconds(hardware, tp) for each in self.work) for tp in (1, ranks))
        return left / whole if whole else 1.0

    def exchange_seconds(self, hardware: Hardware, ranks: int, rows: float) -> tuple[float, float]:
        """Return what the exchanges of F and of I take, for ``rows`` times the rows."""
        forward, backward = (
            sum(collective_seconds(hardware.links, ALL_REDUCE, rows * size, ranks) for size in sizes)
            for sizes in (self.forward, self.backward)
        )
        return forward, backward


def tensor_shares(chain: Chain, plan: Mapping[str, str]) -> list[TensorShare]:
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
    return [_share(chain.nodes(index, index + 1), styles, divided) for index in range(len(chain.segments))]


def _share(nodes: Sequence[fx.Node], styles: Mapping[fx.Node, str], divided: set[fx.Node]) -> TensorShare:
    work = tuple(
        _Work.of(node, flops, styles[node], node in divided)
        for node, flops in zip(nodes, count_flops(nodes), strict=True)
    )
    made = [_size(node) if node.meta.get("requires_grad") else 0 for node in nodes]
    in_parts = frozenset(node for node in nodes if node in divided and styles[node] not in _DIVIDES_INPUT)
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
        work,
        in_parts,
        _part(made, [node in in_parts for node in nodes]),
        _part([_size(each) for each, _ in held], [is_divided for _, is_divided in held]),
        tuple(map(_size, reduced)),
        tuple(map(_size, entered)),
    )


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
