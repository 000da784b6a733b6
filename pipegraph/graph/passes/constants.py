"""Write constants of the model's code where they are read."""

from __future__ import annotations

import math

import torch
from torch import fx

from pipegraph.graph.aliasing import is_stable
from pipegraph.graph.captured import PIPE_SPLITS, VALUE
from pipegraph.graph.nodes import OTHER_DTYPE, shape_of

aten = torch.ops.aten

_FROM_READER = ("path", "regions", "stack_trace", PIPE_SPLITS)


def write_constants(graph: fx.Graph) -> None:
    """Replace a constant of one element by the operation that makes it, for each reader: only then is it no buffer.

    before:  c = get_attr(constant);  y = mul(x, c)      # torch.tensor(64.0) in the model's code
    after:   c = full([], 64.0);  y = mul(x, c)
    """
    for node in list(graph.find_nodes(op="get_attr")):
        number = node.meta.get(VALUE)
        if number is None or math.isnan(number) or not is_stable(node):
            continue
        value = node.meta["val"]
        for reader in list(node.users):
            if reader.op != "call_function":
                continue
            if reader.target is aten.fill_.Tensor:
                reader.target, reader.args = aten.fill_.Scalar, (reader.args[0], number)
                continue
            with graph.inserting_before(reader):
                made = graph.call_function(
                    aten.full.default,
                    (list(shape_of(node)), number),
                    {"dtype": value.dtype, "device": value.device, "pin_memory": False},
                )
            made.meta = {
                "val": value,
                "in_every_mode": False,
                **{key: reader.meta[key] for key in _FROM_READER if key in reader.meta},
                **({OTHER_DTYPE: node.meta[OTHER_DTYPE]} if OTHER_DTYPE in node.meta else {}),
            }
            reader.replace_input_with(node, made)
        if not node.users:
            graph.erase_node(node)
