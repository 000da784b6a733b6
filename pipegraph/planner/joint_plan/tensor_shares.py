"""Which part of each segment the ranks along tp divide, and what they exchange, by the model's tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from pipegraph.cost.hardware import ALL_GATHER, ALL_REDUCE, Hardware, collective_seconds
from pipegraph.cost.segments.chain import Chain
from pipegraph.cost.stage_cost import count_flops
from pipegraph.graph.nodes import path_of, value_bytes
from pipegraph.runtime.tensor_parallel import matches

_TO_PARTS = ("colwise", "packed_colwise")
"""Styles of modules that take the whole and return parts."""
_FROM_PARTS = ("rowwise",)
"""… that take parts and return shares of a sum, which all ranks reduce."""
_SUMMED = ("rowwise_rep", "rowwise_split_input", "embedding_rowwise")
"""… that take the whole, divide it themselves, and return such shares."""
_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")
"""… that take the whole, and gather what they return."""
_OF_PARTS = ("moe_tp_experts",)
"""… whose own parameters have styles, and that return shares of a sum."""


class _Work(NamedTuple):
    """What a node computes and moves.

    Attributes:
        flops, bytes: of all ranks along tp together, or of each if it is not divided.
        dtype: of the result.
        m, n, k: the sizes of a product with a weight [n, k]; 0 of anything else.
        divides: what tp divides: "n" of a product whose result is in parts, "k" of one whose input is, "" of nothing.
    """

    flops: float
    bytes: int
    dtype: str
    m: int
    n: int
    k: int
    divides: str

    @classmethod
    def from_node(cls, node: fx.Node, flops: float, divides: str) -> _Work:
        value = node.meta.get("val")
        dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
        weights = [parent.meta.get("val") for parent in node.all_input_nodes if parent.op == "get_attr"]
        n, k = next((param.shape for param in weights if isinstance(param, torch.Tensor) and param.dim() == 2), (0, 0))
        m = value.numel() // n if flops and n and isinstance(value, torch.Tensor) else 0
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
    """The part of one segment that the ranks along tp divide, for one microbatch.

    Attributes:
        work: the work of each of its nodes.
        divided: the nodes whose results are divided between the ranks.
        values, parameters: the parts of its values with a gradient and of its parameters that are divided.
        forward, backward: bytes of each tensor that all ranks along tp reduce in F, and in I.
        gathered: bytes of each tensor that they gather in F.
    """

    work: tuple[_Work, ...]
    divided: frozenset[fx.Node]
    values: float
    parameters: float
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gathered: tuple[int, ...] = ()

    def time_left(self, hardware: Hardware, ranks: int) -> float:
        """Return the fraction of the segment's time that each of ``ranks`` ranks along tp takes, by a roofline."""
        total_time, divided_time = (sum(work.seconds(hardware, tp) for work in self.work) for tp in (1, ranks))
        return divided_time / total_time if total_time else 1.0

    def exchange_seconds(self, hardware: Hardware, ranks: int, rows: float) -> tuple[float, float]:
        """Return what the exchanges of F and of I take, for ``rows`` times the rows."""
        forward, backward = (
            sum(collective_seconds(hardware.links, ALL_REDUCE, rows * size, ranks) for size in sizes)
            for sizes in (self.forward, self.backward)
        )
        gathers = (collective_seconds(hardware.links, ALL_GATHER, rows * size, ranks) for size in self.gathered)
        return forward + sum(gathers), backward


def tensor_shares(chain: Chain, plan: Mapping[str, str]) -> list[TensorShare]:
    """Return the share of each segment.

    Values are divided from a module of the style "colwise" up to one of the style "rowwise", and from a product with a
    parameter that has its own style up to the next such product. Styles that are not listed above divide nothing here.
    """
    division = _Division(chain.captured.nodes, plan)
    return [_share(chain.nodes(index, index + 1), division) for index in range(len(chain.segments))]


