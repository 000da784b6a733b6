"""Let dtypes follow the model's, or the one of a value or buffer, instead of standing as they were at capture."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from pipegraph.graph.captured import model_dtype, model_number
from pipegraph.graph.nodes import (
    OTHER_DTYPE,
    RELATIVE_DTYPE,
    RELATIVE_NUMBERS,
    arguments_of,
    dtypes_of,
    follows_model,
    path_of,
    source_line,
)
from pipegraph.graph.operators import operator_of
from pipegraph.torch_private.export import call_name
from pipegraph.torch_private.operators import OpOverload, schema_arguments

aten = torch.ops.aten

FOLLOWS_BUFFER = "follows_buffer"
"""Key of a node's metadata: it is a cast that says something although it changed nothing at capture."""


def tie_casts_to_buffers(graph: fx.Graph) -> None:
    """Turn the last cast of a value that is computed from buffers alone into ``value.type_as(buffer)``, if it is a cast
    that follows the model's dtype. Casts before it are how the value is computed, in the precision that the model asks
    for.

    A model casts its tables to the dtype of its activations, ``cos.to(x.dtype)``. In a converted model the table's
    buffer has that dtype as well, and is there without an activation. Without marks of `mark_dtypes`, a cast to the
    value's own dtype is taken for one that follows.

    before:  a = cos(table);  b = to(a, torch.float32)       with a float32 buffer ``table``
    after:   a = cos(table);  b = type_as(a, table)          # follows_buffer
    """
    buffers = values_of_buffers(graph)
    leads_to_cast: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in buffers:
            continue
        last = not any(user in leads_to_cast for user in node.users)
        if not _is_cast_that_follows(node):
            leads_to_cast |= set() if last else {node}
            continue
        leads_to_cast.add(node)
        buffer = buffers[node]
        if last and buffer is not None and dtypes_of(buffer) == dtypes_of(node):
            with graph.inserting_before(node):
                cast = graph.call_function(aten.type_as.default, (node.args[0], buffer))
            cast.meta = {**node.meta, FOLLOWS_BUFFER: True, RELATIVE_DTYPE: True}
            node.replace_all_uses_with(cast)
            graph.erase_node(node)


def _is_cast_that_follows(node: fx.Node) -> bool:
    """Return whether it is a cast of a float to a dtype that follows the model's."""
    if node.target not in (aten.to.dtype, aten.to.dtype_layout) or not isinstance(node.args[0], fx.Node):
        return False
    if OTHER_DTYPE in node.meta:
        return RELATIVE_DTYPE in node.meta
    argument_value, result_value = node.args[0].meta["val"], node.meta["val"]
    return bool(result_value.is_floating_point() and argument_value.dtype == result_value.dtype)


