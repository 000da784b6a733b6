"""Passes that leave of a flat graph what a person would have written. Each changes the graph in place."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable, is_view, is_written, readers_of, shared_memory, viewed_by, written_by
from pipegraph.graph.export.call_arguments import copy_places
from pipegraph.graph.nodes import arguments_of, on_meta
from pipegraph.graph.passes.buffer_casts import FOLLOWS_BUFFER
from pipegraph.graph.passes.masks import plain_masks
from pipegraph.graph.passes.views import plain_views

aten = torch.ops.aten

# Export's own checks, and copies of constants that guard against writes into them.
_ASSERTIONS = (aten._assert_tensor_metadata.default, aten._assert_async.msg, aten._assert_scalar.default)
_CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
_WITH_DTYPE = (
    aten.softmax.int,
    aten.log_softmax.int,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.cumsum.default,
)
_CUT = (aten.detach.default, aten.detach_.default)
_COPIES = (aten.alias.default, aten.lift_fresh_copy.default, aten.lift_fresh.default)


def simplify(graph: fx.Graph) -> None:
    """Run all passes, in their order."""
    drop_assertions(graph)
    drop_identities(graph)
    drop_own_dtypes(graph)
    plain_masks(graph)
    place_updates(graph)
    drop_write_backs(graph)
    make_functional(graph)
    drop_identities(graph)  # once more: x + 0 is one only when nothing writes into its result any longer
    plain_views(graph)
    drop_dead(graph)
    mark_gradients(graph)


def drop_assertions(graph: fx.Graph) -> None:
    """Take out the checks that export adds: they would keep values alive and say nothing to a reader."""
    for node in reversed(graph.nodes):
        if node.target in _ASSERTIONS:
            graph.erase_node(node)


def drop_identities(graph: fx.Graph) -> None:
    """Replace by its input each operation that returns it: a cast to the dtype it has, a full slice, ``x + 0``."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
            continue
        source = node.args[0]
        unseen = not is_written(node) and (source in viewed_by(node) or is_stable(source))
        if unseen and _is_identity(node, source):
            copy_places(node, source)
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _is_identity(node: fx.Node, source: fx.Node) -> bool:
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    same = bool(before.dtype == after.dtype and before.shape == after.shape and before.device == after.device)
    target = node.target
    if target in _CASTS:
        return same and not _copies(node) and FOLLOWS_BUFFER not in node.meta
    if target in _COPIES:
        return same
    if target is aten.detach_.default:
        return source.op == "get_attr" and not source.meta.get("requires_grad", False)
    if target in (aten.slice.Tensor, aten.expand.default):
        return same and bool(len(node.args) < 5 or node.args[4] == 1)
    if target in (aten.add.Tensor, aten.sub.Tensor):
        return bool(same and type(node.args[1]) is int and node.args[1] == 0)
    if target in (aten.mul.Tensor, aten.div.Tensor):
        return bool(same and type(node.args[1]) in (int, float) and node.args[1] == 1)
    if target is aten.dropout.default:
        return bool(node.args[1] == 0.0) and not _in_module(node, "dropout")
    return False


def drop_write_backs(graph: fx.Graph) -> None:
    """Take out what Python adds to ``x[0] += y``: the sum, written into ``x[0]``, assigned to ``x[0]``."""
    for node in list(graph.nodes):
        if node.target is not aten.copy_.default or node.users:
            continue
        view, value = node.args[:2]
        if not isinstance(view, fx.Node) or not isinstance(value, fx.Node) or value is not _before(node, skip=view):
            continue
        written = written_by(value)
        if written and is_view(view) and _expression(view) == _expression(written[0]):
            graph.erase_node(node)


def _expression(node: fx.Node) -> object:
    return node.target, node.args, node.kwargs


def _before(node: fx.Node, skip: object) -> fx.Node:
    """The node before another, but for one that is skipped."""
    return node.prev.prev if node.prev is skip else node.prev


def drop_own_dtypes(graph: fx.Graph) -> None:
    """Leave out a result's dtype that is the argument's: ``softmax(x, -1, dtype=torch.float32)`` of a float32 ``x``.

    After ``.to(torch.bfloat16)`` it would no longer be, and the cast back to ``x``'s dtype is gone. On bfloat16 these
    operations compute in float32 of their own accord.
    """
    for node in graph.nodes:
        if node.target not in _WITH_DTYPE or not node.args[0].meta["val"].is_floating_point():
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        position, own = names.index("dtype"), node.args[0].meta["val"].dtype
        if len(node.args) > position and node.args[position] == own:
            node.args = node.args[:position]
        elif node.kwargs.get("dtype") == own:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}


def _copies(node: fx.Node) -> bool:
    """Whether a cast was asked to copy, or to change the memory layout, in any case."""
    given = arguments_of(node)
    return bool(given.get("copy")) or given.get("memory_format") not in (None, torch.preserve_format)


def _in_module(node: fx.Node, file: str) -> bool:
    """Whether a torch.nn module of that file made the node; it is kept as the module it came from."""
    return f"nn/modules/{file}.py" in node.meta["stack_trace"]


