"""The order in which a graph that calls blocks runs: in each level, first the nodes between calls, then the calls."""

from __future__ import annotations

import operator

from torch import fx

from pipegraph.kernels.graphs.block_operation import OPERATION, is_random
from pipegraph.kernels.symbolic.symbolic_sizes import is_size


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
