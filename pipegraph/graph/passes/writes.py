"""Place the updates of buffers, and replace in-place operations by ones that return a new tensor."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import fx

from pipegraph.graph.aliasing import is_view, readers_of, viewed_by, written_by
from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE, dtypes_of, on_meta, path_of, shape_of
from pipegraph.graph.passes.dtypes import FOLLOWS_BUFFER
from pipegraph.torch_private.operators import OpOverload, operator_name

aten = torch.ops.aten


def place_buffer_updates(graph: fx.Graph) -> None:
    """Move the update of a buffer that ``forward`` assigns to (``self.mean = …``) after the last use of the old value.

    ``torch.export`` puts the update at the very end, which is in the last stage. The update is erased if its value
    is the buffer itself, changed in place (``self.count += 1``).

    before:  m = lerp(mean, x, 0.1);  y = sub(x, m);  z = linear(y, weight);  copy_(mean, m)
    after:   m = lerp(mean, x, 0.1);  copy_(mean, m);  y = sub(x, m);  z = linear(y, weight)
    """
    for node in _last_copies(graph):
        buffer, value = node.args[:2]
        if buffer.op != "get_attr" or node.meta["path"]:
            continue
        if _is_update(value, buffer):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            continue
        last = max([value, *(reader for reader in readers_of(buffer) if reader is not node)])
        if last.op == "call_function" and last.meta["path"] == value.meta.get("path"):
            last.append(node)
            node.meta |= {"path": last.meta["path"], "regions": last.meta["regions"]}


def _last_copies(graph: fx.Graph) -> list[Any]:
    """Return the copies at the end of the graph; a ``copy_`` that the model itself calls is not at the end."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    last = takewhile(lambda node: node.target is torch.ops.aten.copy_.default, reversed(operations))
    return list(last)[::-1]


def _is_update(value: fx.Node, buffer: fx.Node) -> bool:
    """Return whether ``value`` is ``buffer`` itself, after writes into it."""
    while value is not buffer:
        written = written_by(value)
        if not written:
            return False
        value = written[0]
    return True