def place_updates(graph: fx.Graph) -> None:
    """Move the update of a buffer that ``forward`` assigns to (``self.mean = …``) to where its value is made.

    Export has it at the very end, which is in the last stage, and also where the value is the buffer itself, changed in
    place (``self.count += 1``): then it is taken out.
    """
    for node in _last_copies(graph):
        if node.args[0].op != "get_attr" or node.meta["path"]:
            continue
        buffer, value = node.args[:2]
        if _is_update(value, buffer):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
            continue
        last = max([value, *(reader for reader in readers_of(buffer) if reader is not node)])
        if last.op == "call_function" and last.meta["path"] == value.meta.get("path"):
            last.append(node)
            node.meta |= {"path": last.meta["path"], "regions": last.meta["regions"]}


def _last_copies(graph: fx.Graph) -> list[Any]:
    """The copies at the end, with no other operation behind them. A ``copy_`` of the model's own stays in its place."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    last = takewhile(lambda node: node.target is aten.copy_.default, reversed(operations))
    return list(last)[::-1]


def _is_update(value: fx.Node, buffer: fx.Node) -> bool:
    """Whether ``value`` is ``buffer`` itself, after writes into it."""
    while value is not buffer:
        written = written_by(value)
        if not written:
            return False
        value = written[0]
    return True


def make_functional(graph: fx.Graph) -> None:
    """Rewrite ``x.add_(y)`` as ``x + y`` wherever nothing else can see the difference, so that any cut is legal.

    A write into a view (``x[:, 0] = 5``), or into a tensor of which a view exists, stays as it is, and so does a write
    into a buffer. It is marked with ``meta["writes"]``, the name of the node that made the memory: a split point may
    not part the two.
    """
    memory: dict[fx.Node, fx.Node] = {}
    sharing: dict[fx.Node, list[fx.Node]] = {}
    for node in list(graph.nodes):
        written = written_by(node)
        if written:
            target = written[0]
            root = memory.get(target, target)
            functional = _functional(node)
            if functional is not None and root.op != "get_attr" and sharing.get(root, [root]) == [target]:
                node.target = functional
                _replace_later_uses(target, node)
                memory[node], sharing[node] = node, [node]
            else:
                memory[node] = root
                node.meta["writes"] = root.name
                _replace_later_uses(target, node)
            continue
        viewed = viewed_by(node)
        root = memory.get(viewed[0], viewed[0]) if viewed else node
        memory[node] = root
        sharing.setdefault(root, [root] if root is not node else []).append(node)


def _functional(node: fx.Node) -> torch._ops.OpOverload | None:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    name = target._schema.name.removeprefix("aten::")
    if target.namespace != "aten" or not name.endswith("_") or name in ("copy_", "set_", "resize_"):
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    functional = getattr(packet, target._overloadname, None) if packet is not None else None
    return functional if functional is not None and _keeps_type(functional, node) else None


def _keeps_type(functional: torch._ops.OpOverload, node: fx.Node) -> bool:
    """Whether the functional form gives the dtype and shape that the tensor written into has: ``x.add_(y)`` keeps a
    bfloat16 ``x`` where ``x + y`` promotes it to the dtype of ``y``."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), on_meta)
    kept = node.meta["val"]
    try:
        with torch.no_grad():
            made = functional(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(made.dtype == kept.dtype and made.shape == kept.shape)


def _replace_later_uses(before: fx.Node, after: fx.Node) -> None:
    """Uses of ``before`` behind ``after`` read ``after``, which has the same value by then."""
    for user in list(before.users):
        if user > after:
            user.replace_input_with(before, after)


def drop_dead(graph: fx.Graph) -> None:
    """Take out what nothing reads; writes and the state and inputs of the model stay."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and "writes" not in node.meta:
            graph.erase_node(node)


def mark_gradients(graph: fx.Graph) -> None:
    """Set ``meta["requires_grad"]``: whether a parameter's gradient flows through the node's value, and
    ``meta["cut_off"]``: whether only a ``no_grad`` block keeps one from it.

    State carries its own flag already; inputs of the model get no gradient. A write hands the flag on to all that
    shares the memory: ``z = torch.zeros(3)`` has a gradient after ``z[0] = x``.
    """
    written: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            node.meta.setdefault("requires_grad", False)
            continue
        enabled = [settings[0] for kind, settings in node.meta["regions"] if kind == "grad"]
        inside = not enabled or enabled[-1]
        flows = inside and node.target not in _CUT
        node.meta["requires_grad"] = (
            flows
            and not _makes_anew(node)
            and _differentiable(node.meta["val"])
            and any(parent.meta["requires_grad"] or parent in written for parent in node.all_input_nodes)
        )
        if node.meta["requires_grad"] and written_by(node):
            written |= shared_memory(node, but_for=_CUT)
            for each in written:
                if each.op == "call_function":
                    each.meta["requires_grad"] = True
        parents = [parent.meta["requires_grad"] or parent.meta.get("cut_off", False) for parent in node.all_input_nodes]
        node.meta["cut_off"] = not inside and any(parents)


def _makes_anew(node: fx.Node) -> bool:
    """Whether an operation takes a tensor for its shape, dtype and device alone: ``torch.ones_like(x)``."""
    name = getattr(node.target, "_opname", "")
    return bool(name.endswith("_like") or name.startswith("new_"))


def _differentiable(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_differentiable(part) for part in value)
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