class _Division:
    """How the nodes of a graph are divided.

    Attributes:
        divides: node → "n" or "k" as for `_Work`; no entry for a node that each rank computes whole.
        parts: nodes whose results are divided between the ranks.
    """

    def __init__(self, nodes: Sequence[fx.Node], plan: Mapping[str, str]) -> None:
        self._plan = plan
        self.styles = {node: self._module_style(node) for node in nodes}
        self.divides: dict[fx.Node, str] = {}
        self.parts: set[fx.Node] = set()
        weights: set[fx.Node] = set()
        for node in nodes:
            style, inputs = self.styles[node][0], node.all_input_nodes
            weights.update(filter(self._is_divided_parameter, inputs))
            if inputs and weights.issuperset(inputs):  # a weight that is transposed
                weights.add(node)
                continue
            has_weight, takes_parts = any(parent in weights for parent in inputs), not self.parts.isdisjoint(inputs)
            if style in _FROM_PARTS + _SUMMED or (has_weight and takes_parts):
                self.divides[node] = "k"
            elif style in _TO_PARTS + _GATHERED or has_weight or takes_parts:
                self.divides[node] = "n"
                if style not in _GATHERED:
                    self.parts.add(node)

    def is_divided_state(self, state: fx.Node) -> bool:
        """Whether a rank holds a part of a parameter or buffer. A bias that is added to a sum is whole."""
        styles = {self.styles.get(user, ("", ""))[0] for user in state.users}
        sums = () if state.meta["val"].dim() < 2 else _FROM_PARTS + _SUMMED
        return self._is_divided_parameter(state) or not styles.isdisjoint(_TO_PARTS + _GATHERED + sums)

    def leaves(self, node: fx.Node) -> bool:
        """Whether a result goes beyond the module that has a style."""
        return not node.users or any(self.styles.get(user) != self.styles[node] for user in node.users)

    def enters(self, value: fx.Node, node: fx.Node) -> bool:
        """Whether a whole value with a gradient comes from beyond the module that has a style."""
        if value.op != "call_function" or value in self.parts or not value.meta.get("requires_grad"):
            return False
        return value.meta["val"].is_floating_point() and self.styles.get(value) != self.styles[node]

    def _module_style(self, node: fx.Node) -> tuple[str, str]:
        """The style of the innermost module that has one, and its name."""
        for _, name in reversed(path_of(node)):
            if style := _style(self._plan, name):
                return style, name
        return "", ""

    def _is_divided_parameter(self, state: fx.Node) -> bool:
        return state.op == "get_attr" and _style(self._plan, str(state.target)) not in ("", "replicate")


def _share(nodes: Sequence[fx.Node], division: _Division) -> TensorShare:
    styles, parts = division.styles, division.parts
    work = tuple(
        _Work.from_node(node, flops, division.divides.get(node, ""))
        for node, flops in zip(nodes, count_flops(nodes), strict=True)
    )
    sizes = [_size(node) if node.meta.get("requires_grad") else 0 for node in nodes]
    state = dict.fromkeys(parent for node in nodes for parent in node.all_input_nodes if parent.op == "get_attr")
    leaving = [node for node in nodes if styles[node][0] and node.meta.get("requires_grad") and division.leaves(node)]
    entered = {
        parent
        for node in nodes
        if styles[node][0] in _TO_PARTS + _GATHERED + _SUMMED + _OF_PARTS
        for parent in node.all_input_nodes
        if division.enters(parent, node)
    }
    return TensorShare(
        work,
        frozenset(node for node in nodes if node in parts),
        _part(sizes, [node in parts for node in nodes]),
        _part(list(map(_size, state)), list(map(division.is_divided_state, state))),
        tuple(_size(node) for node in leaving if styles[node][0] in _FROM_PARTS + _SUMMED + _OF_PARTS),
        tuple(map(_size, entered)),
        tuple(_size(node) for node in leaving if styles[node][0] in _GATHERED),
    )


def _style(plan: Mapping[str, str], name: str) -> str:
    return next((style for pattern, style in plan.items() if matches(pattern, name)), "")


def _part(figures: Sequence[float], chosen: Sequence[bool]) -> float:
    total = sum(figures)
    return sum(figure for figure, is_chosen in zip(figures, chosen, strict=True) if is_chosen) / total if total else 0.0


def _size(node: fx.Node) -> int:
    return value_bytes(node) if isinstance(node.meta.get("val"), torch.Tensor) else 0


def _moved(node: fx.Node) -> int:
    return _size(node) + sum(map(_size, node.all_input_nodes))
