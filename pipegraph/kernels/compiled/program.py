"""A graph as a program: calls of blocks, and between them compiled runs of everything else.

graph ─▶ level by level: glue, then the calls of blocks that need no later glue ─▶ instructions over slots

A value leaves its slot with the last instruction that reads it, so that a saved tensor lives no longer than needed.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.graphs.block_operation import OPERATION, GradientMask, KernelGraph, block_of
from pipegraph.kernels.graphs.joint_graph import constant_of
from pipegraph.kernels.internals import Run


@dataclass(slots=True, weakref_slot=True, eq=False)
class CompiledGraph:
    """A graph to compile, or compiled."""

    module: fx.GraphModule
    run: Run | None = None


@dataclass(frozen=True, slots=True)
class Instruction:
    """Run `code` on the values of `reads`, of which `drops` are not read again, and put the results into `writes`."""

    code: CompiledGraph | Program
    reads: tuple[int, ...]
    drops: tuple[int, ...]
    writes: tuple[int, ...]


class Compiler:
    """Makes programs of graphs, every distinct graph and block once. `compile` makes runs of graphs, all at once."""

    def __init__(self, compile: Callable[[Sequence[fx.GraphModule]], Sequence[Run]]) -> None:
        self._compile = compile
        self._kernels: weakref.WeakValueDictionary[Any, CompiledGraph] = weakref.WeakValueDictionary()

    def programs(self, derivative: DividedFunction, wanted: Sequence[tuple[str, GradientMask]]) -> list[Program]:
        """Those of F, I, W and B of a block that are wanted, ready to run."""
        found = [self._program(derivative, kind, mask) for kind, mask in wanted]
        kernels = {id(kernel): kernel for program in found for kernel in program.kernels() if kernel.run is None}
        runs = self._compile([kernel.module for kernel in kernels.values()])
        for kernel, run in zip(kernels.values(), runs, strict=True):
            kernel.run = run
        return found

    def _program(self, derivative: DividedFunction, kind: str, mask: GradientMask) -> Program:
        key = self, kind, mask
        if key not in derivative.programs:
            derivative.programs[key] = _Assembly(self, derivative.graph(kind, mask)).program()
        program: Program = derivative.programs[key]
        return program

    def block(self, node: fx.Node) -> Program:
        """What a node of OPERATION calls."""
        _, _, kind, mask, _ = node.args
        return self._program(cast("DividedFunction", block_of(node)), str(kind), tuple(mask))  # type: ignore[arg-type]

    def kernel(self, module: fx.GraphModule) -> CompiledGraph:
        """The kernel of a graph; equal graphs have one."""
        return self._kernels.setdefault(_text(module), CompiledGraph(module))


@dataclass(frozen=True)
class Program:
    """Instructions over slots: first the given inputs, then `constants`, then `slots` more, of which the last is never
    read. A constant is read at each run, as whoever holds it may write to it."""

    instructions: tuple[Instruction, ...]
    constants: tuple[Tensor, ...]
    slots: int
    outputs: tuple[int, ...]

    def __call__(self, given: list[Tensor]) -> list[Tensor]:
        """Run. Empties `given`."""
        slots: list[Any] = [*given, *self.constants, *[None] * self.slots]
        given.clear()
        for instruction in self.instructions:
            values = [slots[slot] for slot in instruction.reads]
            for slot in instruction.drops:
                slots[slot] = None
            code = instruction.code
            results = code(values) if isinstance(code, Program) else code.run(values)  # type: ignore[misc]
            for slot, result in zip(instruction.writes, results, strict=True):
                slots[slot] = result
            slots[-1] = result = None
        return [slots[slot] for slot in self.outputs]

    def kernels(self) -> Iterator[CompiledGraph]:
        """All kernels, those of blocks included."""
        for instruction in self.instructions:
            if isinstance(instruction.code, Program):
                yield from instruction.code.kernels()
            else:
                yield instruction.code


@dataclass
class _Assembly:
    """A part on its way to a program."""

    compiler: Compiler
    part: KernelGraph
    steps: list[tuple[CompiledGraph | Program, list[fx.Node], list[fx.Node | None]]] = field(default_factory=list)

    def program(self) -> Program:
        graph = _with_whole_backwards(self.part.module)
        (end,) = graph.find_nodes(op="output")
        outputs: list[fx.Node] = list(end.args[0])
        inputs = graph.find_nodes(op="placeholder")
        constants = list(filter(self._is_constant, graph.nodes))
        for glue, calls in _levels(graph):
            self._add_glue(glue, outputs)
            for node in calls:
                self._add_call(node)
        nodes = [*inputs, *constants, *(node for _, _, writes in self.steps for node in writes if node is not None)]
        slots: dict[fx.Node | None, int] = {node: index for index, node in enumerate(nodes)}
        slots[None] = len(slots)  # for what nothing reads
        return Program(
            instructions=tuple(self._instructions(slots, set(outputs))),
            constants=tuple(constant_of(self.part.module, node) for node in constants),
            slots=len(slots) - len(inputs) - len(constants),
            outputs=tuple(slots[node] for node in outputs),
        )

    def _add_glue(self, glue: list[fx.Node], outputs: Sequence[fx.Node]) -> None:
        inside = set(glue)
        read = (each for node in glue for each in node.all_input_nodes)
        reads = list(
            dict.fromkeys(
                node for node in read if node not in inside and (node.op != "get_attr" or self._is_constant(node))
            )
        )
        writes: list[fx.Node | None] = [
            node for node in glue if node in outputs or any(user not in inside for user in node.users)
        ]
        if not writes:
            return
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in reads:
            values[node] = graph.placeholder(f"input_{len(values)}")
            values[node].meta = node.meta
        for node in glue:
            for constant in node.all_input_nodes:
                if constant.op == "get_attr" and constant not in values:
                    values[constant] = graph.node_copy(constant)
            values[node] = graph.node_copy(node, values.__getitem__)
        graph.output(tuple(values[node] for node in writes if node is not None))
        self.steps.append((self.compiler.kernel(fx.GraphModule(self.part.module, graph)), reads, writes))

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether it is a tensor that someone holds. One that was made while tracing is copied first."""
        fresh = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        return isinstance(constant_of(self.part.module, node), Tensor) and not fresh

    def _add_call(self, node: fx.Node) -> None:
        reads: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        program = self.compiler.block(node)
        items = {user.args[1]: user for user in node.users}
        writes = [items.get(index) for index in range(len(program.outputs))]
        self.steps.append((program, reads, writes))

    def _instructions(self, slots: dict[fx.Node | None, int], kept: set[fx.Node]) -> Iterator[Instruction]:
        last: dict[fx.Node, int] = {}
        for index, (_, reads, _) in enumerate(self.steps):
            last |= dict.fromkeys(reads, index)
        for index, (code, reads, writes) in enumerate(self.steps):
            drops = {node for node in reads if last[node] == index and node not in kept}
            yield Instruction(
                code,
                tuple(slots[node] for node in reads),
                tuple(sorted(slots[node] for node in drops)),
                tuple(slots[node] for node in writes),
            )


