"""Price a captured model: what F, I and W of each of its segments take, by one of several methods."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipegraph.cost.aten_graph import trace_aten
from pipegraph.cost.balance import BALANCES, PRICED, parse_balance
from pipegraph.cost.block_times import MeasureOptions, measure
from pipegraph.cost.hardware.profile import Hardware
from pipegraph.cost.measurement_cache import Cache
from pipegraph.cost.roofline.graph_price import GraphPrice, price_graph
from pipegraph.cost.segment_cost import SegmentCost
from pipegraph.cost.segments.attribution import CrossingValue, Times, saved_bytes, segment_times, weight_saved_bytes
from pipegraph.cost.segments.chain import Chain, find_chain
from pipegraph.cost.segments.distinct_blocks import Block, LossOf, SegmentGroups, TraceOptions, group_segments
from pipegraph.cost.segments.layer_types import begins_of_type, first_uses
from pipegraph.cost.segments.subgraph import fx_graph
from pipegraph.cost.stage_cost import buffer_bytes, parameter_bytes
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.nodes import path_of


@dataclass(frozen=True, eq=False)
class PricedModel:
    """A chain with the cost of each segment.

    Attributes:
        costs: one for each segment. ``input_grad`` is 0 where no input has a gradient, as in the model's first segment:
            ``weight_grad`` is the whole backward there.
        method, unit: how it was priced, and what its times are counted in.
        uncounted: operations that no formula counts.
        crossing: the values between segments, and what it takes to hand each over.
    """

    chain: Chain
    costs: tuple[SegmentCost, ...]
    method: str
    unit: str
    uncounted: tuple[str, ...]
    crossing: tuple[CrossingValue, ...] = field(repr=False)
    parts: SegmentGroups = field(repr=False)

    def stage(self, start: int, stop: int) -> SegmentCost:
        """The cost of the segments ``start`` … ``stop`` − 1 as one stage.

        The sum, and what it takes to exchange values with other stages. What two segments keep counts once, and a tied
        weight in each stage that has it. Where no input has a gradient all of the backward is in ``weight_grad``.
        """
        held = range(start, stop)
        times = [(cost.forward, cost.input_grad, cost.weight_grad) for cost in self.costs[start:stop]]
        times += [each.at_ends(held) for each in self.crossing]
        forward, of_inputs, of_weights = (sum(each) for each in zip(*times, strict=True))
        comes = start > 0 and self.chain.segments[start - 1].gradient_bytes > 0
        if not comes:
            of_inputs, of_weights = 0.0, of_inputs + of_weights
        state = dict.fromkeys(node for part in self.parts.segments[start:stop] for node in part.subgraph.state)
        (entries,) = first_uses(self.chain, [list(state)])
        saved = sum(saved_bytes(self.parts, held))
        kept = sum(weight_saved_bytes(self.parts, held))
        if not comes:
            kept = saved + self.chain.segments[stop - 1].gradient_bytes
        if self.method == "parameters":
            forward, of_inputs, of_weights = _alike(_numel(entries))
        elif self.method == "memory":
            forward, of_inputs, of_weights = _alike(parameter_bytes(entries) + saved)
        flops, crossing = sum(cost.flops for cost in self.costs[start:stop]), self.costs[stop - 1].boundary_bytes
        return SegmentCost(
            forward, of_inputs, of_weights, crossing, saved, parameter_bytes(entries), flops, kept,
            parameter_bytes(entries, trained=True), buffer_bytes(entries),
        )  # fmt: skip


def price(
    captured: Captured,
    method: str = "time",
    hardware: Hardware | None = None,
    recompute: str = "min-cut",
    loss: tuple[LossOf, Any] | None = None,
    setting: MeasureOptions | None = None,
    cache: Cache | None = None,
    kept: Collection[int] = (),
) -> PricedModel:
    """Price every segment of a model for one microbatch, each distinct block once.

    Args:
        captured: the model, whose parameters need no memory.
        method: ``time``, a roofline of ``hardware``; ``measured``, on this machine; ``flops``, ``parameters`` or
            ``memory`` (parameters, and what is saved for the backward) alone; ``type:REGEX``, the modules whose class
            name matches. A weight that is no time stands for F, for I
            and for W alike.
        hardware: what the roofline is of, with its ``measured_ratio``; ``cpu`` by default.
        recompute: what the backward computes again, as the kernels will.
        loss: a function of output and target, and a target; by default the mean square of the outputs.
        setting, cache: of ``measured``: how, and what was measured before.
        kept: positions in ``Captured.nodes`` at which the chain is cut in any case.

    Raises:
        PlanError: there is no such method; ``type:`` matches nothing; what is to be measured does not fit the device.
    """
    name, pattern = parse_balance(method, PRICED)
    begins = begins_of_type(captured, pattern) if name == "type" else ()
    chain = find_chain(captured, inside_layers=name != "type", kept={*kept, *begins})
    hardware, setting = hardware or Hardware.load("cpu"), setting or MeasureOptions()
    gpu = not setting.device.startswith("cpu") if name == "measured" else hardware.first_touch is None
    parts = group_segments(chain, TraceOptions(loss, recompute, gpu))
    blocks = parts.blocks()
    prices = {block.key: _price(block, hardware) for block in blocks}
    uncounted = sorted({each for three in prices.values() for graph in three for each in graph.uncounted})
    _warn(blocks, uncounted)
    state = first_uses(chain, [part.subgraph.state for part in parts.segments])
    every = range(len(chain.segments))
    saved, kept = saved_bytes(parts, every), weight_saved_bytes(parts, every)
    crossing: tuple[CrossingValue, ...] = ()
    if name == "type":
        times = [_alike(sum(each.start <= begin < each.stop for begin in begins)) for each in chain.segments]
    elif name == "parameters":
        times = [_alike(_numel(each)) for each in state]
    elif name == "memory":
        times = [_alike(parameter_bytes(each) + bytes) for each, bytes in zip(state, saved, strict=True)]
    else:
        of_blocks = {key: _counted(three, name, hardware) for key, three in prices.items()}
        if name == "measured":
            found = measure(blocks, setting, cache)
            of_blocks = {block.key: each.times for block, each in zip(blocks, found, strict=True)}
        times, crossing = segment_times(parts, of_blocks)
    costs = tuple(
        SegmentCost(
            *times[index],
            boundary_bytes=segment.boundary_bytes,
            saved_bytes=saved[index],
            parameter_bytes=parameter_bytes(state[index]),
            flops=prices[part.block.key][0].flops,
            weight_saved_bytes=kept[index],
            trained_bytes=parameter_bytes(state[index], trained=True),
            buffer_bytes=buffer_bytes(state[index]),
        )
        for index, (segment, part) in enumerate(zip(chain.segments, parts.segments, strict=True))
    )
    return PricedModel(chain, costs, method, BALANCES[name], tuple(uncounted), crossing, parts)


def _price(block: Block, hardware: Hardware) -> tuple[GraphPrice, GraphPrice, GraphPrice]:
    """F, I and W. Of a block whose backward cannot be traced: its forward, and as much again for each of I and W, as
    the backward of a product of matrices takes."""
    if block.derivative is None:
        inputs = [node.meta["val"] for node in (*block.subgraph.inputs, *block.subgraph.state)]
        alone = price_graph(trace_aten(fx_graph(block.subgraph), inputs), hardware)
        return (alone, alone, alone) if block.has_input_grad else (alone, GraphPrice(), alone + alone)
    forward, of_inputs, of_weights = (
        GraphPrice() if graph is None else price_graph(graph, hardware) for graph in block.graphs
    )
    return forward, of_inputs, of_weights


def _counted(graphs: Sequence[GraphPrice], name: str, hardware: Hardware) -> Times:
    forward, of_inputs, of_weights = (float(each.flops) if name == "flops" else each.seconds for each in graphs)
    times = forward, of_inputs, of_weights
    return hardware.measured_ratio.of(times) if name == "time" else times


def _alike(weight: float) -> Times:
    return weight, weight, weight


def _numel(state: Iterable[StateEntry]) -> int:
    return sum(entry.numel for entry in state if entry.kind == "parameter")


def _warn(blocks: Iterable[Block], uncounted: Sequence[str]) -> None:
    if uncounted:
        warnings.warn(
            f"No formula counts the work of {', '.join(uncounted)}: only the bytes that they move are priced. "
            "--balance measured times them, torch.utils.flop_counter.register_flop_formula adds a formula.",
            stacklevel=3,
        )
    for block in blocks:
        if block.refusal:
            paths = [path_of(node) for node in block.subgraph.nodes if path_of(node)]
            where = paths[0][-1][1] if paths else "the model's own operations"
            warnings.warn(
                f"The backward of {where} cannot be traced by itself and is taken for twice the forward: "
                f"{block.refusal}",
                stacklevel=3,
            )
