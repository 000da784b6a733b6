"""Write changes of shape and memory layout as a person would, and none that does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.calls import replace_node
from pipegraph.graph.nodes import any_layout, arguments_of, on_meta, set_value, shape_of
from pipegraph.graph.operators import View, operator_of
from pipegraph.torch_private.operators import OpOverload
from pipegraph.torch_private.tensors import is_view

aten = torch.ops.aten

# The dimensions of a mask with which attention has all its kernels.
_MASK_DIMENSIONS = (2, 4)

Sizes = tuple[int, ...]


def cancel_views(graph: fx.Graph) -> None:
    """Take out a reshape to the shape that is there, and two views of which the second undoes the first.

    before:  a = transpose(x, 1, 2);  b = transpose(a, 1, 2);  c = view(b, [8, 64])      with x [8, 64]
    after:   x in the place of c
    """
    for node in list(graph.nodes):
        view, source = operator_of(node).view, node.args[0] if node.args else None
        if view is None or not isinstance(source, fx.Node):
            continue
        if view is View.RESHAPE and shape_of(source) == shape_of(node):
            replacement = source
        elif operator_of(source).view is not None and _is_undone(source, node):
            replacement = source.args[0]  # type: ignore[assignment]
        else:
            continue
        if is_stable(node):
            replace_node(node, replacement)


def _is_undone(first: fx.Node, second: fx.Node) -> bool:
    """Return whether the second view undoes the first: every element is back in its place."""
    if shape_of(first.args[0]) != shape_of(second):
        return False
    tensor = torch.empty(shape_of(first.args[0]), device="meta")
    result = any_layout(second)(any_layout(first)(tensor, *first.args[1:]), *second.args[1:])
    return bool(result.shape == tensor.shape and result.stride() == tensor.stride() and is_view(result))


def drop_contiguous(graph: fx.Graph) -> None:
    """Take out ``.contiguous()`` if only reshapes read it, which copy if they have to.

    before:  a = contiguous(x);  b = view(a, [8, 512])       with x [8, 64, 8], transposed
    after:   b = reshape(x, [8, 512])
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.contiguous.default or len(node.args) > 1 or node.kwargs:
            continue
        users, source = list(node.users), node.args[0]
        if all(_copies_anyway(user, source) for user in users) and is_stable(node):
            for user in users:
                user.target = any_layout(user)
            replace_node(node, source)


def _copies_anyway(node: fx.Node, source: object) -> bool:
    """Return whether a reshape gives contiguous memory although what it reads is not."""
    if operator_of(node).view is not View.RESHAPE:
        return False
    assert isinstance(source, fx.Node)
    return bool(any_layout(node)(on_meta(source), *node.args[1:]).is_contiguous())


def drop_expands(graph: fx.Graph) -> None:
    """Take out an ``expand`` if everything that reads the tensor broadcasts it. Operations on the way
    then run once and not for every copy, such as the masks of a batch.

    before:  a = expand(mask, [8, 1, 64, 64]);  b = logical_not(a);  c = where(b, x, 0)      with mask [1, 1, 64, 64]
    after:   b = logical_not(mask);  c = where(b, x, 0)
    """
    for node in list(graph.nodes):
        if node.target is not aten.expand.default or not is_stable(node):
            continue
        for inner, tensor in _smaller(node).items():
            set_value(inner, _smaller_shape(shape_of(inner), tensor.shape), tensor.dtype, tensor.stride())
            if inner is node:
                replace_node(node, node.args[0])


def _smaller_shape(shape: Sequence[int], new_shape: Sequence[int]) -> list[int]:
    """The shape ``new_shape``, whose sizes are 1 or those of ``shape``, with the last dimension in its place."""
    sizes = shape[len(shape) - len(new_shape) :]
    return [old if int(old) == new else new for old, new in zip(sizes, new_shape, strict=True)]


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
        result = _tried(user, smaller) if _is_elementwise(user, smaller) else None
        if result is None or result.dtype != user.meta["val"].dtype:
            return {}
        if result.shape != user.meta["val"].shape:
            if not is_stable(user):
                return {}
            smaller[user] = result
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
    """Return whether an operation computes each element (an embedding: each row) from the elements at its place, or
    writes it there."""
    if not isinstance(node.target, OpOverload):
        return False
    if node.target in (aten.embedding.default, aten.copy_.default):
        return node.args[0] not in smaller
    tags = node.target.tags
    random = torch.Tag.nondeterministic_seeded in tags
    return not random and (torch.Tag.pointwise in tags or operator_of(node).elementwise)


def _tried(node: fx.Node, smaller: Mapping[fx.Node, Tensor]) -> Tensor | None:
    """The result of an operation with smaller inputs; None if torch refuses them."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: smaller.get(argument, on_meta(argument)))
    try:
        with torch.no_grad():
            return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError):
        return None


def restore_repeat_interleave(graph: fx.Graph) -> None:
    """Replace an expanded and merged dimension by ``repeat_interleave``, which runs the same kernels.

    before:  a = unsqueeze(x, 2);  b = expand(a, [8, 2, 4, 64]);  c = reshape(b, [8, 8, 64])      with x [8, 2, 64]
    after:   c = repeat_interleave(x, 4, 1)                       # a and b are dead
    """
    for node in list(graph.nodes):
        if operator_of(node).view is not View.RESHAPE:
            continue
        expand = node.args[0]
        unsqueeze = expand.args[0] if expand.target is aten.expand.default else None
        if unsqueeze is None or unsqueeze.target is not aten.unsqueeze.default or not is_stable(node):
            continue
        source = unsqueeze.args[0]
        dim = unsqueeze.args[1] % len(shape_of(unsqueeze)) - 1
        repeats = _repeats(shape_of(source), shape_of(expand), shape_of(node), dim)
        # A dimension of size 1 can be expanded without the copy that repeating it makes.
        if repeats > 1 and shape_of(source)[dim] > 1:
            node.target, node.args = aten.repeat_interleave.self_int, (source, repeats, dim)


def _repeats(shape: Sizes, expanded: Sizes, merged: Sizes, dim: int) -> int:
    """Return how often each entry along ``dim`` occurs in ``merged``; 0 if anything else changes."""
    if dim < 0:
        return 0
    repeats = expanded[dim + 1]
    is_expanded = expanded == (*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return repeats if is_expanded and merged == (*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :]) else 0


def relax_attention_views(graph: fx.Graph) -> None:
    """Turn a ``view`` of attention's result into ``reshape``, which takes any layout.

    The kernel that attention calls decides how its result lies in memory, and another device, dtype or mode calls
    another one. A ``contiguous()`` in the model's code is not in the graph if it did nothing at capture.

    before:  a = scaled_dot_product_attention(q, k, v);  b = transpose(a, 1, 2);  c = view(b, [2, 8, 512])
    after:   a = scaled_dot_product_attention(q, k, v);  b = transpose(a, 1, 2);  c = reshape(b, [2, 8, 512])
    """
    for node in graph.nodes:
        if node.target is aten.view.default and _is_attention(node.args[0]):
            node.target = aten.reshape.default


def _is_attention(node: Any) -> bool:
    while node.target in (aten.transpose.int, aten.permute.default):
        node = node.args[0]
    return bool(node.target is aten.scaled_dot_product_attention.default)
