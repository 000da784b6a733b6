"""Let what an operation is given for the model's dtype follow it: the dtype of a mask, the least number of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pipegraph.graph.captured import model_dtype, model_number
from pipegraph.graph.internals import OpOverload, schema_arguments
from pipegraph.graph.nodes import OTHER_DTYPE, RELATIVE_DTYPE, RELATIVE_NUMBERS, arguments_of
from pipegraph.graph.passes.tie_casts_to_buffers import FOLLOWS_BUFFER


def follow_created_dtypes(graph: fx.Graph) -> None:
    """Put the model's dtype, and what ``torch.finfo`` says of it, in the place of their values at capture.

    `follow_dtypes` is for casts, which have a value to follow. This is for the others. The source of a stage takes the
    dtype from a value at hand.

    before:  m = zeros([4], dtype=torch.float32);  y = where(x, m, -3.4028234663852886e+38)
    after:   d = model_dtype(torch.float32, torch.bfloat16);  m = zeros([4], dtype=d);  y = where(x, m, model_number(…))
    """
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or FOLLOWS_BUFFER in node.meta:
            continue
        named = arguments_of(node)
        dtypes = (
            node.meta["val"].dtype if isinstance(node.meta["val"], torch.Tensor) else None,
            node.meta.get(OTHER_DTYPE),
        )
        if node.meta.get(RELATIVE_DTYPE) and named.get("dtype") == dtypes[0] != dtypes[1]:
            _replace(node, "dtype", _insert(node, model_dtype, dtypes, dtypes[0]))
        for name, (own, other, limit) in node.meta.get(RELATIVE_NUMBERS, {}).items():
            if named.get(name) == getattr(torch.finfo(own), limit):
                _replace(node, name, _insert(node, model_number, (own, other, limit), named[name]))


def _insert(before: fx.Node, function: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_function(function, arguments)
    kept = ("path", "regions", "in_every_mode", "stack_trace")
    made.meta = {key: before.meta[key] for key in kept if key in before.meta}
    made.meta |= {"val": value, "requires_grad": False, "cut_off": False}
    return made


def _replace(node: fx.Node, name: str, value: fx.Node) -> None:
    """Let an argument of an operation be a value."""
    if name in node.kwargs:
        node.update_kwarg(name, value)
    else:
        assert isinstance(node.target, OpOverload)
        node.update_arg([argument.name for argument in schema_arguments(node.target)].index(name), value)
