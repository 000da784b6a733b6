"""The values that the call of a module takes and returns, inside one stage."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from torch import fx, nn

from pipegraph.codegen.names.identifiers import is_within
from pipegraph.graph.call_arguments import argument_place, result_place, sorted_by_place
from pipegraph.graph.call_tree import CallTree, call_tree
from pipegraph.graph.captured import Captured
from pipegraph.graph.nodes import helper_function


@dataclass(frozen=True)
class StageMembers:
    """The operations, results and state of one stage."""

    nodes: frozenset[fx.Node]
    outputs: frozenset[fx.Node]
    state: frozenset[str]

    def read_outside(self, node: fx.Node, inner: set[fx.Node]) -> bool:
        """Return whether an operation outside ``inner``, in this stage or a later one, reads a value."""
        return node in self.outputs or any(user in self.nodes and user not in inner for user in node.users)


@dataclass(frozen=True)
class CallValues:
    """A call: its operations, the values that it takes, and the values that it returns."""

    tree: CallTree
    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    makes: tuple[fx.Node, ...]


def call_values(
    captured: Captured, members: StageMembers, tree: CallTree, returned: AbstractSet[int] = frozenset()
) -> CallValues:
    """The values that a call takes and returns, in the order of its arguments and results as far as known.

    Args:
        returned: the places of results that are returned even if nothing reads them after this call.
    """
    nodes = tuple(tree.nodes())
    inner = set(nodes)
    read = dict.fromkeys(node for each in nodes for node in each.all_input_nodes if node not in inner)
    names = captured.names_of
    has_state = not helper_function(tree.call)  # a function is given the parameters that it reads
    foreign = [
        node
        for node in read
        if node.op != "get_attr"
        or not (has_state and any(is_within(name, tree.fqn) for name in names[str(node.target)]))
    ]
    made = [
        node
        for node in nodes
        if members.read_outside(node, inner)
        or ((place := result_place(node, tree.call)) is not None and place.order in returned)
    ]
    return CallValues(
        tree,
        nodes,
        sorted_by_place(foreign, (argument_place(node, tree.call) for node in foreign)),
        sorted_by_place(made, (result_place(node, tree.call) for node in made)),
    )


def results_read(captured: Captured) -> dict[type[nn.Module], set[int]]:
    """The places of results that any call of a class is read at. Other calls may leave some of them unread."""
    found: dict[type[nn.Module], set[int]] = {}
    for tree in call_tree(captured.nodes).descendants():
        if tree.fqn not in captured.modules:
            continue
        inner = set(tree.nodes())
        places = found.setdefault(type(captured.modules[tree.fqn].module), set())
        for node in inner:
            place = result_place(node, tree.call)
            if place is not None and any(user not in inner for user in node.users):
                places.add(place.order)
    return found
