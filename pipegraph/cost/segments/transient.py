"""What stages need while F, I, W and B run, from the peaks of their blocks in the order in which these run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from pipegraph.cost import TransientBytes
from pipegraph.cost.segments.distinct_blocks import SegmentGroup, SegmentGroups
from pipegraph.cost.segments.saved_memory import SavedMemory, memory_of
from pipegraph.graph.captured import Captured
from pipegraph.schedule import Kind

_Held = tuple[bool, fx.Node]
"""A value, or its gradient, which is True."""


def stage_transient_bytes(parts: SegmentGroups, held: range, has_input_grad: bool) -> TransientBytes:
    """Return what the segments ``held`` need as one stage while it runs.

    If no gradient is wanted of its inputs, I has nothing to do and W does all of the backward.
    """
    stage = _Stage(parts, held)
    forward, backward = stage.forward(), stage.backward(Kind.B)
    if not has_input_grad:
        return TransientBytes(forward, 0, backward, backward)
    return TransientBytes(forward, stage.backward(Kind.I), stage.backward(Kind.W), backward)


def segment_transient_bytes(parts: SegmentGroups) -> list[TransientBytes]:
    """Return for each segment what the largest part of the chain needs that it is in."""
    of_blocks: dict[str, TransientBytes] = {}
    found: list[TransientBytes] = []
    for part in parts.largest(range(len(parts.segments))):
        if part.block.key not in of_blocks:
            of_blocks[part.block.key] = stage_transient_bytes(parts, part.segments, part.block.has_input_grad)
        found += [of_blocks[part.block.key]] * len(part.segments)
    return found


class _Memory:
    """What is held between the blocks of a stage: values by who made them, each once, and everything else."""

    def __init__(self) -> None:
        self.bytes = 0
        self._holders: Counter[_Held] = Counter()

    def hold(self, values: Iterable[_Held]) -> None:
        for each in values:
            self.bytes += 0 if self._holders[each] else _size(each[1])
            self._holders[each] += 1

    def release(self, values: Iterable[_Held]) -> None:
        for each in values:
            if self._holders[each]:
                self._holders[each] -= 1
                self.bytes -= 0 if self._holders[each] else _size(each[1])


class _Stage:
    def __init__(self, parts: SegmentGroups, held: range) -> None:
        self._pieces = parts.largest(held)
        self._last_reader = parts.last_reader
        self._captured = parts.chain.captured
        self._start = held.start
        made = {node for part in self._pieces for node in part.subgraph.outputs}
        self._received = {node for part in self._pieces for node in part.subgraph.inputs if node not in made}
        self._saved = [_values(part, part.block.saved) for part in self._pieces]
        self._others = [part.block.saved.bytes for part in self._pieces]
        self._read_by_w = [_values(part, part.block.weight_saved) for part in self._pieces]
        self._others_of_w = [part.block.weight_saved.bytes for part in self._pieces]
        self._gradients = [
            _gradient_bytes(self._captured, [part.subgraph.state[index] for index in part.block.added])
            for part in self._pieces
        ]

    def forward(self) -> int:
        """What F needs beyond what it saves."""
        saved = {each for values in self._saved for each in values}
        memory = _Memory()
        memory.hold(each for each in saved if each[1] in self._received)
        peak = 0
        for index, part in enumerate(self._pieces):
            peak = max(peak, memory.bytes + part.block.peaks.forward)
            memory.bytes += self._others[index]
            outputs = dict.fromkeys((False, node) for node in part.subgraph.outputs)
            memory.hold(
                each
                for each in outputs
                if each in saved or self._last_reader.get(each[1], self._end) >= part.segments.stop
            )
            read = ((False, node) for node in part.subgraph.inputs if node not in self._received)
            memory.release(
                each for each in read if each not in saved and self._last_reader[each[1]] < part.segments.stop
            )
        return max(peak, memory.bytes) - self._kept(self._saved, self._others)

    def backward(self, kind: Kind) -> int:
        """What I, W or B needs beyond what it finds, or leaves with the gradients of parameters."""
        kept, others = (self._read_by_w, self._others_of_w) if kind is Kind.W else (self._saved, self._others)
        memory = _Memory()
        for values in kept:
            memory.hold(values)
        memory.bytes += sum(others)
        peak = before = memory.bytes
        for index in reversed(range(len(self._pieces))):
            part = self._pieces[index]
            is_last = index == len(self._pieces) - 1
            peak = max(peak, memory.bytes + part.block.peaks.of(kind, holds_gradients=is_last))
            if kind is Kind.I:
                memory.bytes += self._others_of_w[index]
                memory.hold(self._read_by_w[index])
            else:
                memory.bytes += self._gradients[index]
            memory.bytes -= others[index]
            memory.release(kept[index])
            if kind is not Kind.W:
                wanted = zip(part.subgraph.inputs, part.subgraph.input_gradients, strict=True)
                memory.hold({(True, node) for node, is_wanted in wanted if is_wanted})
                memory.release({(True, node) for node in part.subgraph.outputs if not is_last})
        peak = max(peak, memory.bytes)
        after = self._kept(self._read_by_w, self._others_of_w) if kind is Kind.I else sum(self._gradients)
        return peak - max(before, after)

    @property
    def _end(self) -> int:
        return self._pieces[-1].segments.stop

    @staticmethod
    def _kept(values: Sequence[Sequence[_Held]], others: Sequence[int]) -> int:
        distinct = {each for one in values for each in one}
        return sum(others) + sum(_size(node) for _, node in distinct)


def _values(part: SegmentGroup, memory: SavedMemory) -> list[_Held]:
    """The values that other parts may hold too, without the model's inputs, which the caller holds."""
    inputs, outputs = part.subgraph.inputs, part.subgraph.outputs
    found = [(False, inputs[index]) for index in memory.inputs] + [(False, outputs[index]) for index in memory.outputs]
    found += [(True, inputs[index]) for index in memory.input_gradients]
    found += [(True, outputs[index]) for index in memory.output_gradients]
    return [each for each in dict.fromkeys(found) if each[1].op == "call_function"]


def _gradient_bytes(captured: Captured, state: Iterable[fx.Node]) -> int:
    entries = (captured.state[str(node.target)] for node in state)
    return sum(
        entry.numel * entry.dtype.itemsize for entry in entries if entry.kind == "parameter" and entry.requires_grad
    )


def _size(node: fx.Node) -> int:
    value = node.meta["val"]
    return memory_of(value) if isinstance(value, torch.Tensor) else 0
