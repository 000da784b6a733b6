"""The prices of a model for each layout of a cluster and number of rows of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import fx

from pipegraph.cost import ONCE, MemoryFactors, SegmentCost, TransientBytes
from pipegraph.cost.hardware import ALL_GATHER, ALL_REDUCE, Hardware
from pipegraph.cost.segments.attribution import divided_bytes
from pipegraph.cost.segments.chain import Chain
from pipegraph.cost.stage_cost import count_flops
from pipegraph.graph.nodes import path_of, value_bytes
from pipegraph.planner.joint_plan.choices import Layout
from pipegraph.planner.plan_options import ChainCosts
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.solver.prefix_sums import Floats
from pipegraph.recompute import Recompute
from pipegraph.runtime.tensor_parallel import matches
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.schedule.collectives import place_collectives

# ---- tensor shares ---------------------------------------------------------------------------------------------------
# Which part of each segment the ranks along tp divide, and what they exchange, by the model's tensor-parallel plan.


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
        boundary: the part of what crosses after it that is divided.
    """

    work: tuple[_Work, ...]
    divided: frozenset[fx.Node]
    values: float
    parameters: float
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    gathered: tuple[int, ...] = ()
    boundary: float = 0.0

    def time_left(self, hardware: Hardware, ranks: int) -> float:
        """Return the fraction of the segment's time that each of ``ranks`` ranks along tp takes, by a roofline."""
        total_time, divided_time = (sum(work.seconds(hardware, tp) for work in self.work) for tp in (1, ranks))
        return divided_time / total_time if total_time else 1.0

    def exchange_seconds(self, hardware: Hardware, ranks: int, rows: float) -> tuple[float, float]:
        """Return what the exchanges of F and of I take, for ``rows`` times the rows."""
        forward, backward = (
            sum(hardware.links.collective_seconds(ALL_REDUCE, rows * size, ranks) for size in sizes)
            for sizes in (self.forward, self.backward)
        )
        gathers = (hardware.links.collective_seconds(ALL_GATHER, rows * size, ranks) for size in self.gathered)
        return forward + sum(gathers), backward


def tensor_shares(chain: Chain, plan: Mapping[str, str], divides_tokens: bool = False) -> list[TensorShare]:
    """Return the share of each segment.

    Values are divided from a module of the style "colwise" up to one of the style "rowwise", and from a product with a
    parameter that has its own style up to the next such product. Styles that are not listed above divide nothing here.

    Args:
        divides_tokens: whether ranks along tp divide the tokens of all other values, so that norms, residuals and what
            crosses between stages are divided, too: sequence parallelism (Korthikanti et al., arXiv:2205.05198). Sums
            are scattered and parts gathered then, which takes as long as the reduction of both to all.
    """
    division = _Division(chain.captured.nodes, plan, divides_tokens)
    shares = [_share(chain.nodes(index, index + 1), division) for index in range(len(chain.segments))]
    return [replace(share, boundary=1.0) for share in shares] if divides_tokens else shares


class _Division:
    """How the nodes of a graph are divided.

    Attributes:
        divides: node → "n" or "k" as for `_Work`; no entry for a node that each rank computes whole.
        parts: nodes whose results are divided between the ranks.
    """

    def __init__(self, nodes: Sequence[fx.Node], plan: Mapping[str, str], divides_tokens: bool = False) -> None:
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
        # Kept apart from the parts: a module of the style "colwise" gathers them first.
        self.tokens: set[fx.Node] = set()
        for node in nodes if divides_tokens else ():
            if node not in self.divides and not self.styles[node][0] and node.meta.get("requires_grad"):
                self.divides[node] = "n"
                self.tokens.add(node)

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
        frozenset(node for node in nodes if node in parts or node in division.tokens),
        _part(sizes, [node in parts or node in division.tokens for node in nodes]),
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


# ---- layout costs ----------------------------------------------------------------------------------------------------


_EXACT = 1e-4  # how far the least makespan may be below the true one


class SummedCosts(ChainCosts):
    """Stages that cost the sum of their segments, which have costs of their own."""

    def __init__(self, costs: ChainCosts, segments: Sequence[SegmentCost]) -> None:
        super().__init__(costs.priced)
        self.segments = tuple(segments)

    def stage(self, start: int, stop: int) -> SegmentCost:
        segments = self.segments[start:stop]
        names = (
            "forward",
            "input_grad",
            "weight_grad",
            "saved_bytes",
            "parameter_bytes",
            "flops",
            "buffer_bytes",
            "offloaded_bytes",
        )
        sums = {name: sum(getattr(cost, name) for cost in segments) for name in names}
        return SegmentCost(
            **sums,
            boundary_bytes=segments[-1].boundary_bytes,
            weight_saved_bytes=sum(cost.weight_saved for cost in segments),
            trained_bytes=sum(cost.trained for cost in segments),
            added_bytes=sum(cost.added for cost in segments),
            optimizer_bytes=sum(cost.optimizer for cost in segments),
            transient_bytes=TransientBytes(*map(max, zip(*(cost.transient_bytes for cost in segments), strict=True))),
        )


