"""ZB-V (Zero Bubble Pipeline Parallelism, Qi et al., 2023): no bubble if F, I and W take equal time."""

from __future__ import annotations

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.placement import v
from pipegraph.schedule.recipes.order import Order
from pipegraph.schedule.recipes.recipe import Orders, Recipe, full_pipeline


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r holds stages r and 2p−1−r, at most 2p activations, and is busy from its first action to its last.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    return [_order(rank, ranks, microbatches) for rank in range(ranks)]


def _order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - 1 - rank
    order = Order()
    # Warm-up: until the first microbatches have come back up.
    order.repeat(2 * below + 1, (down, Kind.F))
    order.repeat(rank, (up, Kind.F), (down, Kind.F))
    order.repeat(below + 1, (up, Kind.F), (up, Kind.I), (up, Kind.W))
    # Steady: all six in turn, at the end without the F of the first stage.
    order.repeat(
        microbatches - 2 * ranks + 1 + rank,
        *((stage, kind) for stage in (down, up) for kind in (Kind.F, Kind.I, Kind.W)),
    )
    order.repeat(below, (down, Kind.I), (down, Kind.W), *((up, kind) for kind in (Kind.F, Kind.I, Kind.W)))
    # Drain: first the input gradients, for which other ranks wait.
    order.repeat(rank, (down, Kind.I), (up, Kind.I))
    order.repeat(below + 1, (down, Kind.I), (down, Kind.W))
    order.repeat(rank, (up, Kind.W))
    order.repeat(rank, (down, Kind.W))
    return order.actions


ZB_V = Recipe(
    "zb-v",
    orders,
    aliases=("ZBVZeroBubble", "ScheduleZBVZeroBubble"),
    chunks=2,
    placement=v,
    rule=full_pipeline(-1),
)
