"""Take out operations that change nothing, say nothing, that nothing reads, or that only a trace runs."""

from __future__ import annotations

import operator

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable, is_written, viewed_by
from pipegraph.graph.calls import replace_node
from pipegraph.graph.nodes import OTHER_DTYPE, arguments_of, shape_of
from pipegraph.graph.operators import operator_of
from pipegraph.graph.passes.dtypes import FOLLOWS_BUFFER, said_elsewhere

aten = torch.ops.aten


def drop_identities(graph: fx.Graph) -> None:
    """Replace each operation that returns its argument: a cast to the dtype it has, a full slice, ``x + 0``, one of
    ``broadcast_tensors`` of equal shapes.

    A cast that does something in a model of another dtype stays, and so does one that does something in another call
    of its module: of equal layers, the first may take the model's dtype, and all others float32.

    before:  a = to(x, torch.float32);  b = mul(a, 2)        with a float32 x
    after:   b = mul(x, 2)
    """
    casts = graph.find_nodes(op="call_function", target=aten.to.dtype)
    in_other_call = said_elsewhere(node for node in casts if not _is_identity(node, node.all_input_nodes[0]))
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = _broadcast(node) or node.args[0]
        unseen = not is_written(node) and (source in viewed_by(node) or is_stable(source))
        if unseen and _is_identity(node, source) and not in_other_call(node):
            replace_node(node, source)


def _broadcast(node: fx.Node) -> fx.Node | None:
    """Return what a result of ``broadcast_tensors`` was before; None for another operation."""
    tensors = node.args[0]
    if node.target is not operator.getitem or getattr(tensors, "target", None) is not aten.broadcast_tensors.default:
        return None
    assert isinstance(tensors, fx.Node)
    source: fx.Node = tensors.args[0][node.args[1]]  # type: ignore[index, assignment]
    return source


def _is_identity(node: fx.Node, source: fx.Node) -> bool:
    argument, result = source.meta.get("val"), node.meta.get("val")
    if not isinstance(argument, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    dtypes = [
        (value.dtype, op.meta.get(OTHER_DTYPE, value.dtype)) for value, op in ((argument, source), (result, node))
    ]
    is_equal = bool(dtypes[0] == dtypes[1] and shape_of(source) == shape_of(node) and argument.device == result.device)
    target, row = node.target, operator_of(node)
    if target is operator.getitem:
        return is_equal and source is _broadcast(node)
    if row.cast:
        return is_equal and not _copies(node) and FOLLOWS_BUFFER not in node.meta
    if row.identity:
        return is_equal
    if target is aten.detach_.default:
        return source.op == "get_attr" and not source.meta.get("requires_grad", False)
    if target in (aten.slice.Tensor, aten.expand.default):
        return is_equal and bool(len(node.args) < 5 or node.args[4] == 1)
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return bool(is_equal and type(node.args[1]) is int and node.args[1] == 0)
    if target in (aten.mul.Tensor, aten.div.Tensor):
        return bool(is_equal and type(node.args[1]) in (int, float) and node.args[1] == 1)
    if target is aten.dropout.default:  # an nn.Dropout stays as the module that it is
        return bool(node.args[1] == 0.0) and "nn/modules/dropout.py" not in node.meta["stack_trace"]
    return False


def _copies(node: fx.Node) -> bool:
    """Return whether a cast has to copy its argument, or to change its memory layout, in any case."""
    named = arguments_of(node)
    return bool(named.get("copy")) or named.get("memory_format") not in (None, torch.preserve_format)


def drop_assertions(graph: fx.Graph) -> None:
    """Erase assertions: they keep values alive and say nothing to a reader.

    before:  _assert_tensor_metadata(x, None, None, torch.float32);  y = to(x, torch.float64)
    after:   y = to(x, torch.float64)
    """
    for node in reversed(graph.nodes):
        if operator_of(node).check:
            graph.erase_node(node)


def drop_dead_code(graph: fx.Graph) -> None:
    """Erase operations without readers; writes, and the state and inputs of the model, stay.

    before:  a = add(x, 1);  b = mul(x, 2);  return b
    after:   b = mul(x, 2);  return b
    """
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and "writes" not in node.meta:
            graph.erase_node(node)