class LayoutTotals(NamedTuple):
    """Of a whole model and one microbatch, with the best choice for each segment.

    Attributes:
        seconds: of F, I and W together.
        saved_bytes: what is kept.
        parameter_bytes, trained_bytes, optimizer_bytes, buffer_bytes: of the state.
    """

    seconds: float
    saved_bytes: float
    parameter_bytes: float
    trained_bytes: float
    optimizer_bytes: float
    buffer_bytes: float

    def needed_bytes(self, factors: MemoryFactors) -> float:
        """Return the bytes of the state and of what one microbatch keeps."""
        return (
            (factors.parameters + factors.copies) * self.parameter_bytes
            + factors.gradients * self.trained_bytes
            + factors.optimizer * self.optimizer_bytes
            + self.buffer_bytes
            + (1 + factors.allowance) * self.saved_bytes
        )


class _KeptParts(NamedTuple):
    """The parts of what a segment keeps from F on, and from I to W, that ranks along tp divide."""

    saved: float
    weight_saved: float


@dataclass(frozen=True, eq=False)
class LayoutCosts:
    """The prices of a model with each choice of recompute, for ``rows`` rows and for two times this number.

    For other numbers of rows, the time and bytes of a microbatch are linear in its rows; for bytes this is exact. Ranks
    along tp divide the part of each segment's time and bytes that the model's tensor-parallel plan divides. Of its
    transient bytes they divide the same part as of all its values.

    Attributes:
        single, double: the prices for ``rows`` rows, and for two times this number.
        shares: the part of each segment that tp divides; empty for a model without a plan.
        factors: how many times a rank holds each part of its stages, if no other rank has them.
    """

    hardware: Hardware
    rows: int
    single: RecomputeOptions
    double: RecomputeOptions
    shares: Sequence[TensorShare]
    factors: MemoryFactors = ONCE

    @property
    def recompute(self) -> tuple[Recompute, ...]:
        """The choices of what to compute again."""
        return self.single.recompute

    @cached_property
    def segments(self) -> int:
        """How many segments the model has."""
        return len(self.single.costs[0].segments)

    def options(self, layout: Layout, rows: int) -> tuple[SummedCosts, ...]:
        """Return the costs with each choice."""
        return _options(self, layout.tp, rows)

    def hidden(self, layout: Layout, rows: int) -> list[int]:
        """Return the options whose copies to CPU memory take no longer than the shortest of F, I and W, and
        those without copies."""
        link, options = self.hardware.host_link, []
        for option, costs in enumerate(self.options(layout, rows)):
            away = [cost for cost in costs.segments if cost.offloaded_bytes]
            took = sum(link.seconds(cost.offloaded_bytes) for cost in away) if link is not None else math.inf
            times = [[cost.forward, cost.input_grad, cost.weight_grad] for cost in away]
            if not away or took <= min(filter(None, map(sum, zip(*times, strict=True))), default=0.0):
                options.append(option)
        return options

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """The first segment of each layer."""
        return tuple(layer.start for layer in self.single.costs[0].priced.chain.layers)

    def layer_options(self, layout: Layout, rows: int) -> list[list[SegmentCost]]:
        """Return the costs of whole layers with each choice."""
        return _layer_options(self, layout.tp, rows)

    def totals(self, layout: Layout, rows: int) -> LayoutTotals:
        """Return the least that the model takes and keeps."""
        return _totals(self, layout.tp, rows)

    def state_bytes(self, tp: int, factors: MemoryFactors) -> Floats:
        """Return the bytes of the state of each segment."""
        buffers, parameters, trained, optimizer = _state_of_segments(self, tp)
        weights = (factors.parameters + factors.copies) * parameters + factors.gradients * trained
        state: Floats = weights + factors.optimizer * optimizer + buffers
        return state

    def least_makespan(self, layout: Layout, rows: int, microbatches: int, whole_backwards: bool) -> float:
        """Return the least seconds of a step with one stage on a rank, over all cuts, also those inside segments.

        Rank s computes for m·w(s) seconds, after F of all earlier stages on the first microbatch. With
        ``whole_backwards`` their B on the last microbatch comes after its own.
        """
        return _least_makespan(self, layout.tp, rows, layout.pp, microbatches, whole_backwards)

    def chain(self, option: int, tp: int, rows: int) -> list[SegmentCost]:
        """Return the costs of segments with one choice."""
        growth = rows / self.rows - 1
        pairs = list(zip(self.single.costs[option].segments, self.double.costs[option].segments, strict=True))
        of_pair = {pair: _scaled(*pair, growth) for pair in dict.fromkeys(pairs)}  # layers cost the same
        scaled = [of_pair[pair] for pair in pairs]
        if tp == 1:
            return scaled
        saved_parts = _kept_parts(self, option)
        return [
            _divided(cost, share, parts, tp, time, *self._exposed(share, tp, 1 + growth, cost, time))
            for cost, share, parts, time in zip(scaled, self.shares, saved_parts, _times_left(self, tp), strict=True)
        ]

    def _exposed(self, share: TensorShare, tp: int, rows: float, cost: SegmentCost, time: float) -> tuple[float, float]:
        """The seconds that the exchanges of F and of I add to a segment whose products take the part ``time``."""
        forward, backward = share.exchange_seconds(self.hardware, tp, rows)
        exposed = self.hardware.exposed_exchange
        return exposed(forward, cost.forward * time), exposed(backward, cost.input_grad * time)


