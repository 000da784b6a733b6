"""The prices of a model for each layout of a cluster and number of rows of a microbatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.cost import SegmentCost, TransientBytes
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.segments.attribution import divided_bytes
from pipegraph.planner.joint_plan.choices import Layout
from pipegraph.planner.joint_plan.tensor_shares import TensorShare
from pipegraph.planner.plan_options import ChainCosts
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.recompute import Recompute
from pipegraph.schedule import Schedule, Times, simulate
from pipegraph.schedule.collectives import place_collectives

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
            transient_bytes=TransientBytes(*map(max, zip(*(cost.transient_bytes for cost in segments), strict=True))),
        )


class LayoutTotals(NamedTuple):
    """Of a whole model and one microbatch, with the best choice for each segment.

    Attributes:
        seconds: of F, I and W together.
        saved_bytes, parameter_bytes: what is kept and held.
    """

    seconds: float
    saved_bytes: float
    parameter_bytes: float


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
    """

    hardware: Hardware
    rows: int
    single: RecomputeOptions
    double: RecomputeOptions
    shares: Sequence[TensorShare]

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
            _divided(cost, share, parts, tp, time, *share.exchange_seconds(self.hardware, tp, 1 + growth))
            for cost, share, parts, time in zip(scaled, self.shares, saved_parts, _times_left(self, tp), strict=True)
        ]


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
        sum(choices[0].parameter_bytes for choices in chain),
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
    saved, weight_saved, values, parameters = (
        1 - part + part / tp for part in (parts.saved, parts.weight_saved, share.values, share.parameters)
    )
    return replace(
        cost,
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
    )


def exposed_seconds(
    stages: Sequence[SegmentCost], placement: Sequence[int], layout: Layout, hardware: Hardware
) -> float:
    """Return what gathering and reducing add to a step: on some rank, the gather of its first stage, which comes before
    all else, and the reduction of that stage's gradients, which are complete last. All others are hidden."""
    first = {rank: stage for stage, rank in reversed(list(enumerate(placement)))}
    sizes = [stages[stage].parameter_bytes for stage in first.values()]
    return max(layout.gather_seconds(hardware, size) + layout.reduce_seconds(hardware, size) for size in sizes)


def resident_seconds(
    stages: Sequence[SegmentCost],
    schedule: Schedule,
    times: Times,
    resident: int,
    layout: Layout,
    hardware: Hardware,
) -> float:
    """Return the seconds that gathering and reducing add to a step in which only ``resident`` stages of a rank are
    whole at a time, so that stages are gathered repeatedly."""
    sizes = [stage.parameter_bytes for stage in stages]
    with_collectives = replace(
        times,
        unshard=tuple(layout.gather_seconds(hardware, size) for size in sizes),
        reduce_grad=tuple(layout.reduce_seconds(hardware, size) for size in sizes),
    )
    placed = place_collectives(schedule, range(schedule.stages), (), resident)
    return max(0.0, simulate(placed, with_collectives).makespan - simulate(schedule, times).makespan)
