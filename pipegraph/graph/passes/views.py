"""Changes of shape as a person would write them: none that changes nothing, copies or expands without need, and heads
repeated by name. Each pass changes the graph in place, and leaves alone what shares memory with a write."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.export.call_arguments import copy_places
from pipegraph.graph.nodes import arguments_of, on_meta
from pipegraph.graph.passes.view_layouts import any_layout

aten = torch.ops.aten

_RESHAPES = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unflatten.int)
_VIEWS = (
    *_RESHAPES,
    *(aten.transpose.int, aten.permute.default, aten.t.default),
    *(aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
)
# Pointwise, although torch does not tag them so.
_ELEMENTWISE = (aten.where, aten.masked_fill, aten.to, aten.contiguous)
# The dimensions of a mask with which attention has all its kernels.
_MASK_DIMENSIONS = (2, 4)


def plain_views(graph: fx.Graph) -> None:
    """Run all passes, in their order."""
    drop_returns(graph)
    drop_copies(graph)
    drop_expands(graph)
    repeat_by_name(graph)


def drop_returns(graph: fx.Graph) -> None:
    """Take out a reshape to the shape that is there, and two views of which the second takes the first back."""
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        before = node.args[0]
        if node.target in _RESHAPES and _shape(before) == _shape(node):
            same = before
        elif before.target in _VIEWS and _takes_back(before, node):
            same = before.args[0]
        else:
            continue
        if is_stable(node):
            _replace(node, same)


def _takes_back(first: fx.Node, second: fx.Node) -> bool:
    """Whether every element stands after two views where it stood before."""
    tensor = torch.empty(_shape(first.args[0]), device="meta")
    after = any_layout(second)(any_layout(first)(tensor, *first.args[1:]), *second.args[1:])
    return bool(after.shape == tensor.shape and after.stride() == tensor.stride() and after._is_view())


def _shape(node: object) -> torch.Size:
    assert isinstance(node, fx.Node)
    return node.meta["val"].shape


def _replace(node: fx.Node, value: object) -> None:
    assert isinstance(value, fx.Node)
    copy_places(node, value)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def drop_copies(graph: fx.Graph) -> None:
    """Take out ``.contiguous()`` before a reshape, which copies where it has to; a ``view`` becomes one."""
    for node in list(graph.nodes):
        if node.target is not aten.contiguous.default or len(node.args) > 1 or node.kwargs:
            continue
        users, source = list(node.users), node.args[0]
        if all(_copies_anyway(user, source) for user in users) and is_stable(node):
            for user in users:
                user.target = any_layout(user)
            _replace(node, source)


def _copies_anyway(node: fx.Node, source: object) -> bool:
    """Whether a reshape gives contiguous memory although what it reads is not."""
    if node.target not in (aten.view.default, aten.reshape.default, aten.flatten.using_ints):
        return False
    assert isinstance(source, fx.Node)
    return bool(any_layout(node)(on_meta(source), *node.args[1:]).is_contiguous())


def drop_expands(graph: fx.Graph) -> None:
    """Take out an ``expand`` where all that reads the tensor broadcasts it; what is computed on the way is then
    computed once, not for every copy: the masks of a batch."""
    for node in list(graph.nodes):
        if node.target is not aten.expand.default or not is_stable(node):
            continue
        for inner, made in _smaller(node).items():
            with inner.meta["val"].fake_mode:
                inner.meta["val"] = torch.empty_like(made, device=inner.meta["val"].device)
            if inner is node:
                _replace(node, node.args[0])


def _smaller(node: fx.Node) -> dict[fx.Node, Tensor]:
    """``node`` and the results that become smaller without its ``expand``, with their values on the meta device; none
    where anything that reads them would not broadcast them."""
    smaller = {node: on_meta(node.args[0])}  # type: ignore[arg-type]
    waiting = set(node.users)
    while waiting:
        user = min(waiting)
        waiting.remove(user)
        if user.target is aten.scaled_dot_product_attention.default:
            if not _is_mask_alone(user, smaller):
                return {}
            continue
        made = _tried(user, smaller) if _is_elementwise(user, smaller) else None
        if made is None or made.dtype != user.meta["val"].dtype:
            return {}
        if made.shape != _shape(user):
            if not is_stable(user):
                return {}
            smaller[user] = made
            waiting.update(user.users)
    return smaller if node.users else {}


def _is_mask_alone(attention: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> bool:
    """Whether an attention reads of the smaller results only its mask."""
    named = arguments_of(attention)
    mask = named.pop("attn_mask", None)
    if not isinstance(mask, fx.Node) or mask not in smaller or smaller.keys() & set(named.values()):
        return False
    return smaller[mask].dim() in _MASK_DIMENSIONS


def _is_elementwise(node: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> bool:
    """Whether an operation computes each element (or, for an embedding, each row) from those at its place."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target is aten.embedding.default:
        return node.args[0] not in smaller
    tags = node.target.tags
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and (torch.Tag.pointwise in tags or node.target.overloadpacket in _ELEMENTWISE)


def _tried(node: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The result of an operation with smaller inputs; None where torch refuses them."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: smaller.get(each, on_meta(each)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):
        return None


def repeat_by_name(graph: fx.Graph) -> None:
    """``x.unsqueeze(2).expand(…).reshape(…)`` → ``x.repeat_interleave(2, dim=1)``, which runs the same kernels."""
    for node in list(graph.nodes):
        if node.target not in (aten.reshape.default, aten.flatten.using_ints):
            continue
        expand = node.args[0]
        unsqueeze = expand.args[0] if expand.target is aten.expand.default else None
        if unsqueeze is None or unsqueeze.target is not aten.unsqueeze.default or not is_stable(node):
            continue
        source = unsqueeze.args[0]
        dim = unsqueeze.args[1] % len(_shape(unsqueeze)) - 1
        repeats = _repeats(_shape(source), _shape(expand), _shape(node), dim)
        # One head alone can be expanded without a copy, which repeating it makes.
        if repeats > 1 and _shape(source)[dim] > 1:
            node.target, node.args = aten.repeat_interleave.self_int, (source, repeats, dim)


def _repeats(before: torch.Size, expanded: torch.Size, after: torch.Size, dim: int) -> int:
    """How often each entry along ``dim`` stands in ``after``, if nothing else changes; otherwise 0."""
    if dim < 0:
        return 0
    repeats = expanded[dim + 1]
    same = expanded == (*before[: dim + 1], repeats, *before[dim + 1 :])
    return repeats if same and after == (*before[:dim], before[dim] * repeats, *before[dim + 1 :]) else 0
