"""Attribute the prices of distinct blocks to segments, so that segments add up to layers and stages."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import fx

from pipegraph.cost import TransientBytes
from pipegraph.cost.segments.distinct_blocks import SavedMemory, SegmentGroup, SegmentGroups, memory_of
from pipegraph.cost.stage_cost import parameter_bytes
from pipegraph.graph.captured import Captured
from pipegraph.schedule import Kind

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


# ---- transient bytes -------------------------------------------------------------------------------------------------
# What stages need while F, I, W and B run, from the peaks of their blocks in the order in which these run.


_SharedValue = tuple[bool, fx.Node]
"""A value, or its gradient, which is True."""


def stage_transient_bytes(parts: SegmentGroups, stage_segments: range, has_input_grad: bool) -> TransientBytes:
    """Return what the segments ``stage_segments`` need as one stage while it runs.

    If no gradient is wanted of its inputs, I has nothing to do and W does all of the backward.
    """
    stage = _Stage(parts, stage_segments)
    forward, backward = stage.forward(), stage.backward(Kind.B)
    if not has_input_grad:
        return TransientBytes(forward, 0, backward, backward)
    return TransientBytes(forward, stage.backward(Kind.I), stage.backward(Kind.W), backward)


def segment_transient_bytes(parts: SegmentGroups) -> list[TransientBytes]:
    """Return for each segment what the largest part of the chain needs that it is in."""
    of_blocks: dict[str, TransientBytes] = {}
    transient_bytes: list[TransientBytes] = []
    for part in parts.largest(range(len(parts.segments))):
        if part.block.key not in of_blocks:
            of_blocks[part.block.key] = stage_transient_bytes(parts, part.segments, part.block.has_input_grad)
        transient_bytes += [of_blocks[part.block.key]] * len(part.segments)
    return transient_bytes


class _Memory:
    """What is held between the blocks of a stage: values by who made them, each once, and everything else."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: Counter[_SharedValue] = Counter()

    def hold(self, values: Iterable[_SharedValue]) -> None:
        for value in values:
            self.bytes += 0 if self._holders[value] else _size(value[1])
            self._holders[value] += 1

    def release(self, values: Iterable[_SharedValue]) -> None:
        for value in values:
            if self._holders[value]:
                self._holders[value] -= 1
                self.bytes -= 0 if self._holders[value] else _size(value[1])


class _Stage:
    def __init__(self, parts: SegmentGroups, segments: range) -> None:
        self._pieces = parts.largest(segments)
        self._last_reader = parts.last_reader
        self._captured = parts.chain.captured
        self._start = segments.start
        outputs = {node for part in self._pieces for node in part.subgraph.outputs}
        self._received = {node for part in self._pieces for node in part.subgraph.inputs if node not in outputs}
        self._saved = [_values(part, part.block.saved) for part in self._pieces]
        self._other_bytes = [part.block.saved.bytes for part in self._pieces]
        self._read_by_w = [_values(part, part.block.weight_saved) for part in self._pieces]
        self._others_of_w = [part.block.weight_saved.bytes for part in self._pieces]
        self._gradients = [
            _gradient_bytes(self._captured, [part.subgraph.state[index] for index in part.block.added])
            for part in self._pieces
        ]

    def forward(self) -> int:
        """What F needs beyond what it saves."""
        saved = {value for values in self._saved for value in values}
        memory = _Memory()
        memory.hold(value for value in saved if value[1] in self._received)
        peak = 0
        for index, part in enumerate(self._pieces):
            peak = max(peak, memory.bytes + part.block.peaks.forward)
            memory.bytes += self._other_bytes[index]
            outputs = dict.fromkeys((False, node) for node in part.subgraph.outputs)
            memory.hold(
                value
                for value in outputs
                if value in saved or self._last_reader.get(value[1], self._end) >= part.segments.stop
            )
            read = ((False, node) for node in part.subgraph.inputs if node not in self._received)
            memory.release(
                value for value in read if value not in saved and self._last_reader[value[1]] < part.segments.stop
            )
        return max(peak, memory.bytes) - self._saved_bytes(self._saved, self._other_bytes)

    def backward(self, kind: Kind) -> int:
        """What I, W or B needs beyond what it finds, or leaves with the gradients of parameters."""
        saved, other_bytes = (
            (self._read_by_w, self._others_of_w) if kind is Kind.W else (self._saved, self._other_bytes)
        )
        memory = _Memory()
        for values in saved:
            memory.hold(values)
        memory.bytes += sum(other_bytes)
        peak = initial_bytes = memory.bytes
        for index in reversed(range(len(self._pieces))):
            part = self._pieces[index]
            is_last = index == len(self._pieces) - 1
            peak = max(peak, memory.bytes + part.block.peaks.peak_of(kind, holds_gradients=is_last))
            if kind is Kind.I:
                memory.bytes += self._others_of_w[index]
                memory.hold(self._read_by_w[index])
            else:
                memory.bytes += self._gradients[index]
            memory.bytes -= other_bytes[index]
            memory.release(saved[index])
            if kind is not Kind.W:
                input_gradients = zip(part.subgraph.inputs, part.subgraph.input_gradients, strict=True)
                memory.hold({(True, node) for node, is_wanted in input_gradients if is_wanted})
                memory.release({(True, node) for node in part.subgraph.outputs if not is_last})
        peak = max(peak, memory.bytes)
        final_bytes = self._saved_bytes(self._read_by_w, self._others_of_w) if kind is Kind.I else sum(self._gradients)
        return peak - max(initial_bytes, final_bytes)

    @property
    def _end(self) -> int:
        return self._pieces[-1].segments.stop

    @staticmethod
    def _saved_bytes(values: Sequence[Sequence[_SharedValue]], other_bytes: Sequence[int]) -> int:
        distinct = {value for part_values in values for value in part_values}
        return sum(other_bytes) + sum(_size(node) for _, node in distinct)


def _values(part: SegmentGroup, memory: SavedMemory) -> list[_SharedValue]:
    """The values that other parts may hold too, without the model's inputs, which the caller holds."""
    inputs, outputs = part.subgraph.inputs, part.subgraph.outputs
    values = [(False, inputs[index]) for index in memory.inputs] + [(False, outputs[index]) for index in memory.outputs]
    values += [(True, inputs[index]) for index in memory.input_gradients]
    values += [(True, outputs[index]) for index in memory.output_gradients]
    return [value for value in dict.fromkeys(values) if value[1].op == "call_function"]


def _gradient_bytes(captured: Captured, state: Iterable[fx.Node]) -> int:
    entries = (captured.state[str(node.target)] for node in state)
    return sum(
        entry.numel * entry.dtype.itemsize for entry in entries if entry.kind == "parameter" and entry.requires_grad
    )


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return memory_of(value) if isinstance(value, torch.Tensor) else 0
