"""Write repeated heads with ``repeat_interleave``."""

from __future__ import annotations

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.nodes import shape_of
from pipegraph.graph.operators import View, operator_of

aten = torch.ops.aten
Sizes = tuple[int, ...]


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


def _repeats(before: Sizes, expanded: Sizes, after: Sizes, dim: int) -> int:
    """Return how often each entry along ``dim`` occurs in ``after``; 0 if anything else changes."""
    if dim < 0:
        return 0
    repeats = expanded[dim + 1]
    same = expanded == (*before[: dim + 1], repeats, *before[dim + 1 :])
    return repeats if same and after == (*before[:dim], before[dim] * repeats, *before[dim + 1 :]) else 0
