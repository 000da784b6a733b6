"""Replace in-place operations by ones that return a new tensor."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.aliasing import viewed_by, written_by
from pipegraph.graph.internals import OpOverload, operator_name
from pipegraph.graph.nodes import on_meta

aten = torch.ops.aten


def functionalize_writes(graph: fx.Graph) -> None:
    """Rewrite ``x.add_(y)`` as ``x + y`` wherever nothing else can see the difference, so that any cut is legal.

    A write into a view (``x[:, 0] = 5``), into a tensor that has a view, or into a buffer stays as it is. It is marked
    with ``meta["writes"]``, the name of the node that made the memory: a split point may not part the two.

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
            continue
        viewed = viewed_by(node)
        root = memory.get(viewed[0], viewed[0]) if viewed else node
        memory[node] = root
        sharing.setdefault(root, [root] if root is not node else []).append(node)


def _functional(node: fx.Node) -> OpOverload | None:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``; None if there is none that gives the same."""
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
    kept = node.meta["val"]
    try:
        with torch.no_grad():
            made = functional(*args, **kwargs)
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return bool(made.dtype == kept.dtype and made.shape == kept.shape)


def _replace_later_uses(before: fx.Node, after: fx.Node) -> None:
    """Let uses of ``before`` behind ``after`` read ``after``, which has the same value by then."""
    for user in list(before.users):
        if user > after:
            user.replace_input_with(before, after)