def values_of_buffers(graph: fx.Graph) -> dict[fx.Node, fx.Node | None]:
    """The values that depend on no parameter and no activation → a buffer of floats that each depends on, if any."""
    buffer_of: dict[fx.Node, fx.Node | None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if not node.meta["val"].is_floating_point():
                buffer_of[node] = None
        elif node.op == "get_attr":
            if node.meta["kind"] != "parameter":
                buffer_of[node] = node if node.meta["val"].is_floating_point() else None
        elif node.op == "call_function" and all(parent in buffer_of for parent in node.all_input_nodes):
            origins = (buffer_of[parent] for parent in node.all_input_nodes)
            buffer_of[node] = next((origin for origin in origins if origin is not None), None)
    return buffer_of


def follow_dtypes(graph: fx.Graph) -> None:
    """Turn casts to a dtype that follows the model's into ``type_as`` a value that has it.

    Values that are computed from buffers alone stay independent of activations; `tie_casts_to_buffers` is for them.

    before:  h = to(x, torch.float32);  …;  y = to(h, torch.bfloat16)        of h.to(x.dtype)
    after:   h = to(x, torch.float32);  …;  y = type_as(h, x)
    """
    independent = values_of_buffers(graph)
    arguments: dict[str, list[tuple[int, fx.Node]]] = {}
    references: dict[object, fx.Node] = {}  # by the line of the source, which in a loop says the same in each iteration
    for node in list(graph.nodes):
        if node.meta.get(RELATIVE_DTYPE) and node not in independent and _is_plain_cast(node):
            line = path_of(node), node.meta.get("stack_trace"), dtypes_of(node)
            reference = references.get(line) or _reference(node, arguments)
            if reference is not None:
                references[line] = reference
                node.target, node.args, node.kwargs = aten.type_as.default, (node.args[0], reference), {}
        if follows_model(node):
            for call, place in node.meta.get("argument_of", {}).items():
                arguments.setdefault(call, []).append((place.order, node))


def _is_plain_cast(node: fx.Node) -> bool:
    if node.target not in (aten.to.dtype, aten.to.dtype_layout, aten.to.device):
        return False
    return not any(value for name, value in arguments_of(node).items() if name in ("copy", "memory_format"))


def _reference(node: fx.Node, arguments: dict[str, list[tuple[int, fx.Node]]]) -> fx.Node | None:
    """Return a value that has the dtype of a cast in both dtypes of the model.

    It is the nearest such value that the cast is computed from, which is available for every cut of the model.
    Otherwise it is the first such argument of the innermost module call that has one.
    """
    dtypes = dtypes_of(node)
    waiting, visited = deque(node.all_input_nodes), {node}
    while waiting:
        value = waiting.popleft()
        if value.op != "get_attr" and follows_model(value) and dtypes_of(value) == dtypes:
            return value
        if value not in visited:
            visited.add(value)
            waiting.extend(value.all_input_nodes)
    for call, _ in reversed(path_of(node)):
        for _, value in sorted(arguments.get(call_name(call), []), key=lambda pair: pair[0]):
            if dtypes_of(value) == dtypes:
                return value
    return None


def follow_created_dtypes(graph: fx.Graph) -> None:
    """Replace dtypes and limits of ``torch.finfo`` that were recorded at capture by those of the model's present dtype.

    `follow_dtypes` is for casts, which have a value to follow. This is for all other operations. The source of a stage
    takes the dtype from a value that it has.

    before:  m = zeros([4], dtype=torch.float32);  y = where(x, m, -3.4028234663852886e+38)
    after:   d = model_dtype(torch.float32, torch.bfloat16);  m = zeros([4], dtype=d);  y = where(x, m, model_number(…))
    """
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or FOLLOWS_BUFFER in node.meta:
            continue
        named = arguments_of(node)
        dtypes = dtypes_of(node)
        if node.meta.get(RELATIVE_DTYPE) and named.get("dtype") == dtypes[0] != dtypes[1]:
            _replace_argument(node, "dtype", _insert(node, model_dtype, dtypes, dtypes[0]))
        for name, (dtype, other_dtype, limit) in node.meta.get(RELATIVE_NUMBERS, {}).items():
            if named.get(name) == getattr(torch.finfo(dtype), limit):
                _replace_argument(node, name, _insert(node, model_number, (dtype, other_dtype, limit), named[name]))


def _insert(reader: fx.Node, function: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
    with reader.graph.inserting_before(reader):
        operation = reader.graph.call_function(function, arguments)
    keys = ("path", "functions", "regions", "in_every_mode", "stack_trace")
    operation.meta = {key: reader.meta[key] for key in keys if key in reader.meta}
    operation.meta |= {"val": value, "requires_grad": False, "cut_off": False}
    return operation


def _replace_argument(node: fx.Node, name: str, value: fx.Node) -> None:
    """Let an argument of an operation be a value."""
    if name in node.kwargs:
        node.update_kwarg(name, value)
    else:
        assert isinstance(node.target, OpOverload)
        node.update_arg([argument.name for argument in schema_arguments(node.target)].index(name), value)


def drop_redundant_dtypes(graph: fx.Graph) -> None:
    """Leave out the argument ``dtype`` if it is the dtype of the first argument.

    After ``.to(torch.bfloat16)`` it would no longer be, and the cast back, which did nothing at capture, is gone. On
    bfloat16 these operations compute in float32 without being asked. It stays if it says something in another call of
    the module.

    before:  softmax(x, -1, torch.float32)                   with a float32 x
    after:   softmax(x, -1)
    """
    operations = [op for op in graph.nodes if operator_of(op).optional_dtype and arguments_of(op).get("dtype")]
    in_other_call = said_elsewhere(node for node in operations if not _is_its_own(node))
    for node in operations:
        if _is_its_own(node) and not in_other_call(node):
            position = [argument.name for argument in schema_arguments(node.target)].index("dtype")
            node.args = node.args[:position]
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def said_elsewhere(speaking: Iterable[fx.Node]) -> Callable[[fx.Node], bool]:
    """What tells of an operation whether another call of its module has it among these: with the same dtype, from the
    same line of the source."""
    calls: dict[tuple[object, ...], set[tuple[object, ...]]] = {}
    for node in speaking:
        if RELATIVE_DTYPE not in node.meta:
            calls.setdefault(_place(node), set()).add(tuple(path_of(node)))

    def is_said(node: fx.Node) -> bool:
        if not calls or not isinstance(node.target, OpOverload) or RELATIVE_DTYPE in node.meta:
            return False
        return bool(calls.get(_place(node), set()) - {tuple(path_of(node))})

    return is_said


def _place(node: fx.Node) -> tuple[object, ...]:
    return node.target, arguments_of(node).get("dtype"), source_line(node)


def _is_its_own(node: fx.Node) -> bool:
    """Return whether the argument ``dtype`` is the dtype of the first argument, in both dtypes of the model."""
    source = node.all_input_nodes[0]
    value = source.meta["val"]
    follows = OTHER_DTYPE not in node.meta or node.meta[OTHER_DTYPE] == source.meta.get(OTHER_DTYPE)
    return bool(follows and value.is_floating_point() and arguments_of(node).get("dtype") == value.dtype)
