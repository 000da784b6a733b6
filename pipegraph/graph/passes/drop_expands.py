"""Take out copies along a dimension that broadcasting makes anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.internals import OpOverload
from pipegraph.graph.nodes import arguments_of, on_meta, replace_node, set_value, shape_of
from pipegraph.graph.operators import operator_of

aten = torch.ops.aten

# The dimensions of a mask with which attention has all its kernels.
_MASK_DIMENSIONS = (2, 4)


def drop_expands(graph: fx.Graph) -> None:
    """Take out an ``expand`` if everything that reads the tensor broadcasts it. Operations on the way
    then run once and not for every copy, such as the masks of a batch.

    before:  a = expand(mask, [8, 1, 64, 64]);  b = logical_not(a);  c = where(b, x, 0)      with mask [1, 1, 64, 64]
    after:   b = logical_not(mask);  c = where(b, x, 0)
    """
    for node in list(graph.nodes):
        if node.target is not aten.expand.default or not is_stable(node):
            continue
        for inner, made in _smaller(node).items():
            set_value(inner, _kept(shape_of(inner), made.shape), made.dtype, made.stride())
            if inner is node:
                replace_node(node, node.args[0])


def _kept(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """The shape ``after``, whose sizes are 1 or those of ``before``, with the last dimension in its place."""
    sizes = before[len(before) - len(after) :]
    return [old if int(old) == new else new for old, new in zip(sizes, after, strict=True)]


def _smaller(node: fx.Node) -> dict[fx.Node, Tensor]:
    """``node`` and the results that become smaller without it → their values on the meta device; empty if an operation
    that reads one would not broadcast it."""
    smaller = {node: on_meta(node.args[0])}  # type: ignore[arg-type]
    waiting = set(node.users)
    while waiting:
        user = min(waiting)
        waiting.remove(user)
        if user.target is aten.scaled_dot_product_attention.default:
            if not _reads_only_its_mask(user, smaller):
                return {}
            continue
        made = _tried(user, smaller) if _is_elementwise(user, smaller) else None
        if made is None or made.dtype != user.meta["val"].dtype:
            return {}
        if made.shape != user.meta["val"].shape:
            if not is_stable(user):
                return {}
            smaller[user] = made
            waiting.update(user.users)
    return smaller if node.users else {}


def _reads_only_its_mask(attention: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> bool:
    """Return whether an attention reads only its mask among the smaller results."""
    named = arguments_of(attention)
    mask = named.pop("attn_mask", None)
    if not isinstance(mask, fx.Node) or mask not in smaller or smaller.keys() & set(named.values()):
        return False
    return smaller[mask].dim() in _MASK_DIMENSIONS


def _is_elementwise(node: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> bool:
    """Return whether an operation computes each element (an embedding: each row) from the elements at its place."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target is aten.embedding.default:
        return node.args[0] not in smaller
    tags = node.target.tags
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and (torch.Tag.pointwise in tags or operator_of(node).elementwise)


def _tried(node: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The result of an operation with smaller inputs; None if torch refuses them."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: smaller.get(each, on_meta(each)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):
        return None
