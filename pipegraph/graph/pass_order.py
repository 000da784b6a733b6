"""The passes over an exported graph, in their order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import fx

from pipegraph.debug import InvalidGraphError, dump, verifying
from pipegraph.graph.aliasing import written_by
from pipegraph.graph.captured import StateEntry, by_mode, model_dtype, model_number
from pipegraph.graph.graph_text import graph_text, type_text
from pipegraph.graph.nodes import source_line
from pipegraph.graph.passes.constants import simplify_masks, write_constants
from pipegraph.graph.passes.dtypes import (
    drop_redundant_dtypes,
    follow_created_dtypes,
    follow_dtypes,
    tie_casts_to_buffers,
)
from pipegraph.graph.passes.gradients import mark_gradients
from pipegraph.graph.passes.redundant_operations import (
    drop_assertions,
    drop_dead_code,
    drop_identities,
)
from pipegraph.graph.passes.views import (
    cancel_views,
    drop_contiguous,
    drop_expands,
    relax_attention_views,
    restore_repeat_interleave,
)
from pipegraph.graph.passes.writes import (
    drop_write_backs,
    functionalize_writes,
    place_buffer_updates,
    read_buffers_anew,
)
from pipegraph.torch_private.fake_tensors import fake_empty, fake_mode_of
from pipegraph.torch_private.operators import OpOverload, is_mutable
from pipegraph.torch_private.pytrees import pytree
from pipegraph.units import format_seconds

# ---- verifier --------------------------------------------------------------------------------------------------------
# ``PIPEGRAPH_VERIFY=1``: check the graph after every pass, so that an error names the pass that made the fault.


Pass = Callable[[fx.Graph], None]

# What a graph may call in addition to operators.
_FUNCTIONS = (operator.getitem, by_mode, model_dtype, model_number)

_METADATA: dict[str, tuple[str, ...]] = {
    "placeholder": ("val",),
    "get_attr": ("val", "kind", "requires_grad"),
    "call_function": ("val", "path", "regions", "in_every_mode", "stack_trace"),
    "output": (),
}


class GraphVerifier:
    """Check one graph after each pass over it. Operations that have not changed since the last check are not run again.

    The rules: every node has the metadata that it promises, reads only nodes before it, and is known to them as a user;
    state is the model's; shapes and dtypes are what the operations give; a write says which memory it changes, once
    `functionalize_writes` has run; every operation is read or writes, once `drop_dead_code` has run; gradients are
    marked, once `mark_gradients` has run.
    """

    def __init__(self, state: Mapping[str, StateEntry]) -> None:
        self._state = state
        self._passes: list[Pass] = []
        self._computed: dict[fx.Node, tuple[object, ...]] = {}

    def check(self, graph: fx.Graph, graph_pass: Pass, name: str) -> None:
        """Check the graph after a pass.

        Raises:
            InvalidGraphError: names the pass, the node, its line of the model's source and the rule.
        """
        self._passes.append(graph_pass)
        nodes = list(graph.nodes)
        position = {node: index for index, node in enumerate(nodes)}
        for rule in (_problems_of_order, self._problems_of_content):
            for node in nodes:
                problem = next(rule(node, position), None)
                if problem is not None:
                    raise InvalidGraphError(_message(name, node, problem))

    def _problems_of_content(self, node: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[str]:
        if node.op not in _METADATA:
            yield f"is a {node.op}, which no captured graph holds"
        missing = [key for key in self._promised(node) if key not in node.meta]
        if missing:
            yield f"lacks {', '.join(missing)} in its metadata"
        if node.op == "get_attr":
            yield from self._problems_of_state(node)
        elif node.op == "call_function":
            yield from self._problems_of_operation(node, position)
            yield from self._problems_of_value(node)

    def _promised(self, node: fx.Node) -> list[str]:
        gradients = ["requires_grad", "cut_off"] if mark_gradients in self._passes else []
        return [*_METADATA[node.op], *(gradients if node.op == "call_function" else [])]

    def _problems_of_state(self, node: fx.Node) -> Iterator[str]:
        entry = self._state.get(str(node.target))
        if entry is None:
            yield f"reads {node.target}, which the model does not hold"
        elif entry.canonical != node.target:
            yield f"reads {node.target}, another name of {entry.canonical}"
        elif (entry.shape, entry.dtype) != (tuple(node.meta["val"].shape), node.meta["val"].dtype):
            yield f"has not the shape and dtype of the model's {node.target}"
        elif node.meta["kind"] != entry.kind:
            yield f"is a {node.meta['kind']}, and in the model a {entry.kind}"

    def _problems_of_operation(self, node: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[str]:
        if not isinstance(node.target, OpOverload) and node.target not in _FUNCTIONS:
            yield f"calls {node.target}, which is not an operator"
        if "writes" in node.meta:
            if not written_by(node):
                yield "is marked as a write and writes nothing"
            if not any(root.name == node.meta["writes"] and position[root] < position[node] for root in position):
                yield f"writes into the memory of {node.meta['writes']}, which is not before it in the graph"
        elif functionalize_writes in self._passes and written_by(node):
            yield "writes into memory and is not marked as a write"
        elif drop_dead_code in self._passes and not node.users:
            yield "is dead: nothing reads it, and it writes nothing"

    def _problems_of_value(self, node: fx.Node) -> Iterator[str]:
        values = [node.meta["val"], *(parent.meta["val"] for parent in node.all_input_nodes)]
        previous_call = self._computed.get(node)
        now = (node.target, node.args, node.kwargs, node.meta["regions"], tuple(map(id, values)), values)
        if previous_call is not None and previous_call[:-1] == now[:-1]:
            return
        self._computed[node] = now  # with the values, so that their ids stay theirs
        try:
            output = _run(node)
        except Exception as error:  # whatever an operation raises on arguments that do not fit
            yield f"cannot run: {type(error).__name__}: {error}"
            return
        promised, actual = _type(node.meta["val"]), _type(output)
        if promised != actual:
            yield f"has the value {promised} in its metadata, and its operation gives {actual}"


def _problems_of_order(node: fx.Node, position: Mapping[fx.Node, int]) -> Iterator[str]:
    for parent in node.all_input_nodes:
        if parent not in position:
            yield f"reads {parent.name}, which is erased"
        elif position[parent] > position[node]:
            yield f"reads {parent.name}, which comes after it"
        elif node not in parent.users:
            yield f"reads {parent.name}, which does not have it as a user"
    for user in node.users:
        if user not in position:
            yield f"has the user {user.name}, which is erased"
    if node.op == "output" and position[node] != len(position) - 1:
        yield "is not the last node"


def _message(name: str, node: fx.Node, problem: str) -> str:
    line = source_line(node)
    at = f"  at {line}\n" if line else ""
    return (
        f"A bug in pipegraph: {name} left a graph in which {node.name} {problem}.\n"
        f"  {graph_text([node], 'node').splitlines()[1]}\n{at}"
        "Try: PIPEGRAPH_DUMP=DIR, which writes the graph after each pass, and report it with these files."
    )


def _run(node: fx.Node) -> Any:
    """The result of an operation on fake tensors, in the regions of the node."""
    with torch.no_grad(), ExitStack() as stack:
        for kind, settings in node.meta["regions"]:
            if kind == "autocast":
                device, dtype, enabled, cache = settings
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        may_write = isinstance(node.target, OpOverload) and is_mutable(node.target)
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda parent: _fresh(parent.meta["val"]) if may_write else parent.meta["val"]
        )
        tensors = [leaf for leaf in pytree.tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor)]
        if tensors:
            stack.enter_context(fake_mode_of(tensors[0]) or nullcontext())
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _fresh(value: Any) -> Any:
    """A copy of fake tensors, which a write may change."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return fake_empty(tensor, tensor.shape, tensor.dtype, tensor.stride())

    return pytree.tree_map_only(torch.Tensor, copy, value)


