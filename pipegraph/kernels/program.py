"""A graph as a program: calls of blocks, products that add to gradients, and compiled graphs of everything between.

graph ─▶ level by level: compiled graphs, products, then the calls of blocks that need no later one
      ─▶ instructions over slots

A value leaves its slot with the last instruction that reads it, so a saved tensor lives no longer than needed. Sizes
have no slots: each instruction is given them all.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels.blocks.divided_function import DividedFunction
from pipegraph.kernels.gradient_products import NO_SUMS, GradientProduct, Sums, apart_from_graph, find_products
from pipegraph.kernels.graphs.block_operation import (
    OPERATION,
    GradientMask,
    KernelGraph,
    block_of,
    called_graph,
    is_random,
    size_values,
)
from pipegraph.kernels.graphs.joint_graph import constant_of
from pipegraph.kernels.symbolic_sizes import Numbers, SizeMap, SymbolicSizes, dimensions, is_size
from pipegraph.torch_private.tracing import Run, boxed

# ---- call levels -----------------------------------------------------------------------------------------------------
# The order in which a graph that calls blocks runs: in each level, first the nodes between calls, then the calls.


def levels_of(graph: fx.Graph) -> list[tuple[list[fx.Node], list[fx.Node]]]:
    """Return the levels of a graph in the order in which they can run, each (nodes between calls of blocks, calls).

    The number of levels is the smallest that the calls allow. A node that needs no call is in the level of its first
    reader: a value that a backward computes again takes no memory until then. Operations that draw from torch's
    generators run in the order of the graph, and so get the same numbers as in the model.
    """
    level: dict[fx.Node, int] = {}
    draw, draw_in_call = 0, 0  # the first levels in which the next random operation, or call of one, may run
    for node in graph.nodes:
        if node.op not in ("output", "get_attr") and not is_size(node):
            input_level = max((level.get(input_node, 0) for input_node in node.all_input_nodes), default=0)
            level[node] = input_level + _is_result_of_call(node)
            if is_random(node):
                is_call = node.target is OPERATION
                draw_in_call = level[node] = max(level[node], draw_in_call if is_call else draw)
                draw = level[node] + is_call  # calls run after the rest of their level
    next_draw = max(level.values(), default=0)
    for node in reversed(level):
        if level[node] == 0 and node.target is not OPERATION:
            level[node] = min((level.get(user, 0) for user in node.users), default=0)
            if is_random(node):
                level[node] = min(level[node], next_draw)
            items = (user for user in node.users if user.target is operator.getitem)
            level |= dict.fromkeys(items, level[node])  # they stay with the node that returns them
        if is_random(node):
            next_draw = level[node]
    levels: list[tuple[list[fx.Node], list[fx.Node]]] = [([], []) for _ in range(max(level.values(), default=0) + 1)]
    for node, number in level.items():
        if node.op == "call_function" and not _is_result_of_call(node):
            levels[number][node.target is OPERATION].append(node)
    return levels


def _is_result_of_call(node: fx.Node) -> bool:
    return node.target is operator.getitem and node.all_input_nodes[0].target is OPERATION


# ---- program ---------------------------------------------------------------------------------------------------------


class CompiledGraph:
    """A graph, and once it is compiled how it runs. Its placeholders are the sizes, then the tensors.

    Attributes:
        module: the graph.
        run: None until it is compiled.
    """

    def __init__(self, module: fx.GraphModule, sizes: SymbolicSizes) -> None:
        self.module = module
        self.run: Run | None = None
        self._sizes = sizes
        self._uncompiled: Run | None = None

    def __call__(self, numbers: Numbers, inputs: list[Tensor], sums: Sums = NO_SUMS) -> Sequence[Tensor]:
        """Run, with these sizes. Empties `inputs`, and adds to nothing."""
        run = self.run
        if numbers:
            inputs[:0] = numbers  # type: ignore[assignment]
            if not self._sizes.hold(numbers):
                run = self._as_it_is()
        assert run is not None
        return run(inputs)

    def _as_it_is(self) -> Run:
        """The graph uncompiled, which is right for all sizes that it was traced for.

        Compiling I or W may add a condition on sizes that microbatches in flight do not meet, after their F. In the
        next step their sizes have another variant.
        """
        if self._uncompiled is None:
            self._uncompiled = boxed(self.module)
        return self._uncompiled


def graph_key(module: fx.GraphModule, sizes: SymbolicSizes) -> object:
    """Return a key that is equal for equal graphs: operations, their arguments, the inputs' shapes, which constants.

    Graphs with symbols of different traces are never equal: other conditions may hold for their sizes.
    """
    number: dict[fx.Node, int] = {}
    lines: list[object] = [id(sizes.environment)]
    for node in module.graph.nodes:
        number[node] = len(number)
        if node.op == "placeholder" and is_size(node):
            lines.append("size")
        elif node.op == "placeholder":
            value = node.meta["val"]
            lines.append((dimensions(value.shape), dimensions(value.stride()), value.dtype, value.device))
        elif node.op == "get_attr":
            lines.append(("constant", id(constant_of(module, node))))
        else:
            arguments = fx.node.map_arg((node.args, dict(node.kwargs)), lambda argument: f"%{number[argument]}")
            lines.append((str(node.target), repr(arguments)))
    return tuple(lines)


@dataclass(frozen=True, slots=True)
class Instruction:
    """Run `code` on the slots `reads`, empty the slots `drops`, and put the results into the slots `writes`.

    `sizes` are those of a block, by those of the program.
    """

    code: CompiledGraph | GradientProduct | Program
    reads: tuple[int, ...]
    drops: tuple[int, ...]
    writes: tuple[int, ...]
    sizes: SizeMap | None = None


@dataclass(frozen=True)
class Program:
    """Instructions over slots.

    Attributes:
        instructions: in order.
        constants: tensors that others hold. They are read at each run, because their holder may write to them.
        slots: how many there are after those of the inputs and the constants. The last one is never read.
        outputs: their slots.
        addable: the slots of outputs that no instruction reads.
    """

    instructions: tuple[Instruction, ...]
    constants: tuple[Tensor, ...]
    slots: int
    outputs: tuple[int, ...]
    addable: frozenset[int]

    def __call__(self, numbers: Numbers, inputs: list[Tensor], sums: Sums = NO_SUMS) -> list[Tensor]:
        """Run, with these sizes. Empties `inputs`.

        An output that a product computes last is added to its tensor in `sums`, which is then what is returned.
        """
        into = {slot: tensor for position, tensor in sums.items() if (slot := self.outputs[position]) in self.addable}
        slots: list[Any] = [*inputs, *self.constants, *[None] * self.slots]
        inputs.clear()
        for instruction in self.instructions:
            values = [slots[slot] for slot in instruction.reads]
            for slot in instruction.drops:
                slots[slot] = None
            sizes = instruction.sizes
            added = {index: into[slot] for index, slot in enumerate(instruction.writes) if slot in into} if into else {}
            results: Sequence[Any] = instruction.code(numbers if sizes is None else sizes(numbers), values, added)
            for slot, result in zip(instruction.writes, results, strict=True):
                slots[slot] = result
            slots[-1] = result = None
            results = ()
        return [slots[slot] for slot in self.outputs]

    def compiled_graphs(self) -> Iterator[CompiledGraph]:
        """Yield all compiled graphs, those of blocks included."""
        for instruction in self.instructions:
            if isinstance(instruction.code, Program):
                yield from instruction.code.compiled_graphs()
            elif isinstance(instruction.code, CompiledGraph):
                yield instruction.code


class Compiler:
    """Makes programs of graphs, each distinct graph and block once. `compile` turns graphs into runs, all at once."""

    def __init__(self, compile: Callable[[Sequence[fx.GraphModule]], Sequence[Run]]) -> None:
        self._compile = compile
        self._compiled: weakref.WeakValueDictionary[Any, CompiledGraph] = weakref.WeakValueDictionary()

    def programs(self, divided: DividedFunction, requests: Sequence[tuple[str, GradientMask]]) -> list[Program]:
        """Return the programs of some of F, I, W and B, ready to run."""
        programs = [self.program(divided, kind, mask) for kind, mask in requests]
        every = [graph for program in programs for graph in program.compiled_graphs()]
        new = list(dict.fromkeys(graph for graph in every if graph.run is None))
        for graph, run in zip(new, self._compile([graph.module for graph in new]), strict=True):
            graph.run = run
        return programs

    def program(self, divided: Any, kind: str, mask: GradientMask) -> Program:
        """Return the program of a `DividedFunction`'s graph. It may have to be compiled."""
        key = self, kind, mask
        if key not in divided.programs:
            gradients = divided.weight_gradients(mask) if kind in "WB" else frozenset()
            divided.programs[key] = _ProgramBuilder(self, divided.graph(kind, mask), gradients).program()
        program: Program = divided.programs[key]
        return program

    def compiled_graph(self, module: fx.GraphModule, sizes: SymbolicSizes) -> CompiledGraph:
        """Return the one for all equal graphs. It may have to be compiled."""
        return self._compiled.setdefault(graph_key(module, sizes), CompiledGraph(module, sizes))