def _levels(graph: fx.Graph) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """(glue, calls of blocks) in the order in which they can run, with as few runs of glue as calls need."""
    level: dict[fx.Node, int] = {}
    levels: list[tuple[list[fx.Node], list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op in ("output", "get_attr"):
            continue
        level[node] = max((level.get(each, 0) for each in node.all_input_nodes), default=0)
        if _is_item(node):
            level[node] += 1
        elif node.op == "call_function":
            while len(levels) <= level[node]:
                levels.append(([], []))
            levels[level[node]][node.target is OPERATION].append(node)
    return levels


def _is_item(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.args[0].target is OPERATION  # type: ignore[union-attr]


def _with_whole_backwards(module: fx.GraphModule) -> fx.Graph:
    """I and W of the same call, both here, become its B: one kernel, which computes what both need once."""
    graph = module.graph
    calls: dict[tuple[Any, Any], dict[Any, fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is OPERATION:
            calls.setdefault((node.args[1], node.args[4]), {})[node.args[2]] = node
    pairs = [(found["I"], found["W"]) for found in calls.values() if "I" in found and "W" in found]
    if not pairs:
        return graph
    for first, second in pairs:
        _join(graph, first, second)
    graph.eliminate_dead_code()
    return graph


def _join(graph: fx.Graph, first: fx.Node, second: fx.Node) -> None:
    block, mask = block_of(first), tuple(first.args[3])  # type: ignore[arg-type]
    parts = [block.graph(kind, mask) for kind in "IW"]
    given: dict[str, Any] = {}
    for node, part in ((second, parts[1]), (first, parts[0])):
        given |= zip(part.inputs, node.args[0], strict=True)  # type: ignore[arg-type]
    whole = block.graph("B", mask)
    tensors = [given[name] for name in whole.inputs]
    with graph.inserting_before(first):
        joined = graph.call_function(OPERATION, (tensors, first.args[1], "B", first.args[3], first.args[4]))
        items = {
            name: graph.call_function(operator.getitem, (joined, index)) for index, name in enumerate(whole.outputs)
        }
    for node, part in ((first, parts[0]), (second, parts[1])):
        for item in list(node.users):
            name = part.outputs[item.args[1]]  # type: ignore[index]
            if name in items:
                items[name].meta = item.meta
                item.replace_all_uses_with(items[name])


def _text(module: fx.GraphModule) -> Any:
    """A graph as something to compare: operations, their arguments, and the shapes that go in."""
    number: dict[fx.Node, int] = {}
    lines: list[Any] = []
    for node in module.graph.nodes:
        number[node] = len(number)
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda each: f"%{number[each]}")
        if node.op == "placeholder":
            value = node.meta["val"]
            lines.append((tuple(value.shape), value.stride(), value.dtype, value.device))
        elif node.op == "get_attr":
            lines.append(("constant", id(getattr(module, str(node.target)))))
        else:
            lines.append((str(node.target), repr(arguments)))
    return tuple(lines)
