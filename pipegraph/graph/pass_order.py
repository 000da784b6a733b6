"""The passes over an exported graph, in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter

from torch import fx

from pipegraph.debug import dump, verifying
from pipegraph.graph.captured import StateEntry
from pipegraph.graph.graph_text import graph_text
from pipegraph.graph.passes.constants import simplify_masks, write_constants
from pipegraph.graph.passes.dtypes import (
    drop_redundant_dtypes,
    follow_created_dtypes,
    follow_dtypes,
    tie_casts_to_buffers,
)
from pipegraph.graph.passes.gradients import mark_gradients
from pipegraph.graph.passes.redundant_operations import (
    drop_assertions,
    drop_dead_code,
    drop_identities,
    restore_grouped_products,
)
from pipegraph.graph.passes.views import (
    cancel_views,
    drop_contiguous,
    drop_expands,
    relax_attention_views,
    restore_repeat_interleave,
)
from pipegraph.graph.passes.writes import (
    drop_write_backs,
    functionalize_writes,
    place_buffer_updates,
    read_buffers_anew,
)
from pipegraph.graph.verifier import GraphVerifier, Pass
from pipegraph.units import format_seconds

PASSES: tuple[Pass, ...] = (
    tie_casts_to_buffers,
    follow_dtypes,
    restore_grouped_products,
    drop_assertions,
    drop_identities,
    drop_redundant_dtypes,
    simplify_masks,
    place_buffer_updates,
    drop_write_backs,
    functionalize_writes,
    read_buffers_anew,
    drop_identities,  # again: x + 0 is an identity only when nothing writes into its result any longer
    write_constants,
    cancel_views,
    drop_contiguous,
    drop_expands,
    restore_repeat_interleave,
    drop_dead_code,
    mark_gradients,
    relax_attention_views,
    follow_created_dtypes,
)
"""The passes over an exported graph, in their order. After them it reads as a person would have written it."""


def run_all_passes(graph: fx.Graph, state: Mapping[str, StateEntry], prefix: str = "") -> None:
    """Run `PASSES`, as `run_passes` does."""
    run_passes(graph, PASSES, state, prefix)


def run_passes(graph: fx.Graph, passes: Sequence[Pass], state: Mapping[str, StateEntry], prefix: str = "") -> None:
    """Run passes in order. After each the graph is dumped and verified, if the environment asks for it.

    Args:
        prefix: what the names of dumped files begin with.
    """
    verifier = GraphVerifier(state) if verifying() else None
    for graph_pass in passes:
        name = getattr(graph_pass, "func", graph_pass).__name__
        begin = perf_counter()
        graph_pass(graph)
        seconds = perf_counter() - begin
        dump(prefix + name, lambda: graph_text(graph.nodes, f"{name}: {format_seconds(seconds)}"))  # noqa: B023
        if verifier is not None:
            verifier.check(graph, graph_pass, name)
