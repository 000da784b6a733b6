"""The way of each value from the stage that computes it to those that take it: it crosses to each rank once.

stage 0 (rank 0) ─ h ─▶ stage 1 (rank 1)          stage 1 hands h on to stage 2, on its own rank, and adds the
                           └─ h ─▶ stage 2         gradient of h that comes back from there to its own
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipegraph.package.manifest import Manifest

Edge = tuple[int, int]


def routes(manifest: Manifest, placement: Sequence[int]) -> dict[Edge, tuple[str, ...]]:
    """Return the edges between stages with the names of the values on each, in the order of the taker's inputs.

    Of several stages on one rank that take a value from another rank, the first receives it, and hands it on to those
    that come after it in every order of the pipeline: those that it leads to.

    Args:
        manifest: of the package.
        placement: the rank of each stage.
    """
    leads_to = _leads_to(len(manifest.stages), manifest.edges())
    edges: dict[Edge, list[str]] = defaultdict(list)
    for taker, stage in enumerate(manifest.stages):
        for name in stage.inputs:
            value = manifest.values[name]
            if value.producer < 0:
                continue
            on_rank = (consumer for consumer in value.consumers if placement[consumer] == placement[taker])
            first = min(on_rank, default=taker)
            relays = placement[value.producer] != placement[taker] and taker in leads_to[first]
            edges[first if relays else value.producer, taker].append(name)
    return {edge: tuple(names) for edge, names in sorted(edges.items())}


def gradient_routes(manifest: Manifest, edges: dict[Edge, tuple[str, ...]]) -> tuple[Edge, ...]:
    """Return the edges over which a gradient returns: at least one of their values requires one."""
    return tuple(edge for edge, names in edges.items() if any(manifest.values[name].requires_grad for name in names))


def _leads_to(stages: int, edges: Iterable[Edge]) -> list[set[int]]:
    """The stages that cannot run before each stage has run. Edges ascend."""
    takers: dict[int, list[int]] = defaultdict(list)
    for producer, consumer in edges:
        takers[producer].append(consumer)
    leads_to: list[set[int]] = [set() for _ in range(stages)]
    for stage in reversed(range(stages)):
        for taker in takers[stage]:
            leads_to[stage] |= {taker} | leads_to[taker]
    return leads_to
