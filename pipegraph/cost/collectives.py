"""What collectives between ranks take, from the links of a profile."""

from __future__ import annotations

from pipegraph.cost.hardware import Links

GATHER, REDUCE, ALL_REDUCE, ALL_GATHER = "gather", "reduce", "all_reduce", "all_gather"
"""The ways of ranks along dp_shard, those of their replicas, and of ranks along tp."""


def collective_seconds(links: Links, kind: str, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of a collective, as it was measured between such ranks.

    What was not measured is that of a ring: n ranks pass parts of ``size / n`` bytes on n − 1 times to gather or to
    scatter them, and twice as often to reduce all (Patarasuk and Yuan, 2009).

    Args:
        links: of the profile.
        kind: one of the four above.
        size: bytes of the whole tensor.
        ranks: how many there are.
        stride: how far apart they are numbered.
    """
    if ranks == 1 or not size:
        return 0.0
    link = links.among(rank * stride for rank in range(ranks))
    seconds = {
        GATHER: link.gather_seconds,
        REDUCE: link.reduce_seconds,
        ALL_REDUCE: link.all_reduce_seconds,
        ALL_GATHER: link.all_gather_seconds,
    }
    return seconds[kind](size, ranks)
