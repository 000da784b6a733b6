"""Take out a dtype that an operation would give unasked."""

from __future__ import annotations

from torch import fx

from pipegraph.graph.internals import schema_arguments
from pipegraph.graph.nodes import OTHER_DTYPE, arguments_of
from pipegraph.graph.operators import operator_of


def drop_redundant_dtypes(graph: fx.Graph) -> None:
    """Leave out the argument ``dtype`` if it is the dtype of the first argument.

    After ``.to(torch.bfloat16)`` it would no longer be, and the cast back, which did nothing at capture, is gone. On
    bfloat16 these operations compute in float32 without being asked.

    before:  softmax(x, -1, torch.float32)                   with a float32 x
    after:   softmax(x, -1)
    """
    for node in graph.nodes:
        if not operator_of(node).optional_dtype:
            continue
        source = node.args[0].meta["val"]
        follows = OTHER_DTYPE not in node.meta or node.meta[OTHER_DTYPE] == node.args[0].meta.get(OTHER_DTYPE)
        if follows and source.is_floating_point() and arguments_of(node).get("dtype") == source.dtype:
            position = [argument.name for argument in schema_arguments(node.target)].index("dtype")
            node.args = node.args[:position]
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}
