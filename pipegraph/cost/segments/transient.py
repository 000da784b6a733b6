"""What stages need while F, I, W and B run, from the peaks of their blocks in the order in which these run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from pipegraph.cost import TransientBytes
from pipegraph.cost.segments.distinct_blocks import SavedMemory, SegmentGroup, SegmentGroups, memory_of
from pipegraph.graph.captured import Captured
from pipegraph.schedule import Kind

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
