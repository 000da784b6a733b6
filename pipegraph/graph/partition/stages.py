"""Divide a marked graph into stages and find the values that cross between them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import takewhile

import sympy
import torch
from torch import fx

from pipegraph.errors import PlanError
from pipegraph.graph.captured import BRANCH, Captured, GradientHook, StateEntry, split_point
from pipegraph.graph.nodes import dimension_of, dynamic_sizes_of, named_sizes, path_of, source_line, value_bytes
from pipegraph.graph.symbolic_size import in_dimensions

# ---- replicated values -----------------------------------------------------------------------------------------------
# Values that a stage makes for itself instead of receiving them: masks, positions, rotary tables.


# Making a value costs memory traffic on one device, sending it costs the link between two. Memory is faster than a link
# by 7 (NVLink 4: 450 GB/s of 3.35 TB/s) to 65 (InfiniBand NDR: 50 GB/s) on an H100 (NVIDIA's data sheets), and a sent
# value occupies both ends.
_MEMORY_PER_LINK_BYTE = 16


@lru_cache(maxsize=4)  # asked for once per split point
def parameter_free(captured: Captured) -> frozenset[fx.Node]:
    """The operations that depend on no parameter and no activation, and give the same result on every rank.

    An integer or boolean input of the model (token ids, an attention mask) is not an activation: every rank may
    receive it.
    """
    written = {node.meta["writes"] for node in captured.nodes if "writes" in node.meta}
    free: set[fx.Node] = set()
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            fixed = not node.meta["val"].is_floating_point()
        elif node.op == "get_attr":
            fixed = captured.state[node.target].kind != "parameter"
        else:
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            fixed = (
                node.op == "call_function"
                and not random
                and BRANCH not in node.meta
                and free.issuperset(node.all_input_nodes)
            )
        if fixed and node.name not in written and "writes" not in node.meta:
            free.add(node)
    return frozenset(node for node in free if node.op == "call_function")


def replicated_operations(captured: Captured, values: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The operations that make those of ``values`` that are cheaper to make than to send, in the model's order."""
    chosen = {node for value in values for node in replication_of(captured, value)}
    return tuple(node for node in captured.nodes if node in chosen)


def replication_of(captured: Captured, value: fx.Node) -> frozenset[fx.Node]:
    """The operations that make ``value``, if a stage can make it for itself and that is cheaper than receiving it; none
    otherwise."""
    if value not in parameter_free(captured):
        return frozenset()
    budget = _MEMORY_PER_LINK_BYTE * value_bytes(value)
    operations: set[fx.Node] = set()
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and node not in operations:
            operations.add(node)
            budget -= value_bytes(node)
            if budget < 0:
                return frozenset()
            waiting.extend(node.all_input_nodes)
    return frozenset(operations)


# ---- stages ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StageGraph:
    """One stage's part of the graph.

    Attributes:
        index: of the stage, from 0.
        nodes: its operations in order; those made again from an earlier stage come first.
        inputs: the arguments of its ``forward``: inputs of the model, then values of earlier stages.
        outputs: the results of its ``forward``: values for later stages; of the last stage, the model's results.
        state: FQNs of its parameters, buffers and constants, each under the name used here.
    """

    index: int
    nodes: tuple[fx.Node, ...] = field(repr=False)
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    state: tuple[str, ...] = field(repr=False)


