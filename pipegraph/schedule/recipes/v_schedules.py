"""Stages in a V, down the ranks and up again: ZB-V and DualPipeV."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Order, Orders, Recipe, full_pipeline
from pipegraph.schedule.stages import v


def zb_v(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r holds stages r and 2p−1−r, at most 2p activations, and is busy from its first action to its last.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    return [_zb_v_order(rank, ranks, microbatches) for rank in range(ranks)]


def _zb_v_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
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
    zb_v,
    aliases=("ZBVZeroBubble", "ScheduleZBVZeroBubble"),
    chunks=2,
    placement=v,
    rule=full_pipeline(-1),
)


def dualpipe_v(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r holds stages r and 2p−1−r, and at most 2p+1 activations. An F and the B after it may run together.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2     3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1      1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2     2I3 1I3 2W3 1W3
    """
    return [_dualpipe_v_order(rank, ranks, microbatches) for rank in range(ranks)]


def _overlapped(rows: Orders) -> Iterator[tuple[Action, Action]]:
    """Yield every F with the B right after it, except the last rank's first pair, which starts earlier if divided."""
    for rank, actions in enumerate(rows):
        pairs = [
            (first, second) for first, second in pairwise(actions) if first.kind is Kind.F and second.kind is Kind.B
        ]
        yield from pairs[1:] if rank == len(rows) - 1 else pairs


def _dualpipe_v_order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """The eight steps of DeepSeek's description, in their order."""
    down, up = rank, 2 * ranks - 1 - rank
    below = ranks - 1 - rank
    order = Order()
    order.repeat(2 * below, (down, Kind.F))
    order.repeat(rank + 1, (down, Kind.F), (up, Kind.F))
    order.repeat(below, (up, Kind.I), (up, Kind.W), (up, Kind.F))
    order.repeat(microbatches - 2 * ranks + rank + 1, (down, Kind.F), (up, Kind.B), (up, Kind.F), (down, Kind.B))
    order.repeat(below, (up, Kind.B), (up, Kind.F), (down, Kind.B))
    # Half of the backwards on both stages are divided. Their weight gradients wait, the oldest first.
    waiting = []
    for number, stage in enumerate((up, down) * (rank + 1)):
        divided = number > rank
        order.add(stage, Kind.I if divided else Kind.B)
        waiting += [stage] * divided
    waiting += [down] * below
    for stage in waiting[:below]:
        order.repeat(1, (stage, Kind.W), (down, Kind.I))
    for stage in waiting[below:]:
        order.add(stage, Kind.W)
    return order.actions


DUALPIPE_V = Recipe(
    "dualpipe-v",
    dualpipe_v,
    aliases=("DualPipeV", "ScheduleDualPipeV"),
    is_compared=False,
    chunks=2,
    placement=v,
    rule=full_pipeline(0),
    overlapped=_overlapped,
)