@lru_cache(maxsize=64)
def _state_of_segments(costs: LayoutCosts, tp: int) -> Floats:
    """Return the bytes of buffers, parameters, trained parameters and optimizer state: (4, segments)."""
    segments = costs.chain(0, tp, costs.rows)
    rows = ((cost.buffer_bytes, cost.parameter_bytes, cost.trained, cost.optimizer) for cost in segments)
    return np.array(list(rows), np.float64).T


@lru_cache(maxsize=64)
def _times_left(costs: LayoutCosts, tp: int) -> list[float]:
    return [share.time_left(costs.hardware, tp) for share in costs.shares]


@lru_cache(maxsize=64)
def _kept_parts(costs: LayoutCosts, option: int) -> list[_KeptParts]:
    priced = costs.single.costs[option].priced
    every, divided = range(costs.segments), frozenset().union(*(share.divided for share in costs.shares))
    saved, weight_saved = (divided_bytes(priced.parts, every, divided, after_input_grad=flag) for flag in (False, True))
    return [
        _KeptParts(
            min(1.0, of_saved / cost.saved_bytes) if cost.saved_bytes else 0.0,
            min(1.0, of_weight_saved / cost.weight_saved) if cost.weight_saved else 0.0,
        )
        for cost, of_saved, of_weight_saved in zip(priced.costs, saved, weight_saved, strict=True)
    ]


@lru_cache(maxsize=64)
def _options(costs: LayoutCosts, tp: int, rows: int) -> tuple[SummedCosts, ...]:
    return tuple(SummedCosts(chain, costs.chain(option, tp, rows)) for option, chain in enumerate(costs.single.costs))


@lru_cache(maxsize=64)
def _layer_options(costs: LayoutCosts, tp: int, rows: int) -> list[list[SegmentCost]]:
    edges = [*costs.layers, costs.segments]
    return [[option_costs.stage(*edge) for edge in pairwise(edges)] for option_costs in _options(costs, tp, rows)]


@lru_cache(maxsize=64)
def _totals(costs: LayoutCosts, tp: int, rows: int) -> LayoutTotals:
    chain = list(zip(*(option_costs.segments for option_costs in _options(costs, tp, rows)), strict=True))
    return LayoutTotals(
        sum(min(cost.forward + cost.input_grad + cost.weight_grad for cost in choices) for choices in chain),
        sum(min(cost.saved_bytes for cost in choices) for choices in chain),
        *(
            sum(getattr(choices[0], name) for choices in chain)
            for name in ("parameter_bytes", "trained", "optimizer", "buffer_bytes")
        ),
    )


@lru_cache(maxsize=1024)
def _least_makespan(
    costs: LayoutCosts, tp: int, rows: int, ranks: int, microbatches: int, whole_backwards: bool
) -> float:
    chain = list(zip(*(option_costs.segments for option_costs in _options(costs, tp, rows)), strict=True))
    least = [min(cost.forward + cost.input_grad + cost.weight_grad for cost in choices) for choices in chain]
    work = np.cumsum([0.0, *least])
    waits = work if whole_backwards else np.cumsum([0.0, *(min(cost.forward for cost in choices) for choices in chain)])

    def is_enough(makespan: float) -> bool:
        """Whether the ranks get through the chain if each takes what it has time for: no other way gets further."""
        done = 0.0
        for _ in range(ranks):
            done += max(0.0, makespan - float(np.interp(done, work, waits))) / microbatches
        return done >= work[-1]

    low, high = microbatches * work[-1] / ranks, (microbatches + ranks) * work[-1]
    while high - low > _EXACT * high:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return float(low)


