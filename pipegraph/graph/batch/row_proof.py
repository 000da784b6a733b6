"""The rows of every value of a graph, found operator by operator from the roles of the inputs.

inputs, each rows | whole | list ─▶ rule of the operator ─▶ rows | whole | list | mixed
                                                            └─▶ outputs: independent, or the operators that mix rows

The rules say for one operator what vmap's batching rules and DTensor's sharding rules say: that it may be computed for
each part of a dimension alone. Both of these libraries answer another question (how to compute it for a new dimension,
and what to send so that it can be computed), and neither keeps the place of rows in merged dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipegraph.graph.batch.compute_rules import COMPUTE_RULES, elementwise
from pipegraph.graph.batch.expert_rules import EXPERT_RULES
from pipegraph.graph.batch.function_rules import function_rows
from pipegraph.graph.batch.index_rules import INDEX_RULES
from pipegraph.graph.batch.row_call import RowCall, RowSizes
from pipegraph.graph.batch.row_state import (
    INVARIANT,
    LISTED,
    Counts,
    Listed,
    Mixed,
    NoRuleError,
    Rows,
    RowsMixError,
    State,
)
from pipegraph.graph.batch.shape_rules import SHAPE_RULES, Rule, factory
from pipegraph.graph.captured import by_mode
from pipegraph.graph.custom_functions import applied_function
from pipegraph.graph.nodes import named_sizes
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.operators import OpOverload, operator_name

Result = State | tuple[State, ...]


@dataclass(frozen=True, eq=False)
class RowProof:
    """The rows of a graph.

    Attributes:
        states: of every tensor of the graph.
        certain: operators on whose mixed rows an output depends.
        undecided: operators without a rule on which an output depends.
        scalars: reductions over rows for outputs of one number, such as a loss.
        updates: operators that mix rows in a value that is written into a buffer.
    """

    states: Mapping[fx.Node, State]
    certain: tuple[fx.Node, ...]
    undecided: tuple[fx.Node, ...]
    scalars: tuple[fx.Node, ...]
    updates: tuple[fx.Node, ...]

    def batch_dim(self, node: fx.Node) -> int | None:
        """The dimension along which a value is cut; None if it has no rows, or nothing is known of them."""
        state = self.states.get(node)
        return state.dim if isinstance(state, Rows) else None


def prove_rows(graph: fx.Graph, inputs: Mapping[str, State], sizes: RowSizes) -> RowProof:
    """Find the rows of every value.

    Args:
        graph: of a model.
        inputs: name of a placeholder → its state.
        sizes: of the graph.
    """
    results: dict[fx.Node, Result] = {}
    states: dict[fx.Node, State] = {}
    memory = {node.name: node for node in graph.nodes}
    updates: list[Mixed] = []
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            result: Result = inputs.get(str(node.target), INVARIANT)
        elif node.op == "get_attr":
            result = INVARIANT
        else:
            result = _result(node, states, results, sizes)
        if not isinstance(result, tuple):
            result = states[node] = _written(node, result, memory, states, updates)
        results[node] = result
    (output,) = graph.find_nodes(op="output")
    kinds: dict[bool, Mixed] = {True: Mixed(), False: Mixed()}
    for node in output.all_input_nodes:
        state = states.get(node)
        if isinstance(state, Mixed):
            is_number = node.meta["val"].dim() == 0
            kinds[is_number] = kinds[is_number].union(state)
    tensors, numbers, written = kinds[False], kinds[True], Mixed()
    for update in updates:
        written = written.union(update)
    reduced = tuple(node for node in numbers.certain if _rule(node.target) in _TO_ONE_NUMBER)
    mixed = tensors.union(Mixed(tuple(node for node in numbers.certain if node not in reduced), numbers.undecided))
    return RowProof(states, mixed.certain, mixed.undecided, reduced, (*written.certain, *written.undecided))


def _written(
    node: fx.Node, state: State, memory: Mapping[str, fx.Node], states: dict[fx.Node, State], updates: list[Mixed]
) -> State:
    """The state of a result, which later operations may read from the tensor that an in-place operation writes into.

    Buffers, such as running averages, mix rows by design: each microbatch updates and reads them.
    """
    target = memory.get(node.meta.get("writes", ""))
    if target is None:
        return state
    if isinstance(state, Mixed) and target.op == "get_attr":
        updates.append(state)
        states[target] = INVARIANT
        return INVARIANT
    previous = states.get(target)
    if isinstance(state, Mixed):
        states[target] = state.union(previous) if isinstance(previous, Mixed) else state
    elif isinstance(state, Listed) or (isinstance(previous, Rows) and isinstance(state, Rows)):
        states[target] = state
    return state


def _result(
    node: fx.Node, states: Mapping[fx.Node, State], results: Mapping[fx.Node, Result], sizes: RowSizes
) -> Result:
    """The state of what an operation gives."""
    if node.target is operator.getitem:
        part = results[node.args[0]]  # type: ignore[index]
        return part[node.args[1]] if isinstance(part, tuple) else part  # type: ignore[index]
    inputs = [states[argument] for argument in node.all_input_nodes if argument in states]
    for argument in node.all_input_nodes:
        parts = results.get(argument)
        inputs += parts if isinstance(parts, tuple) else ()
    if any(isinstance(state, Listed) for state in inputs):
        return LISTED
    mixed = Mixed()
    for state in inputs:
        if isinstance(state, Mixed):
            mixed = mixed.union(state)
    is_factory = operator_of(node).factory and isinstance(node.target, OpOverload)
    if mixed != Mixed() and not is_factory:
        return mixed
    try:
        if mixed != Mixed():
            return factory(RowCall(node, states, sizes))
        if node.target is by_mode:
            return _joined(inputs)
        return _computed(node, states, inputs, sizes)
    except RowsMixError:
        return Mixed(certain=(node,))
    except (NoRuleError, AssertionError, LookupError, TypeError, ValueError):
        # A rule that does not fit a call says nothing of it.
        return Mixed(undecided=(node,))


def _joined(inputs: list[State]) -> State:
    """The state of a value that the modes compute in two ways."""
    first, *remaining = dict.fromkeys(inputs)
    if not remaining:
        return first
    if all(isinstance(state, Rows) for state in inputs):
        data = {state for state in inputs if isinstance(state, Rows) and not state.is_constant}
        if len(data) == 1:
            return data.pop()
    raise NoRuleError


def _computed(node: fx.Node, states: Mapping[fx.Node, State], inputs: list[State], sizes: RowSizes) -> Result:
    is_whole = all(state == INVARIANT for state in inputs)
    has_batch = any(map(sizes.is_batch, named_sizes(node)))
    if is_whole and not has_batch:
        return INVARIANT
    if not isinstance(node.target, OpOverload):
        raise NoRuleError
    name, rule = operator_name(node.target)[0], _rule(node.target)
    call = RowCall(node, states, sizes)
    function = applied_function(node.target)
    if function is not None:
        if has_batch:
            raise RowsMixError  # it computes with the number of rows
        return function_rows(call, function)
    if name.strip("_") in EXPERT_RULES or name in EXPERT_RULES:
        with suppress(NoRuleError):
            return EXPERT_RULES.get(name, EXPERT_RULES.get(name.strip("_")))(call)  # type: ignore[misc]
    if rule is None:
        raise NoRuleError
    if has_batch and rule not in _READ_SIZES:
        raise RowsMixError  # it computes with the number of rows
    if is_whole and rule is not factory and rule not in _OF_SIZES:
        raise RowsMixError if name == "select" else NoRuleError
    is_index = any(isinstance(state, Counts) or (isinstance(state, Rows) and state.is_index) for state in inputs)
    if is_index and rule not in _KEEP_NUMBERS:
        raise NoRuleError
    return rule(call)


def _rule(target: Any) -> Rule | None:
    if not isinstance(target, OpOverload):
        return None
    name = operator_name(target)[0]
    for key in (name, name.rstrip("_")):
        for table in (SHAPE_RULES, INDEX_RULES, COMPUTE_RULES):
            if key in table:
                return table[key]
    return elementwise if torch.Tag.pointwise in target.tags or name == "type_as" else None


_TO_ONE_NUMBER = frozenset({COMPUTE_RULES["mean"], COMPUTE_RULES["mse_loss"]})
"""Rules of operators that compute one number from independent rows."""

_READ_SIZES = frozenset(SHAPE_RULES.values()) | {COMPUTE_RULES["affine_grid_generator"]}
"""Rules of operators that take the number of rows for a shape."""

_OF_SIZES = frozenset(
    SHAPE_RULES[name] for name in ("expand", "repeat", "reshape", "arange", "slice", "repeat_interleave")
)
"""Rules that give rows to a result of whole tensors, whose shape has the number of rows."""

_KEEP_NUMBERS = frozenset(
    SHAPE_RULES[name] for name in ("to", "reshape", "permute", "expand", "zeros", "unbind", "select", "slice", "repeat")
) | frozenset((*INDEX_RULES.values(), COMPUTE_RULES["embedding_bag"]))
"""Rules of operators whose results are numbers of rows again, or are read at them."""
