"""Refuse what no cut of the batch into microbatches gets right."""

from __future__ import annotations

from torch import fx

from pipegraph.errors import CaptureError
from pipegraph.graph.export.dynamic_shapes import BATCH
from pipegraph.graph.nodes import arguments_of, shape_of, source_line
from pipegraph.graph.operators import operator_of
from pipegraph.graph.symbolic_size import SymbolicSize


def refuse_flat_bags(graph: fx.Graph) -> None:
    """Refuse bags that begin at offsets of each row, in indices of all rows one after the other. Offsets would be cut
    with the batch, and indices go whole to each microbatch: ``F.embedding_bag(indices, weight, offsets)``.

    Raises CaptureError.
    """
    for node in graph.nodes:
        if operator_of(node).spelling != "embedding_bag":
            continue
        named = arguments_of(node)
        if _is_of_the_batch(named["offsets"]) and not _is_of_the_batch(named["indices"]):
            raise CaptureError(
                f"{source_line(node)}: offsets have an entry for each row, and the indices of all rows are one "
                "tensor, which cannot be cut into microbatches along rows.\nTry: bags of one length, as indices of the "
                "shape [batch, length] without offsets, with padding_idx= for rows that have fewer."
            )


def _is_of_the_batch(value: fx.Node) -> bool:
    """Return whether a size of a value follows from the batch."""
    return any(isinstance(size, SymbolicSize) and BATCH in map(str, size.symbols) for size in shape_of(value))
