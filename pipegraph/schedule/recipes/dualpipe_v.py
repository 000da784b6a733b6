"""DualPipeV (DeepSeek, 2025): a V of stages, in which a forward and a backward of one rank run at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.placement import v
from pipegraph.schedule.recipes.order import Order
from pipegraph.schedule.recipes.recipe import Orders, Recipe, full_pipeline


def orders(ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r holds stages r and 2p−1−r, and at most 2p+1 activations. An F and the B after it may run together.

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2     3F3 0B1 3B3 0I2 0W2 0I3 0W3
    rank 1      1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2     2I3 1I3 2W3 1W3
    """
    return [_order(rank, ranks, microbatches) for rank in range(ranks)]


def overlapped(rows: Orders) -> Iterator[tuple[Action, Action]]:
    """Yield every F with the B right after it, except the last rank's first pair, which starts earlier if divided."""
    for rank, actions in enumerate(rows):
        pairs = [
            (first, second) for first, second in pairwise(actions) if first.kind is Kind.F and second.kind is Kind.B
        ]
        yield from pairs[1:] if rank == len(rows) - 1 else pairs


def _order(rank: int, ranks: int, microbatches: int) -> list[Action]:
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
    orders,
    aliases=("DualPipeV", "ScheduleDualPipeV"),
    chunks=2,
    placement=v,
    rule=full_pipeline(0),
    overlapped=overlapped,
)
