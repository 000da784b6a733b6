"""What collectives between ranks take, from the links of a profile."""

from __future__ import annotations

from pipegraph.cost.hardware import Links

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all_reduce", "all_gather", "reduce_scatter"


def collective_seconds(links: Links, kind: str, size: float, ranks: int, stride: int = 1) -> float:
    """Return the seconds of a collective over a ring of ranks.

    A ring of n ranks passes parts of ``size / n`` bytes on n − 1 times to gather or to scatter them, and twice as often
    to reduce all (Patarasuk and Yuan, 2009). Its slowest link counts.

    Args:
        links: of the profile.
        kind: one of the three above.
        size: bytes of the whole tensor.
        ranks: how many there are.
        stride: how far apart they are numbered.
    """
    if ranks == 1 or not size:
        return 0.0
    steps = (ranks - 1) * (2 if kind == ALL_REDUCE else 1)
    ring = [(rank * stride, (rank + 1) % ranks * stride) for rank in range(ranks)]
    return max(steps * links.between(*pair).seconds(size / ranks) for pair in ring)