@dataclass(frozen=True)
class Boundary:
    """A tensor that crosses: its node, the stage that gives it (−1: the caller) and the stages that take it.

    A relayed tensor has a boundary for each stage that gives it.
    """

    node: fx.Node
    producer: int
    consumers: tuple[int, ...]

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient comes back for it."""
        return self.producer >= 0 and self.node.op != "placeholder" and bool(self.node.meta["requires_grad"])


def divide_into_stages(captured: Captured) -> tuple[StageGraph, ...]:
    """The stages between the ``split_point`` markers of a graph.

    A value that a later stage reads is sent directly to it, over any number of stages. A value that depends on no
    parameter and no activation is computed again in the stage that reads it, if that is cheaper.

    Raises:
        PlanError: a split point parts an in-place write from the tensor it writes into.
    """
    runs = _runs(captured)
    made_in = {node: index for index, run in enumerate(runs) for node in run}
    _check_writes(captured, made_in)
    _check_branches(made_in)
    returned = captured.returned
    nodes: list[tuple[fx.Node, ...]] = [()] * len(runs)
    reads: list[list[fx.Node]] = [[]] * len(runs)
    outputs: list[tuple[fx.Node, ...]] = [()] * len(runs)
    for index in reversed(range(len(runs))):  # what a stage has to make follows from what the later ones read
        last = index == len(runs) - 1
        outputs[index] = returned if last else _outputs(runs[index], reads[index + 1 :])
        operations = _live_operations(runs[index], outputs[index])
        values = [*(parent for node in operations for parent in node.all_input_nodes), *(returned if last else ())]
        foreign = [node for node in dict.fromkeys(values) if made_in.get(node, index) != index]
        again = replicated_operations(captured, foreign)
        nodes[index] = (*again, *operations)
        inside = set(nodes[index])
        values += [parent for node in again for parent in node.all_input_nodes]
        values += inputs_for_sizes(captured, nodes[index], [node for node in values if node not in inside])
        reads[index] = [node for node in dict.fromkeys(values) if node not in inside]
    state = _place_state(captured, nodes, reads)
    return tuple(
        StageGraph(
            index=index,
            nodes=nodes[index],
            inputs=_inputs(captured, reads[index]),
            outputs=outputs[index],
            state=state[index],
        )
        for index in range(len(runs))
    )


def _live_operations(run: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """The operations of a run that its outputs and its writes depend on. Others, such as a mask that
    each later stage makes for itself, are left out."""
    live_values = set(outputs)
    operations: list[fx.Node] = []
    for node in reversed(run):
        if node in live_values or "writes" in node.meta:
            operations.append(node)
            live_values.update(node.all_input_nodes)
    return operations[::-1]


def relay_skips(captured: Captured, stages: Sequence[StageGraph]) -> tuple[StageGraph, ...]:
    """Let every value go from neighbour to neighbour: the stages in between take it and return it as it is.

    So a stage takes what the one before it returns, in the same order. The first stage takes the model's inputs.
    """
    position = {node: number for number, node in enumerate(captured.graph.nodes)}
    relayed: list[StageGraph] = []
    outputs: tuple[fx.Node, ...] = stages[-1].outputs
    for stage in reversed(stages):
        passed = {node for node in outputs if node.op != "get_attr"} - {*stage.nodes}
        inputs = tuple(sorted({*stage.inputs, *passed}, key=position.__getitem__))
        relayed.append(replace(stage, inputs=inputs, outputs=outputs))
        outputs = inputs
    return tuple(reversed(relayed))


def boundaries(captured: Captured, stages: Sequence[StageGraph]) -> tuple[Boundary, ...]:
    """All values that cross: the model's inputs, the values between stages, and the results of the last stage.

    A stage takes a value from the nearest one before it that returns it.
    """
    last = stages[-1]
    takers: dict[tuple[fx.Node, int], list[int]] = {(node, -1): [] for node in captured.inputs}
    givers: dict[fx.Node, int] = dict.fromkeys(captured.inputs, -1)
    for stage in stages:
        for node in stage.inputs:
            takers[node, givers[node]].append(stage.index)
        is_given = {*stage.outputs} - ({*stage.inputs} | givers.keys() if stage is last else set())
        for node in stage.outputs:
            if node in is_given:
                takers[node, stage.index] = []
                givers[node] = stage.index
    return tuple(Boundary(node, giver, tuple(consumers)) for (node, giver), consumers in takers.items())


def _runs(captured: Captured) -> list[list[fx.Node]]:
    """The operations between the markers."""
    runs: list[list[fx.Node]] = [[]]
    for node in captured.graph.nodes:
        if node.target is split_point:
            runs.append([])
        elif node.op == "call_function":
            runs[-1].append(node)
    return runs


def _check_writes(captured: Captured, made_in: Mapping[fx.Node, int]) -> None:
    by_name = {node.name: node for node in captured.graph.nodes}
    for node in made_in:
        if "writes" not in node.meta:
            continue
        root = by_name[node.meta["writes"]]
        readers = {made_in[user] for user in root.users if user in made_in}
        home = made_in.get(root, made_in[node])
        if made_in[node] != home or (root.op == "get_attr" and readers - {home}):
            where = path_of(node)[-1][1] if path_of(node) else "the model"
            tensor, remedy = (
                "a tensor that another stage holds",
                "move the split point to before the tensor is made, or write x = x.index_fill(…) or torch.where "
                "instead of the in-place form.",
            )
            if root.op == "get_attr":
                tensor = f"{root.target}, which another stage uses"
                remedy = "move the split point, so that all that uses the buffer lies in one stage."
            raise PlanError(f"{where} writes in place ({node.target}) into {tensor}.\n  at {source_line(node)}", remedy)


def _check_branches(made_in: Mapping[fx.Node, int]) -> None:
    """Check that no split point lies between the operations of a branch."""
    home: dict[int, int] = {}
    for node, index in made_in.items():
        part = node.meta.get(BRANCH)
        if part is not None and home.setdefault(part.number, index) != index:
            raise PlanError(
                f"A split point lies in what the model does in one mode only.\n  at {source_line(node)}",
                "a split point before or after the branch on self.training.",
            )


def _inputs(captured: Captured, reads: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """Inputs of the model in the model's order, then values in the order in which they are made."""
    values = {node for node in reads if node.op != "get_attr"}
    return tuple(node for node in captured.graph.nodes if node in values)