def _type(value: Any) -> Any:
    """Shapes and dtypes as text, nested like the value."""
    if isinstance(value, (tuple, list)):
        return [_type(part) for part in value]
    return type_text(value) if isinstance(value, torch.Tensor) else value


# ---- pass order ------------------------------------------------------------------------------------------------------


PASSES: tuple[Pass, ...] = (
    tie_casts_to_buffers,
    follow_dtypes,
    drop_assertions,
    drop_identities,
    drop_redundant_dtypes,
    simplify_masks,
    place_buffer_updates,
    drop_write_backs,
    functionalize_writes,
    read_buffers_anew,
    drop_identities,  # again: x + 0 is an identity only when nothing writes into its result any longer
    write_constants,
    cancel_views,
    drop_contiguous,
    drop_expands,
    restore_repeat_interleave,
    drop_dead_code,
    mark_gradients,
    relax_attention_views,
    follow_created_dtypes,
)
"""The passes over an exported graph, in their order. After them it reads as a person would have written it."""


def run_all_passes(graph: fx.Graph, state: Mapping[str, StateEntry], prefix: str = "") -> None:
    """Run `PASSES`, as `run_passes` does."""
    run_passes(graph, PASSES, state, prefix)


def run_passes(graph: fx.Graph, passes: Sequence[Pass], state: Mapping[str, StateEntry], prefix: str = "") -> None:
    """Run passes in order. After each the graph is dumped and verified, if the environment asks for it.

    Args:
        prefix: what the names of dumped files begin with.
    """
    verifier = GraphVerifier(state) if verifying() else None
    for graph_pass in passes:
        name = getattr(graph_pass, "func", graph_pass).__name__
        begin = perf_counter()
        graph_pass(graph)
        seconds = perf_counter() - begin
        dump(prefix + name, lambda: graph_text(graph.nodes, f"{name}: {format_seconds(seconds)}"))  # noqa: B023
        if verifier is not None:
            verifier.check(graph, graph_pass, name)