_Step = tuple[CompiledGraph | GradientProduct | Program, list[fx.Node], list[fx.Node | None], SizeMap | None]
"""Code, what it reads, what it writes, and the sizes of a block."""


@dataclass
class _ProgramBuilder:
    compiler: Compiler
    kernel_graph: KernelGraph
    gradients: Collection[str]
    """the names of those of weights"""
    steps: list[_Step] = field(default_factory=list)

    def program(self) -> Program:
        graph = _with_whole_backwards(self.kernel_graph.module)
        (end,) = graph.find_nodes(op="output")
        outputs: list[fx.Node] = list(end.args[0])
        inputs = graph.find_nodes(op="placeholder")[len(self.kernel_graph.sizes) :]
        constants = list(filter(self._is_constant, graph.nodes))
        last = {node for node, name in zip(outputs, self.kernel_graph.outputs, strict=True) if name in self.gradients}
        for between, calls in levels_of(graph):
            self._add_between(between, outputs, last)
            for node in calls:
                self._add_call(node)
        written = (node for _, _, writes, _ in self.steps for node in writes if node is not None)
        nodes = [*inputs, *constants, *written]
        slots: dict[fx.Node | None, int] = {node: index for index, node in enumerate(nodes)}
        slots[None] = len(slots)  # for what nothing reads
        read = {node for _, reads, _, _ in self.steps for node in reads}
        return Program(
            instructions=tuple(self._instructions(slots, set(outputs))),
            constants=tuple(constant_of(self.kernel_graph.module, node) for node in constants),
            slots=len(slots) - len(inputs) - len(constants),
            outputs=tuple(slots[node] for node in outputs),
            addable=frozenset(slots[node] for node in outputs if node not in read),
        )

    def _add_between(self, nodes: list[fx.Node], outputs: Sequence[fx.Node], gradients: Collection[fx.Node]) -> None:
        """Add a separate graph for some nodes, and then products for those gradients of them that are products."""
        products = find_products(gradients, nodes)
        operand_graphs = [self._module(product.views, product.operands) for product in products]
        apart = apart_from_graph(products, nodes, outputs)
        inside = {node: None for node in nodes if node not in apart}
        read = {node for _, reads in operand_graphs for node in reads}
        writes = [
            node
            for node in inside
            if node in outputs or node in read or any(user not in inside and user not in apart for user in node.users)
        ]
        if writes:
            module, reads = self._module([*inside], writes)
            self.steps.append((self.compiler.compiled_graph(module, self.kernel_graph.sizes), reads, [*writes], None))
        for product, (module, reads) in zip(products, operand_graphs, strict=True):
            code = GradientProduct(module, product.is_transposed)
            self.steps.append((code, reads, [product.gradient], None))

    def _module(self, nodes: Sequence[fx.Node], writes: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node]]:
        """Return a graph of some nodes, and the tensors that it reads. It computes the sizes that they read."""
        inside = set(nodes)
        read = dict.fromkeys(source for node in nodes for source in node.all_input_nodes if source not in inside)
        read |= dict.fromkeys(node for node in writes if node not in inside)
        reads = [node for node in read if not is_size(node) and (node.op != "get_attr" or self._is_constant(node))]
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        for node in (*self._sizes(), *reads):
            values[node] = graph.placeholder(f"input_{len(values)}")
            values[node].meta = node.meta

        def copied(node: fx.Node) -> fx.Node:
            if node not in values:  # one of the nodes, a size, or a tensor that was made while tracing
                values[node] = graph.node_copy(node, copied)
            return values[node]

        for node in nodes:
            copied(node)
        graph.output(tuple(map(copied, writes)))
        return fx.GraphModule(self.kernel_graph.module, graph), reads

    def _sizes(self) -> list[fx.Node]:
        """The placeholders of the sizes."""
        return self.kernel_graph.module.graph.find_nodes(op="placeholder")[: len(self.kernel_graph.sizes)]

    def _add_call(self, node: fx.Node) -> None:
        """Add the call of a block."""
        tensors, _, _, kind, mask, _ = node.args
        program = self.compiler.program(block_of(node), str(kind), tuple(mask))  # type: ignore[arg-type]
        sizes = SizeMap(self.kernel_graph.sizes, size_values(node))
        items = {user.args[1]: user for user in node.users}
        writes = [items.get(index) for index in range(len(program.outputs))]
        self.steps.append((program, list(tensors), writes, sizes))  # type: ignore[arg-type]

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node is a tensor from outside the graph. Readers copy a tensor that was made while tracing."""
        is_fresh = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
        return isinstance(constant_of(self.kernel_graph.module, node), Tensor) and not is_fresh

    def _instructions(self, slots: dict[fx.Node | None, int], outputs: set[fx.Node]) -> Iterator[Instruction]:
        last: dict[fx.Node, int] = {}
        for index, (_, reads, _, _) in enumerate(self.steps):
            last |= dict.fromkeys(reads, index)
        for index, (code, reads, writes, sizes) in enumerate(self.steps):
            drops = {node for node in reads if last[node] == index and node not in outputs}
            yield Instruction(
                code,
                tuple(slots[node] for node in reads),
                tuple(sorted(slots[node] for node in drops)),
                tuple(slots[node] for node in writes),
                sizes,
            )


def _with_whole_backwards(module: fx.GraphModule) -> fx.Graph:
    """Turn I and W of the same call, if the graph has both, into B: it computes what both need once."""
    graph = module.graph
    calls: dict[tuple[Any, Any], dict[Any, fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=OPERATION):
        _, _, block, kind, _, call = node.args
        calls.setdefault((block, call), {})[kind] = node
    pairs = [(nodes["I"], nodes["W"]) for nodes in calls.values() if "I" in nodes and "W" in nodes]
    for of_inputs, of_weights in pairs:
        _join(graph, of_inputs, of_weights)
    if pairs:
        graph.eliminate_dead_code()
    return graph


def _join(graph: fx.Graph, of_inputs: fx.Node, of_weights: fx.Node) -> None:
    tensors: dict[str, Any] = {}
    for node in (of_weights, of_inputs):
        tensors |= zip(called_graph(node).inputs, node.args[0], strict=True)  # type: ignore[arg-type]
    full = called_graph(of_inputs, "B")
    _, sizes, block, _, mask, call = of_inputs.args
    with graph.inserting_before(of_inputs):
        arguments = [tensors[name] for name in full.inputs], sizes, block, "B", mask, call
        joined = graph.call_function(OPERATION, arguments)
        items = {name: graph.call_function(operator.getitem, (joined, i)) for i, name in enumerate(full.outputs)}
    for node in (of_inputs, of_weights):
        names = called_graph(node).outputs
        for item in list(node.users):
            if (name := names[item.args[1]]) in items:  # type: ignore[index]
                items[name].meta = item.meta
                item.replace_all_uses_with(items[name])