def _outputs(run: Sequence[fx.Node], later_reads: Sequence[Sequence[fx.Node]]) -> tuple[fx.Node, ...]:
    values = {node for reads in later_reads for node in reads}
    return tuple(node for node in run if node in values)


def _place_state(
    captured: Captured, nodes: Sequence[Sequence[fx.Node]], reads: Sequence[Sequence[fx.Node]]
) -> list[tuple[str, ...]]:
    """The state of each stage: what it reads. State that nothing reads goes with its relatives: none is lost."""
    names = captured.names_of
    placed: list[set[str]] = [set() for _ in nodes]
    for index, run in enumerate(nodes):
        for node in run:
            for parent in node.all_input_nodes:
                if parent.op == "get_attr":
                    placed[index].add(local_name(node, names[str(parent.target)]))
        for node in reads[index]:
            if node.op == "get_attr" and not placed[index].intersection(names[str(node.target)]):
                placed[index].add(str(node.target))
    for entry in captured.state.values():
        if not any(entry.fqn in stage for stage in placed) and entry.kind != "constant":  # those that only hooks read
            for home in _homes(entry, names, placed):
                placed[home].add(entry.fqn)
    for hook in captured.hooks:
        _place_hook(captured, hook, nodes, placed)
    return [tuple(fqn for fqn in captured.state if fqn in stage) for stage in placed]


def _place_hook(
    captured: Captured, hook: GradientHook, nodes: Sequence[Sequence[fx.Node]], placed: Sequence[set[str]]
) -> None:
    """Add the tensors that a hook reads to the stages of its owner.

    Raises:
        PlanError: it is a hook of a module that is cut inside, or reads a tensor of the model that is in another stage.
    """
    calls: dict[str, int] = {}
    for index, run in enumerate(nodes):
        for call in calls_of(run, hook.owner) if hook.is_of_module else ():
            if calls.setdefault(call, index) != index:
                raise PlanError(
                    f"{hook.owner} has a hook for its backward, and cannot be cut inside.\n  at {hook.line}",
                    "split points before and after it.",
                )
    names = captured.names_of
    for run, state in zip(nodes, placed, strict=True):
        if not has_hook(captured, hook, run, state):
            continue
        for fqn in hook.tensors.values():
            entry = captured.state[fqn]
            if entry.kind == "constant":
                state.add(fqn)
            elif not state.intersection(names[entry.canonical]):
                raise PlanError(
                    f"The hook of {hook.owner} reads {fqn}, which is in another stage.\n  at {hook.line}",
                    "split points that leave both in one stage.",
                )


