"""A captured model as ``model.to(dtype)`` would be captured, to price it in that dtype."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import fx

from pipegraph.graph.captured import Captured, model_dtype, model_number
from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE
from pipegraph.torch_private.fake_tensors import fake_empty
from pipegraph.torch_private.pytrees import pytree

_CONVERSIONS: Final = WeakKeyDictionary[Captured, dict[torch.dtype, Captured]]()
"""What `converted` returned: prices of one model are compared operation by operation."""


def dtype_of(captured: Captured) -> torch.dtype | None:
    """Return the floating dtype of most elements of the parameters; None if the model has none."""
    counts: Counter[torch.dtype] = Counter()
    for entry in captured.state.values():
        if entry.kind == "parameter" and entry.dtype.is_floating_point:
            counts[entry.dtype] += entry.numel
    return counts.most_common(1)[0][0] if counts else None


def converted(captured: Captured, dtype: torch.dtype) -> Captured:
    """Return a captured model whose parameters, inputs and values have another floating dtype.

    A value whose dtype does not follow the model's keeps it (``x.float()``), where the capture knows that. Where it
    does not know it (`Captured.graph`, ``other_dtype``), each value in the model's dtype is converted. The same
    arguments give the same object.
    """
    source_dtype = dtype_of(captured)
    if source_dtype in (None, dtype):
        return captured
    conversions = _CONVERSIONS.setdefault(captured, {})
    if dtype not in conversions:
        conversions[dtype] = _convert(captured, source_dtype, dtype)
    return conversions[dtype]


def _convert(captured: Captured, source_dtype: Any, dtype: torch.dtype) -> Captured:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    state = dict(captured.state)
    for node in captured.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.meta.pop(OTHER_DTYPE, None)
        if "val" in node.meta:
            convert = partial(_converted, node=node, source_dtype=source_dtype, dtype=dtype)
            copy.meta["val"] = pytree.tree_map_only(torch.Tensor, convert, node.meta["val"])
        if node.target in (model_dtype, model_number):
            copy.args = (dtype, dtype, *node.args[2:])
            if node.target is model_dtype:
                copy.meta["val"] = dtype
        elif node.meta.get(RELATIVE_DTYPE) or OTHER_DTYPE not in node.meta:
            copy.args, copy.kwargs = pytree.tree_map_only(
                torch.dtype, lambda arg: dtype if arg == source_dtype else arg, (copy.args, copy.kwargs)
            )
        if node.op == "get_attr" and isinstance(copy.meta["val"], torch.Tensor):
            for fqn in captured.names_of.get(str(node.target), [str(node.target)]):
                state[fqn] = replace(state[fqn], dtype=copy.meta["val"].dtype)
    return replace(captured, graph=graph, state=state)


def _converted(value: torch.Tensor, node: fx.Node, source_dtype: Any, dtype: torch.dtype) -> torch.Tensor:
    other_dtype = node.meta.get(OTHER_DTYPE)
    follows = value.dtype == source_dtype and other_dtype != source_dtype
    if not follows:
        return value
    new_value = fake_empty(value, value.shape, dtype, value.stride())
    return new_value.requires_grad_(value.requires_grad)