def drop_write_backs(graph: fx.Graph) -> None:
    """Erase what Python adds to ``x[0] += y``: the sum, already written into ``x[0]``, is assigned to ``x[0]``.

    before:  a = select(x, 0, 0);  b = add_(a, y);  c = select(x, 0, 0);  copy_(c, b)
    after:   a = select(x, 0, 0);  b = add_(a, y);  c = select(x, 0, 0)
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.copy_.default or node.users:
            continue
        view, value = node.args[:2]
        if not isinstance(view, fx.Node) or not isinstance(value, fx.Node):
            continue
        previous_node = node.prev.prev if node.prev is view else node.prev
        written = written_by(value)
        if value is previous_node and written and is_view(view) and _call(view) == _call(written[0]):
            graph.erase_node(node)


def _call(node: fx.Node) -> object:
    return node.target, node.args, node.kwargs


def functionalize_writes(graph: fx.Graph) -> None:
    """Rewrite ``x.add_(y)`` as ``x + y`` if nothing else can see the difference, so that any cut is legal.

    A write into a view (``x[:, 0] = 5``), into a tensor that has a view, or into a buffer stays as it is. It is marked
    with ``meta["writes"]``, the name of the node that made the memory: no split point may separate the two.

    A write keeps the dtype of the tensor that it writes into. If another operand, such as a float32 table, gives the
    new tensor another dtype in a converted model, the new tensor is cast: ``(x + table).type_as(x)``.

    before:  a = relu(x);  b = add_(a, y);  c = mul(a, 2)
    after:   a = relu(x);  b = add(a, y);  c = mul(b, 2)
    """
    memory: dict[fx.Node, fx.Node] = {}  # each value → the node that made its memory
    sharing: dict[fx.Node, list[fx.Node]] = {}  # each node that made memory → the values that lie in it
    for node in list(graph.nodes):
        written = written_by(node)
        if written:
            target = written[0]
            root = memory.get(target, target)
            functional = _functional(node)
            if functional is not None and root.op != "get_attr" and sharing.get(root, [root]) == [target]:
                node.target = functional
                memory[node], sharing[node] = node, [node]
            else:
                memory[node] = root
                node.meta["writes"] = root.name
            _replace_later_uses(target, node)
            if functional is node.target:
                _keep_dtype(node, target)
            continue
        viewed = viewed_by(node)
        root = memory.get(viewed[0], viewed[0]) if viewed else node
        memory[node] = root
        sharing.setdefault(root, [root] if root is not node else []).append(node)


def _keep_dtype(node: fx.Node, target: fx.Node) -> None:
    """Cast what an operation makes, if its dtype in the converted model is not that of ``target``."""
    (_, target_dtype), result_dtype = dtypes_of(target), _converted_dtype(node)
    if result_dtype is None or result_dtype == target_dtype:
        return
    with node.graph.inserting_after(node):
        cast = node.graph.call_function(aten.type_as.default, (node, target))
    node.replace_all_uses_with(cast, lambda user: user is not cast)
    cast.meta = {**node.meta, RELATIVE_DTYPE: True, FOLLOWS_BUFFER: True, OTHER_DTYPE: target_dtype}
    node.meta[OTHER_DTYPE] = result_dtype


def _converted_dtype(node: fx.Node) -> torch.dtype | None:
    """The dtype of what an operation makes in the converted model; None if it is not known."""
    tensors = [parent for parent in node.all_input_nodes if isinstance(parent.meta.get("val"), torch.Tensor)]
    if not all(OTHER_DTYPE in tensor.meta for tensor in tensors):
        return None

    def example(value: fx.Node) -> Any:
        if value not in tensors:
            return value.meta.get("val")
        return torch.empty(shape_of(value), dtype=dtypes_of(value)[1], device="meta")

    arguments = fx.map_arg((node.args, node.kwargs), example)
    try:
        result = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
    except Exception:  # an operation that takes no meta tensors
        return None
    return result.dtype if isinstance(result, torch.Tensor) else None


def read_buffers_anew(graph: fx.Graph) -> None:
    """Let a call of a module that writes into a buffer of the module read the buffer, and not what an earlier call left
    in it: the calls then do the same. No split point may part them, so that the value need not be sent.

    before:  c = add_(count, 1);  d = add_(c, 1)          # in two calls of one batch norm
    after:   c = add_(count, 1);  d = add_(count, 1)
    """
    written: dict[fx.Node, fx.Node] = {}  # each write → the buffer
    writers: set[tuple[fx.Node, str | None]] = set()  # (buffer, a call of its module that writes into it)
    for node in graph.nodes:
        if "writes" in node.meta:
            target = written_by(node)[0]
            buffer = written.get(target, target)
            if buffer.op == "get_attr":
                written[node] = buffer
                writers.add((buffer, _call_of_owner(node, buffer)))
    for node, buffer in written.items():
        for user in list(node.users):
            call = _call_of_owner(user, buffer)
            if call not in (None, _call_of_owner(node, buffer)) and (buffer, call) in writers:
                user.replace_input_with(node, buffer)


def _call_of_owner(node: fx.Node, buffer: fx.Node) -> str | None:
    """The call of the module that holds a buffer in which an operation ran."""
    owner = str(buffer.target).rpartition(".")[0]
    return next((call for call, fqn in reversed(path_of(node)) if fqn == owner), None)


def _functional(node: fx.Node) -> OpOverload | None:
    """Return ``aten.add.Tensor`` for ``aten.add_.Tensor``; None if no functional form gives the same result."""
    target = node.target
    assert isinstance(target, OpOverload)
    name, overload = operator_name(target)
    if target.namespace != "aten" or not name.endswith("_") or name in ("copy_", "set_", "resize_"):
        return None
    functional = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
    return functional if functional is not None and _keeps_type(functional, node) else None


def _keeps_type(functional: OpOverload, node: fx.Node) -> bool:
    """Return whether the functional form gives the dtype and shape that the tensor has: ``x.add_(y)`` keeps a bfloat16
    ``x``, while ``x + y`` promotes it to the dtype of ``y``."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    tensor = node.meta["val"]
    try:
        with torch.no_grad():
            result = functional(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(result.dtype == tensor.dtype and result.shape == tensor.shape)


def _replace_later_uses(target: fx.Node, write: fx.Node) -> None:
    """Replace ``target`` by ``write`` in the operations after ``write``, where both have the same value."""
    for user in list(target.users):
        if user > write:
            user.replace_input_with(target, write)
