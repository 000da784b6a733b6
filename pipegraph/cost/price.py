"""Price a captured model: the cost of F, I and W of each segment, by one of several methods."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from pipegraph.arguments import argument
from pipegraph.cost import SegmentCost
from pipegraph.cost.balance import AUTO, BALANCES, PRICED, begins_of_type, first_uses, parse_balance
from pipegraph.cost.block_times import Cache, MeasureOptions, measure
from pipegraph.cost.hardware import Hardware
from pipegraph.cost.measured_layers import auto_times
from pipegraph.cost.model_output import LossOf
from pipegraph.cost.roofline.graph_price import GraphPrice, price_graph, trace_aten
from pipegraph.cost.segments.attribution import (
    CrossingValue,
    Times,
    added_bytes,
    offloaded_bytes,
    saved_bytes,
    segment_times,
    segment_transient_bytes,
    stage_transient_bytes,
    weight_saved_bytes,
)
from pipegraph.cost.segments.chain import Chain, find_chain
from pipegraph.cost.segments.distinct_blocks import Block, BlockOptions, SegmentGroups, group_segments
from pipegraph.cost.segments.subgraph import fx_graph
from pipegraph.cost.stage_cost import buffer_bytes, parameter_bytes
from pipegraph.cost.training_state import OWN_DTYPES, TrainingState
from pipegraph.graph.captured import Captured, StateEntry
from pipegraph.graph.nodes import path_of
from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.recompute import DEFAULT, Recompute


@dataclass(frozen=True, eq=False)
class PricedModel:
    """A chain with the cost of each segment.

    Attributes:
        costs: one for each segment. If no input has a gradient, as in the model's first segment, ``input_grad`` is 0
            and ``weight_grad`` is the whole backward.
        method: how it was priced.
        unit: the unit of its times.
        uncounted: operations that no formula counts.
        crossing: the values between segments, and the cost of handing each over.
    """

    chain: Chain
    costs: tuple[SegmentCost, ...]
    method: str
    unit: str
    uncounted: tuple[str, ...]
    crossing: tuple[CrossingValue, ...] = field(repr=False)
    parts: SegmentGroups = field(repr=False)
    training: TrainingState = OWN_DTYPES

    def stage(self, start: int, stop: int) -> SegmentCost:
        """Return the cost of the segments ``start`` … ``stop`` − 1 as one stage.

        It is their sum, and the cost of exchanging values with other stages. A value that two segments keep counts
        once; a tied weight counts in each stage that has it. If no input has a gradient, ``weight_grad`` is the whole
        backward.
        """
        stage = range(start, stop)
        times = [(cost.forward, cost.input_grad, cost.weight_grad) for cost in self.costs[start:stop]]
        times += [value.at_ends(stage) for value in self.crossing]
        forward, of_inputs, of_weights = (sum(column) for column in zip(*times, strict=True))
        has_gradient = start > 0 and self.chain.segments[start - 1].gradient_bytes > 0
        if not has_gradient:
            of_inputs, of_weights = 0.0, of_inputs + of_weights
        state = dict.fromkeys(node for part in self.parts.segments[start:stop] for node in part.subgraph.state)
        (entries,) = first_uses(self.chain, [list(state)])
        saved = sum(saved_bytes(self.parts, stage))
        weight_saved = sum(weight_saved_bytes(self.parts, stage))
        if not has_gradient:
            weight_saved = saved + self.chain.segments[stop - 1].gradient_bytes
        if self.method == "parameters":
            forward, of_inputs, of_weights = _triple(_numel(entries))
        elif self.method == "memory":
            forward, of_inputs, of_weights = _triple(parameter_bytes(entries) + saved)
        flops, crossing = sum(cost.flops for cost in self.costs[start:stop]), self.costs[stop - 1].boundary_bytes
        return SegmentCost(
            forward, of_inputs, of_weights, crossing, saved, parameter_bytes(entries), flops, weight_saved,
            parameter_bytes(entries, trained=True), buffer_bytes(entries), sum(offloaded_bytes(self.parts, stage)),
            stage_transient_bytes(self.parts, stage, has_gradient), sum(added_bytes(self.parts, stage)),
            self.training.bytes_of(self.chain.captured, entries),
        )  # fmt: skip


def price(
    captured: Captured,
    method: str = "time",
    hardware: Hardware | None = None,
    recompute: object = DEFAULT,
    loss: tuple[LossOf, Any] | None = None,
    setting: MeasureOptions | None = None,
    cache: Cache | None = None,
    cut_positions: Collection[int] = (),
    traced: dict[str, DividedFunction] | None = None,
    stages: int = 1,
    training: TrainingState = OWN_DTYPES,
) -> PricedModel:
    """Price every segment of a model for one microbatch, each distinct block once.

    Args:
        captured: the model, whose parameters need no memory.
        method: ``time``, a roofline of ``hardware``; ``measured``, on this machine; ``auto``, layers on this machine
            and the rest by the roofline; ``flops``, ``parameters`` or ``memory`` (parameters, and what is saved for the
            backward) alone; ``type:REGEX``, the modules whose class name matches. A weight that is not a time is the
            weight of F, of I and of W.
        hardware: the device of the roofline, with its ``measured_ratio``; ``cpu`` by default.
        recompute: what the backward computes again, as `Recompute.parse` takes it.
        loss: a function of output and target, and a target; by default the loss that the model returns, or the mean
            square of its outputs.
        setting: how ``measured`` and ``auto`` measure.
        cache: what they measured before.
        cut_positions: those in ``Captured.nodes`` at which the chain is always cut.
        traced: filled with the derivatives of blocks, by a hash of their structure, and read: for prices with another
            ``recompute``.
        stages: how many are to be made. Nothing is priced if the segments are too few for them.
        training: what a rank holds for each parameter, and the dtype in which matrices are multiplied.

    Raises:
        ArgumentError: a pattern of ``recompute`` matches no module.
        PlanError: there are too few segments; the method is unknown; ``type:`` matches nothing; the blocks to measure
            do not fit the device.
    """
    begun = time.perf_counter()
    name, pattern = parse_balance(method, PRICED)
    again = Recompute.parse(recompute)
    again.check_names({fqn for node in captured.nodes for _, fqn in path_of(node)})
    again = again.with_layers(fqn for fqn, entry in captured.state.items() if entry.kind == "parameter")
    begins = begins_of_type(captured, pattern) if name == "type" else ()
    chain = find_chain(captured, inside_layers=name != "type", cut_positions={*cut_positions, *begins})
    chain.check_stages(stages)
    hardware, setting = hardware or Hardware.load("cpu"), setting or MeasureOptions()
    is_run = name in ("measured", AUTO)
    gpu = not setting.device.startswith("cpu") if is_run else not hardware.is_cpu
    parts = group_segments(chain, BlockOptions(loss, again, gpu, {} if traced is None else traced))
    blocks = parts.blocks()
    products = "" if training.dtypes is None else training.dtypes.products
    prices = {block.key: _price(block, hardware, products) for block in blocks}
    uncounted = sorted({operation for three in prices.values() for graph in three for operation in graph.uncounted})
    _warn(blocks, uncounted)
    state = first_uses(chain, [part.subgraph.state for part in parts.segments])
    every = range(len(chain.segments))
    saved, weight_saved = saved_bytes(parts, every), weight_saved_bytes(parts, every)
    away = offloaded_bytes(parts, every)
    transient, added = segment_transient_bytes(parts), added_bytes(parts, every)
    crossing: tuple[CrossingValue, ...] = ()
    if name == "type":
        times = [_triple(sum(segment.start <= begin < segment.stop for begin in begins)) for segment in chain.segments]
    elif name == "parameters":
        times = [_triple(_numel(entries)) for entries in state]
    elif name == "memory":
        times = [_triple(parameter_bytes(entries) + bytes) for entries, bytes in zip(state, saved, strict=True)]
    else:
        of_blocks = {key: _counted(three, name, hardware) for key, three in prices.items()}
        if name == "measured":
            measured = measure(blocks, setting, cache)
            of_blocks = {block.key: block_times.times for block, block_times in zip(blocks, measured, strict=True)}
        elif name == AUTO:
            of_blocks = auto_times(parts, of_blocks, setting, cache or Cache(), time.perf_counter() - begun)
        times, crossing = segment_times(parts, of_blocks)
    costs = tuple(
        SegmentCost(
            *times[index],
            boundary_bytes=segment.boundary_bytes,
            saved_bytes=saved[index],
            parameter_bytes=parameter_bytes(state[index]),
            flops=prices[part.block.key][0].flops,
            weight_saved_bytes=weight_saved[index],
            trained_bytes=parameter_bytes(state[index], trained=True),
            buffer_bytes=buffer_bytes(state[index]),
            offloaded_bytes=away[index],
            transient_bytes=transient[index],
            added_bytes=added[index],
            optimizer_bytes=training.bytes_of(captured, state[index]),
        )
        for index, (segment, part) in enumerate(zip(chain.segments, parts.segments, strict=True))
    )
    return PricedModel(chain, costs, method, BALANCES[name], tuple(uncounted), crossing, parts, training)


def _price(block: Block, hardware: Hardware, products: str) -> tuple[GraphPrice, GraphPrice, GraphPrice]:
    """Return the prices of F, I and W. If the backward cannot be traced, I and W each cost as much as F, as they do in
    the backward of a product of matrices.
    """
    if block.derivative is None:
        inputs = [node.meta["val"] for node in (*block.subgraph.inputs, *block.subgraph.state)]
        alone = price_graph(trace_aten(fx_graph(block.subgraph), inputs), hardware, products=products)
        return (alone, alone, alone) if block.has_input_grad else (alone, GraphPrice(), alone + alone)
    forward, of_inputs, of_weights = (
        GraphPrice() if graph is None else price_graph(graph, hardware, products=products) for graph in block.graphs
    )
    return forward, of_inputs, of_weights


def _counted(graphs: Sequence[GraphPrice], name: str, hardware: Hardware) -> Times:
    forward, of_inputs, of_weights = (float(graph.flops) if name == "flops" else graph.seconds for graph in graphs)
    times = forward, of_inputs, of_weights
    return hardware.measured_ratio.corrected_times(times) if name in (AUTO, "time") else times


def _triple(weight: float) -> Times:
    return weight, weight, weight


def _numel(state: Iterable[StateEntry]) -> int:
    return sum(entry.numel for entry in state if entry.kind == "parameter")


def _warn(blocks: Iterable[Block], uncounted: Sequence[str]) -> None:
    if uncounted:
        warnings.warn(
            f"No formula counts the work of {', '.join(uncounted)}: only the bytes that they move are priced. "
            f"{argument('balance', 'measured')} times them, "
            "torch.utils.flop_counter.register_flop_formula adds a formula.",
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


# ---- mixed price -----------------------------------------------------------------------------------------------------
# A model of which some layers recompute otherwise than others, from prices of the whole model with each choice.


Choice = TypeVar("Choice", bound=Hashable)


def mix(models: Mapping[Choice, PricedModel], choices: Sequence[Choice]) -> PricedModel:
    """Return the price of a model whose segments have each their choice, without tracing anything again.

    Args:
        models: the prices of one model with each choice, cut at the same places.
        choices: one for each segment; the segments of a layer have one in common.
    """
    first = models[choices[0]]
    segments = tuple(models[choice].parts.segments[index] for index, choice in enumerate(choices))
    layers = tuple(
        models[choices[part.segments.start]].parts.layers[number] for number, part in enumerate(first.parts.layers)
    )
    runs = tuple(
        models[choices[part.segments.start]].parts.runs[number]
        for number, part in enumerate(first.parts.runs)
        if len({choices[index] for index in part.segments}) == 1  # else its layers are computed one by one
    )
    parts = SegmentGroups(first.chain, segments, layers, runs)
    every = range(len(segments))
    saved, weight_saved, away = (count(parts, every) for count in (saved_bytes, weight_saved_bytes, offloaded_bytes))
    transient = segment_transient_bytes(parts)
    costs = tuple(
        replace(
            models[choice].costs[index],
            saved_bytes=saved[index],
            weight_saved_bytes=weight_saved[index],
            offloaded_bytes=away[index],
            transient_bytes=transient[index],
        )
        for index, choice in enumerate(choices)
    )
    crossing = tuple(models[choices[value.maker]].crossing[number] for number, value in enumerate(first.crossing))
    return replace(first, costs=costs, crossing=crossing, parts=parts)