def _scaled(single: SegmentCost, double: SegmentCost, growth: float) -> SegmentCost:
    def at(name: str) -> float:
        base, two = getattr(single, name), getattr(double, name)
        return max(0.0, base + growth * (two - base))

    weight_saved_bytes = None
    if single.weight_saved_bytes is not None and double.weight_saved_bytes is not None:
        weight_saved_bytes = round(at("weight_saved_bytes"))
    return replace(
        single,
        forward=at("forward"),
        input_grad=at("input_grad"),
        weight_grad=at("weight_grad"),
        boundary_bytes=round(at("boundary_bytes")),
        saved_bytes=round(at("saved_bytes")),
        flops=round(at("flops")),
        weight_saved_bytes=weight_saved_bytes,
        offloaded_bytes=round(at("offloaded_bytes")),
        transient_bytes=TransientBytes(
            *(
                max(0, round(base + growth * (two - base)))
                for base, two in zip(single.transient_bytes, double.transient_bytes, strict=True)
            )
        ),
    )


def _divided(
    cost: SegmentCost,
    share: TensorShare,
    parts: _KeptParts,
    tp: int,
    time: float,
    forward: float,
    backward: float,
) -> SegmentCost:
    """Return the cost for one of the ranks along tp. ``time`` is the part of its time that is left, and ``forward`` and
    ``backward`` the seconds of its exchanges."""
    saved, weight_saved, values, parameters, boundary = (
        1 - part + part / tp
        for part in (parts.saved, parts.weight_saved, share.values, share.parameters, share.boundary)
    )
    return replace(
        cost,
        boundary_bytes=round(cost.boundary_bytes * boundary),
        forward=cost.forward * time + forward,
        input_grad=cost.input_grad * time + backward,
        weight_grad=cost.weight_grad * time,
        saved_bytes=round(cost.saved_bytes * saved),
        weight_saved_bytes=None if cost.weight_saved_bytes is None else round(cost.weight_saved_bytes * weight_saved),
        offloaded_bytes=min(round(cost.saved_bytes * saved), round(cost.offloaded_bytes * saved)),
        transient_bytes=TransientBytes(*(round(size * values) for size in cost.transient_bytes)),
        parameter_bytes=round(cost.parameter_bytes * parameters),
        trained_bytes=None if cost.trained_bytes is None else round(cost.trained_bytes * parameters),
        added_bytes=None if cost.added_bytes is None else round(cost.added_bytes * parameters),
        optimizer_bytes=round(cost.optimizer * parameters),
    )


def exposed_seconds(
    stages: Sequence[SegmentCost], placement: Sequence[int], layout: Layout, costs: LayoutCosts
) -> float:
    """Return what gathering and reducing add to a step: on some rank, the gather of its first stage, which comes before
    all else, and the reduction of that stage's gradients, which are complete last. All others are hidden."""
    first = {rank: stage for stage, rank in reversed(list(enumerate(placement)))}
    return max(sum(collective_seconds(stages[stage], layout, costs)) for stage in first.values())


def collective_seconds(stage: SegmentCost, layout: Layout, costs: LayoutCosts) -> tuple[float, float]:
    """Return the seconds to gather the parameters of a stage, and to reduce its gradients."""
    return (
        layout.gather_seconds(costs.hardware, stage.parameter_bytes),
        layout.reduce_seconds(costs.hardware, costs.factors.gradients * stage.trained),
    )


def resident_seconds(
    stages: Sequence[SegmentCost],
    schedule: Schedule,
    times: Times,
    resident: int,
    layout: Layout,
    costs: LayoutCosts,
) -> float:
    """Return the seconds that gathering and reducing add to a step in which only ``resident`` stages of a rank are
    whole at a time, so that stages are gathered repeatedly."""
    unshard, reduce_grad = zip(*(collective_seconds(stage, layout, costs) for stage in stages), strict=True)
    with_collectives = replace(times, unshard=unshard, reduce_grad=reduce_grad)
    placed = place_collectives(schedule, range(schedule.stages), (), resident)
    return max(0.0, simulate(placed, with_collectives).makespan - simulate(schedule, times).makespan)
