"""Let casts to the dtype of another value say whose dtype that is."""

from __future__ import annotations

from collections import deque

import torch
from torch import fx

from pipegraph.graph.internals import call_name
from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE, arguments_of, follows_model, path_of
from pipegraph.graph.passes.tie_casts_to_buffers import values_of_buffers

aten = torch.ops.aten


def follow_dtypes(graph: fx.Graph) -> None:
    """Turn casts to a dtype that follows the model's into ``type_as`` a value that has it.

    Values that are computed from buffers alone stay independent of activations; `tie_casts_to_buffers` is for them.

    before:  h = to(x, torch.float32);  …;  y = to(h, torch.bfloat16)        of h.to(x.dtype)
    after:   h = to(x, torch.float32);  …;  y = type_as(h, x)
    """
    independent = values_of_buffers(graph)
    arguments: dict[str, list[tuple[int, fx.Node]]] = {}
    known: dict[object, fx.Node] = {}  # by the line of the source, which in a loop says the same in each iteration
    for node in list(graph.nodes):
        if node.meta.get(RELATIVE_DTYPE) and node not in independent and _is_plain_cast(node):
            line = path_of(node), node.meta.get("stack_trace"), _dtypes(node)
            reference = known.get(line) or _reference(node, arguments)
            if reference is not None:
                known[line] = reference
                node.target, node.args, node.kwargs = aten.type_as.default, (node.args[0], reference), {}
        if follows_model(node):
            for call, place in node.meta.get("argument_of", {}).items():
                arguments.setdefault(call, []).append((place.order, node))


def _is_plain_cast(node: fx.Node) -> bool:
    if node.target not in (aten.to.dtype, aten.to.dtype_layout, aten.to.device):
        return False
    return not any(value for name, value in arguments_of(node).items() if name in ("copy", "memory_format"))


def _reference(node: fx.Node, arguments: dict[str, list[tuple[int, fx.Node]]]) -> fx.Node | None:
    """Return a value that has the dtype of a cast in both dtypes.

    It is the nearest such value that the cast is computed from, which is there wherever the model is cut. Only if there
    is none, it is the first such argument of the innermost module call that has one.
    """
    dtypes = node.meta["val"].dtype, node.meta[OTHER_DTYPE]
    waiting, seen = deque(node.all_input_nodes), {node}
    while waiting:
        value = waiting.popleft()
        if value.op != "get_attr" and follows_model(value) and _dtypes(value) == dtypes:
            return value
        if value not in seen:
            seen.add(value)
            waiting.extend(value.all_input_nodes)
    for call, _ in reversed(path_of(node)):
        for _, value in sorted(arguments.get(call_name(call), []), key=lambda each: each[0]):
            if _dtypes(value) == dtypes:
                return value
    return None


def _dtypes(node: fx.Node) -> tuple[torch.dtype, torch.dtype]:
    return node.meta["val"].dtype, node.meta[OTHER_DTYPE]
