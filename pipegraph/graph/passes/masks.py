"""Masks that are the same for every input, in the words of a person: causal, a sliding window, or none at all.

A model may make its causal mask of a page of comparisons of positions; its attention then gets the mask instead of
``is_causal=True``, and every stage repeats the recipe. What such a recipe gives is fixed, so it is computed here and,
where it is a band of the matrix, written as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pipegraph.graph.nodes import arguments_of

aten = torch.ops.aten

# A plain form has no more operations; what takes fewer (``positions > 0``) stays as it is.
_OPERATIONS = 4
# The largest tensor that is computed while capturing: the mask of 8,192 tokens.
_LARGEST = 2**26


@dataclass(frozen=True)
class _Band:
    """A [rows, columns] mask that is true where ``lowest`` ≤ column − row ≤ ``highest``."""

    rows: int
    columns: int
    lowest: int
    highest: int

    @property
    def is_full(self) -> bool:
        return self.has_no_lower_end and self.highest == self.columns - 1

    @property
    def is_causal(self) -> bool:
        return self.has_no_lower_end and self.highest == 0 and self.rows == self.columns

    @property
    def has_no_lower_end(self) -> bool:
        return self.lowest == 1 - self.rows


def plain_masks(graph: fx.Graph) -> None:
    """graph → graph: fixed masks become ``torch.ones(…).tril()`` and the like, a causal one of an attention
    ``is_causal=True``; one that masks nothing goes."""
    unknown: set[fx.Node] = set()
    bands: dict[fx.Node, _Band] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _is_fixed(node, unknown):
            unknown.add(node)
        elif _is_mask(node) and _leaves_masks(node, unknown):
            band = _band(_computed(node))
            if band is not None and _recipe(node) > _OPERATIONS:
                bands[_write(node, band)] = band
    for mask, band in bands.items():
        for user in list(mask.users):
            _simplify_use(user, mask, band)


def _is_fixed(node: fx.Node, unknown: set[fx.Node]) -> bool:
    """Whether an operation gives the same for every input, and is small enough to try."""
    target, value = node.target, node.meta.get("val")
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._schema.is_mutable:
        return False
    if not isinstance(value, torch.Tensor) or value.numel() > _LARGEST or node.meta["regions"]:
        return False
    random = torch.Tag.nondeterministic_seeded in target.tags or target.overloadpacket in (aten.empty, aten.empty_like)
    return not random and not any(parent in unknown for parent in node.all_input_nodes)


def _is_mask(node: fx.Node) -> bool:
    value = node.meta["val"]
    return bool(value.dtype == torch.bool and value.dim() >= 2 and min(value.shape[-2:]) > 1)


def _leaves_masks(node: fx.Node, unknown: set[fx.Node]) -> bool:
    """Whether something that is no fixed mask itself reads a fixed mask; inside a recipe nothing does."""
    return any(not (user.op == "call_function" and _is_fixed(user, unknown) and _is_mask(user)) for user in node.users)


def _recipe(node: fx.Node) -> int:
    """How many operations serve no purpose but to make ``node``."""
    own = {node}
    waiting = list(node.all_input_nodes)
    while waiting:
        parent = waiting.pop(0)
        if parent.op == "call_function" and own.issuperset(parent.users):
            own.add(parent)
            waiting.extend(parent.all_input_nodes)
    return len(own)


def _computed(node: fx.Node) -> torch.Tensor:
    """The value of a fixed operation. What it is made of is let go as soon as it has been read: one such value may take
    half a gigabyte."""
    made: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each not in made:
            made.add(each)
            waiting.extend(each.all_input_nodes)
    order = sorted(made)
    last = {parent: each for each in order for parent in each.all_input_nodes}
    values: dict[fx.Node, torch.Tensor] = {}
    for each in order:
        args, kwargs = fx.map_arg((each.args, each.kwargs), values.__getitem__)
        kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
        with torch.no_grad():
            values[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        del args, kwargs
        for parent in each.all_input_nodes:
            if last[parent] is each:
                del values[parent]
    return values[node]


def _band(mask: torch.Tensor) -> _Band | None:
    """The band that every [rows, columns] matrix of a mask is; None for any other pattern.

    Every diagonal starts in the first column or the first row: these say where the band would lie.
    """
    rows, columns = mask.shape[-2:]
    matrix = mask[(0,) * (mask.dim() - 2)]
    held = torch.cat([matrix[1:, 0].flip(0), matrix[0]]).nonzero()
    if not held.numel():
        return None
    band = _Band(rows, columns, int(held[0]) - (rows - 1), int(held[-1]) - (rows - 1))
    same = torch.equal(matrix, torch.ones(rows, columns, dtype=torch.bool).tril_(band.highest).triu_(band.lowest))
    return band if same and torch.equal(mask, matrix.expand(mask.shape)) else None


def _write(node: fx.Node, band: _Band) -> fx.Node:
    """Put the plain form in the place of ``node``."""
    value = node.meta["val"]
    sizes = [band.rows, band.columns]
    kwargs = {"dtype": torch.bool, "device": value.device, "pin_memory": False}
    made = _insert(node, aten.ones.default, (sizes,), sizes, kwargs)
    if band.highest < band.columns - 1:
        made = _insert(node, aten.tril.default, (made, *_unless_zero(band.highest)), sizes)
    if not band.has_no_lower_end:
        made = _insert(node, aten.triu.default, (made, *_unless_zero(band.lowest)), sizes)
    if list(value.shape) != sizes:
        made = _insert(node, aten.expand.default, (made, list(value.shape)), value.shape)
    node.replace_all_uses_with(made)
    return made


def _unless_zero(diagonal: int) -> tuple[int, ...]:
    return (diagonal,) if diagonal else ()


def _insert(
    before: fx.Node,
    target: torch._ops.OpOverload,
    args: tuple[Any, ...],
    sizes: Sequence[int],
    kwargs: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.bool,
) -> fx.Node:
    """An operation before ``before``, in the same call and on the same line of the model's source."""
    with before.graph.inserting_before(before):
        made = before.graph.call_function(target, args, kwargs or {})
    value = before.meta["val"]
    with value.fake_mode:
        made.meta = {**before.meta, "val": torch.empty(tuple(sizes), dtype=dtype, device=value.device)}
    return made


def _simplify_use(user: fx.Node, mask: fx.Node, band: _Band) -> None:
    if user.target is aten.scaled_dot_product_attention.default:
        named = arguments_of(user)
        if named.get("attn_mask") is not mask or named.get("is_causal") or not (band.is_full or band.is_causal):
            return
        user.args = tuple(named.pop(name) for name in ("query", "key", "value"))
        user.kwargs = {name: value for name, value in named.items() if name != "attn_mask"}
        if not band.is_full:
            user.kwargs = {**user.kwargs, "is_causal": True}
    elif user.target in (aten.where.self, aten.where.ScalarOther) and user.args[0] is mask and band.is_full:
        kept, value = user.args[1], user.meta["val"]
        if isinstance(kept, fx.Node) and kept.meta["val"].dtype == value.dtype:
            if kept.meta["val"].shape != value.shape:
                kept = _insert(user, aten.expand.default, (kept, list(value.shape)), value.shape, dtype=value.dtype)
            user.replace_all_uses_with(kept)
