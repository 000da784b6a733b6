"""A check of a graph with symbols for sizes of 1, for which torch has traced it without asking."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipegraph.kernels import internals
from pipegraph.kernels.graphs.joint_graph import JointGraph, constant_of


def runs_as_traced(joint: JointGraph, numbers: Sequence[int]) -> bool:
    """Return whether every operation, run on tensors without memory, has the shape and strides that the graph says.

    With symbols, `squeeze` of a dimension leaves it there, and with a size of 1 it does not: then another graph is
    right.
    """
    values: dict[fx.Node, Any] = {}
    with internals.fake_tensors():
        for node in joint.module.graph.nodes:
            expected = _at(node.meta.get("val"), joint, numbers)
            if node.op == "placeholder":
                values[node] = expected
            elif node.op == "get_attr":
                values[node] = constant_of(joint.module, node)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception:  # whatever the operation raises for a shape that it does not take
                    return False
                if not _same(values[node], expected):
                    return False
    return True


def _at(value: Any, joint: JointGraph, numbers: Sequence[int]) -> Any:
    """A node's value for these sizes."""
    if isinstance(value, (tuple, list)):
        return [_at(each, joint, numbers) for each in value]
    if not isinstance(value, Tensor):
        (found,) = joint.sizes.at([value], numbers)
        return found
    shape, strides = joint.sizes.at(value.shape, numbers), joint.sizes.at(value.stride(), numbers)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def _same(value: Any, expected: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if not isinstance(value, Tensor):
        return bool(value == expected)
    strides = zip(value.shape, value.stride(), expected.stride(), strict=True)
    return value.shape == expected.shape and all(size == 1 or own == other for size, own, other in strides)
