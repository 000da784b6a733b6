"""Attribute the prices of distinct blocks to segments, so that segments add up to layers and stages."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import fx

from pipegraph.cost.segments.distinct_blocks import SavedMemory, SegmentGroup, SegmentGroups, memory_of
from pipegraph.cost.stage_cost import parameter_bytes

Times = tuple[float, float, float]
"""F, I and W."""


@dataclass(frozen=True)
class CrossingValue:
    """A value that one segment makes and another one is the last to read, and the cost of handing it over.

    A piece that holds both segments saves that cost: it never writes the value in full, or keeps its layout.
    ``of_maker`` and ``of_reader`` are what each of the two saves.
    """

    maker: int
    reader: int
    bytes: int
    of_maker: Times = (0.0, 0.0, 0.0)
    of_reader: Times = (0.0, 0.0, 0.0)

    def at_ends(self, stage: range) -> Times:
        """Return the time of a stage beyond the sum of its segments, which it has because it holds one of the two."""
        maker, reader = self.maker in stage, self.reader in stage
        return (0.0, 0.0, 0.0) if maker == reader else self.of_maker if maker else self.of_reader


def segment_times(parts: SegmentGroups, blocks: Mapping[str, Times]) -> tuple[list[Times], tuple[CrossingValue, ...]]:
    """Return the times of segments as parts of the largest priced piece, and of the values that cross between them.

    Two pieces take longer than one that holds both. The difference between the times of a larger piece and of its parts
    is shared among the values that cross inside, by their size. Each share is taken off the two segments that make and
    read the value, so that the segments of a piece add up to the time of the piece. Segments of which none reads
    another one keep the times that they have alone.

    Args:
        parts: the chain in three grains.
        blocks: the times of blocks, by key.
    """
    times = [blocks[part.block.key] for part in parts.segments]
    layer_of = {index: layer.start for layer in parts.chain.layers for index in layer}
    crossing = _crossing(parts)
    for part in (*parts.layers, *parts.runs):
        inside = [
            index
            for index, crossing_value in enumerate(crossing)
            if crossing_value.maker in part.segments
            and crossing_value.reader in part.segments
            and (layer_of[crossing_value.maker] != layer_of[crossing_value.reader]) == (part in parts.runs)
        ]
        if not inside:
            continue  # none of its segments reads another one, so that none has a cost of handing over
        ends = {end for index in inside for end in (crossing[index].maker, crossing[index].reader)}
        lost = _lost(blocks[part.block.key], [times[index] for index in part.segments], [times[end] for end in ends])
        size = sum(max(1, crossing[index].bytes) for index in inside)
        for index in inside:
            value = crossing[index]
            share = _times(of_all * max(1, value.bytes) / size for of_all in lost)
            of_maker, of_reader = _shared(share, times[value.maker], times[value.reader])
            times[value.maker] = _times(map(operator.sub, times[value.maker], of_maker))
            times[value.reader] = _times(map(operator.sub, times[value.reader], of_reader))
            crossing[index] = replace(value, of_maker=of_maker, of_reader=of_reader)
    return times, tuple(crossing)


def _shared(lost: Times, maker: Times, reader: Times) -> tuple[Times, Times]:
    """Divide what is lost between two segments among them, in proportion to their times and never more than these."""
    least = [min(loss, first + second) for loss, first, second in zip(lost, maker, reader, strict=True)]
    parts = [first / (first + second) if first + second else 0.0 for first, second in zip(maker, reader, strict=True)]
    of_maker = _times(map(operator.mul, least, parts))
    return of_maker, _times(map(operator.sub, least, of_maker))


def _crossing(parts: SegmentGroups) -> list[CrossingValue]:
    reader = {node: index for index, part in enumerate(parts.segments) for node in part.subgraph.inputs}
    return [
        CrossingValue(index, reader[node], memory_of(node.meta["val"]))
        for index, part in enumerate(parts.segments)
        for node in part.subgraph.outputs
        if reader.get(node, index) > index
    ]


def _lost(piece: Times, parts: Iterable[Times], ends: Iterable[Times]) -> Times:
    """Return how much longer the parts of a piece take than the piece.

    If nothing before the piece needs a gradient, its W is the whole backward; its loss is then divided in the ratio of
    I and W among ``ends``, the parts that make or read what crosses.
    """
    sums = _times(map(sum, zip(*parts, strict=True)))
    forward, of_inputs, of_weights = (total - least for total, least in zip(sums, piece, strict=True))
    if piece[1]:
        return forward, of_inputs, of_weights
    backward = of_inputs + of_weights
    _, inputs, weights = map(sum, zip(*ends, strict=True))
    part = weights / (inputs + weights) if inputs + weights else 0.0
    return forward, backward * (1 - part), backward * part


def _times(seconds: Iterable[float]) -> Times:
    forward, of_inputs, of_weights = seconds
    return forward, of_inputs, of_weights


def saved_bytes(parts: SegmentGroups, stage: range) -> list[int]:
    """Return the bytes that each segment of the stage ``stage`` keeps from F to the backward.

    A value that two of them keep counts for the first one. The model's inputs do not count: the caller holds them. What
    one part of a layer hands to another one, if the stage computes both again as one region, is not kept, and what it
    is computed from is.
    """
    inner = _inside_regions(parts, stage)

    def saved_memory(part: SegmentGroup) -> SavedMemory:
        saved, again = part.block.saved, not inner.isdisjoint(part.subgraph.outputs)
        inputs = enumerate(part.subgraph.inputs)
        positions = tuple(index for index, node in inputs if node not in inner and (again or index in saved.inputs))
        return replace(saved, inputs=positions)

    return _shares(parts, stage, saved_memory)


def _inside_regions(parts: SegmentGroups, stage: range) -> set[fx.Node]:
    """Return the values that segments of a layer hand to each other, of a layer that ``stage`` has in part, all of it
    one region: pieces that are priced by themselves each keep what goes into them."""
    values: set[fx.Node] = set()
    for layer in parts.chain.layers:
        segments = [parts.segments[index] for index in layer if index in stage]
        if 1 < len(segments) < len(layer) and segments[0].region and len({part.region for part in segments}) == 1:
            outputs = {node for part in segments for node in part.subgraph.outputs}
            values |= outputs.intersection(node for part in segments for node in part.subgraph.inputs)
    return values


def weight_saved_bytes(parts: SegmentGroups, stage: range) -> list[int]:
    """Return the bytes that each segment of the stage ``stage`` keeps from the end of I to the end of W."""
    return _shares(parts, stage, lambda part: part.block.weight_saved)


def divided_bytes(
    parts: SegmentGroups, stage: range, divided: Collection[fx.Node], after_input_grad: bool = False
) -> list[int]:
    """Return the bytes of `saved_bytes`, or of `weight_saved_bytes`, that operations in ``divided`` make."""

    def saved_memory(part: SegmentGroup) -> SavedMemory:
        saved = part.block.weight_saved if after_input_grad else part.block.saved
        return saved.at_positions({position for position, node in enumerate(part.subgraph.nodes) if node in divided})

    return _shares(parts, stage, saved_memory, divided)


def offloaded_bytes(parts: SegmentGroups, stage: range) -> list[int]:
    """Return the bytes of `saved_bytes` that wait for the backward in CPU memory.

    What comes into the stage stays on the device.
    """
    segments = [parts.segments[index] for index in stage]
    if not any(part.block.offloads for part in segments):
        return [0] * len(stage)
    away = {part.subgraph.outputs[index] for part in segments for index in part.block.offloaded_outputs}
    return _shares(parts, stage, lambda part: replace(part.block.saved, apart=part.block.offloaded.apart), away)


def added_bytes(parts: SegmentGroups, stage: range) -> list[int]:
    """Return the bytes of each segment's parameters whose gradients are made before they are added to others.

    Gradients of a parameter that several segments of the stage read are among them. It counts for the first one.
    """
    state = parts.chain.captured.state
    read = [[state[str(node.target)] for node in parts.segments[index].subgraph.state] for index in stage]
    uses = Counter(entry.fqn for entries in read for entry in entries)
    counted_fqns: set[str] = set()
    sizes: list[int] = []
    for index, entries in zip(stage, read, strict=True):
        apart = parts.segments[index].block.added
        new = [
            entry
            for position, entry in enumerate(entries)
            if entry.fqn not in counted_fqns and (position in apart or uses[entry.fqn] > 1)
        ]
        counted_fqns |= {entry.fqn for entry in entries}
        sizes.append(parameter_bytes(new, trained=True))
    return sizes


def _shares(
    parts: SegmentGroups,
    stage: range,
    kept_by: Callable[[SegmentGroup], SavedMemory],
    counted: Collection[fx.Node] | None = None,
) -> list[int]:
    """``counted`` are the crossing values that count; by default all."""
    summed: set[tuple[bool, fx.Node]] = set()
    shares: list[int] = []
    for part in parts.largest(stage):
        total = _new_bytes(part, kept_by(part), summed, counted)
        segments = (parts.segments[index] for index in part.segments)
        alone = [_new_bytes(segment, kept_by(segment), set(), counted) for segment in segments]
        # A piece keeps less than its segments would by themselves; each gets its share.
        ends = [total * done // max(sum(alone), 1) for done in accumulate(alone, initial=0)]
        ends[-1] = total
        shares += [stop - start for start, stop in pairwise(ends)]
    return shares


def _new_bytes(
    part: SegmentGroup,
    saved: SavedMemory,
    summed: set[tuple[bool, fx.Node]],
    counted: Collection[fx.Node] | None = None,
) -> int:
    """Bytes that a part keeps, without those of values and gradients already ``summed``, to which its own are added."""
    inputs, outputs = part.subgraph.inputs, part.subgraph.outputs
    pairs = {(False, inputs[index]) for index in saved.inputs} | {(False, outputs[index]) for index in saved.outputs}
    pairs |= {(True, inputs[index]) for index in saved.input_gradients}
    pairs |= {(True, outputs[index]) for index in saved.output_gradients}
    new = {pair for pair in pairs if pair[1].op == "call_function"} - summed
    summed |= new
    values = [node.meta["val"] for _, node in new if counted is None or node in counted]
    return saved.bytes + sum(memory_of(value) for value in values if isinstance(value, torch.Tensor))