def has_hook(captured: Captured, hook: GradientHook, nodes: Sequence[fx.Node], state: Collection[str]) -> bool:
    """Return whether the parameter or the module that has a hook is in a stage with these operations and this state."""
    if hook.is_of_module:
        return bool(calls_of(nodes, hook.owner))
    return any(fqn in state for fqn in captured.names_of[captured.state[hook.owner].canonical])


def calls_of(nodes: Sequence[fx.Node], fqn: str) -> frozenset[str]:
    """The calls of a module in which operations ran."""
    return frozenset(call for node in nodes for call, module in path_of(node) if module == fqn)


def local_name(reader: fx.Node, names: Sequence[str]) -> str:
    """Return the name of a tensor within the innermost module that reads it."""
    for _, fqn in reversed(path_of(reader)):
        for name in names:
            if name.startswith(f"{fqn}."):
                return name
    return names[0]


def _homes(entry: StateEntry, names: Mapping[str, Sequence[str]], placed: Sequence[set[str]]) -> list[int]:
    """The stages for a name that no operation reads: the one that holds the tensor under another name, or those that
    hold the names with the longest beginning in common.

    A buffer goes along with the buffers of its module to every stage that has them, so that the module keeps one form.
    """
    for index, stage in enumerate(placed):
        if stage.intersection(names[entry.canonical]):
            return [index]
    parts = entry.fqn.split(".")
    shared = [max((_shared(parts, fqn.split(".")) for fqn in stage), default=0) for stage in placed]
    homes = [index for index, count in enumerate(shared) if count == max(shared)]
    return homes if entry.kind != "parameter" and max(shared) == len(parts) - 1 > 0 else homes[:1]


def _shared(parts: Sequence[str], other_parts: Sequence[str]) -> int:
    """The length of the beginning that two names have in common."""
    equal = (part == right for part, right in zip(parts, other_parts, strict=False))
    return sum(1 for _ in takewhile(bool, equal))


def tensor_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor with the shape and dtype of a value that crosses.

    Raises:
        PlanError: the value is a tuple; a cut cannot fall between an operation and the parts of its result.
    """
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise PlanError(f"{node.name} is a {type(value).__name__}, not a tensor, and cannot cross to another stage.")
    return value


def inputs_for_sizes(captured: Captured, nodes: Sequence[fx.Node], reads: Iterable[fx.Node]) -> list[fx.Node]:
    """The inputs of the model whose sizes a stage names and that follow from nothing that it reads or makes.

    That is rare: a stage that begins with a [batch · length, features] tensor and makes [batch, length, features] of
    it. Every rank may be given the model's inputs.

    Args:
        nodes: the operations of the stage, in order.
        reads: what it reads from outside.
    """
    outside = [node for node in reads if node.op != "get_attr"]
    inputs: dict[fx.Node, None] = {}
    for position, node in enumerate(nodes):
        for size in named_sizes(node):
            if not _follows(size.expression, [*outside, *inputs, *_in_reach(node, nodes[:position])]):
                for symbol in size.expression.free_symbols:
                    inputs |= dict.fromkeys(_holders(captured, symbol, [*outside, *inputs]))
    return list(inputs)


def _follows(expression: sympy.Expr, values: Sequence[fx.Node]) -> bool:
    """Return whether an expression can be computed from sizes of values."""

    def is_sum_of_parts(part: sympy.Expr) -> bool:
        if part.is_Integer or any(dimension_of(value, part) is not None for value in values):
            return True
        return bool(part.args) and all(map(is_sum_of_parts, part.args))

    return is_sum_of_parts(expression) or in_dimensions(expression, dynamic_sizes_of(values)) is not None


def _in_reach(node: fx.Node, preceding_nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Earlier values in the module call in which an operation runs, or in a call around it."""
    path = path_of(node)
    return [value for value in preceding_nodes if path[: len(path_of(value))] == path_of(value)]


def _holders(captured: Captured, symbol: sympy.Symbol, values: Sequence[fx.Node]) -> list[fx.Node]:
    """The first input of the model that has a size, unless a value has it."""
    if any(dimension_of(value, symbol) is not None for value in values):
        return []
    return [node for node in captured.inputs if dimension_of(node, symbol) is not None][:1]
