"""Stages in a V, down the ranks and up again: ZB-V, DualPipeV, V-Half and V-Min."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.recipes.recipe import Order, Orders, Recipe, full_pipeline
from pipegraph.schedule.stages import v

# ---- zero bubble and dual pipe ---------------------------------------------------------------------------------------


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


# ---- controllable memory ---------------------------------------------------------------------------------------------
# V-Half and V-Min (Pipeline Parallelism with Controllable Memory, Qi et al., 2024): half and a third of 1F1B's memory.
#
# Every microbatch repeats one building block, 6 slots after the microbatch before it. The block gives the slots in
# which a rank does F and I of its two stages; W takes slots that these leave free. The further an F is from its I in
# the block, the more activations a rank holds. At both ends of a step slots stay empty; actions move up into them
# unless the rank would then hold more than before.


_PERIOD = 6  # slots for a microbatch on a rank: F, I and W of two stages

Offsets = tuple[int, int, int, int]
"""The slots of microbatch 0 on a rank: F of its first and second stage, I of its second and first stage."""


def v_half(ranks: int, rank: int) -> Offsets:
    """V-Half: going down takes two slots per rank, going up one. A rank holds at most (p+2)//2 microbatches per stage.

    The later two slots are shifted if they would collide with the first two, modulo the period.
    """
    shift = 3 if ranks % 2 == 0 else 0
    return 2 * rank, 3 * ranks - rank - 2, 3 * ranks + shift + 2 * rank - 1, 6 * ranks + shift - rank - 2


def v_min(ranks: int, rank: int) -> Offsets:
    """V-Min: going down or up takes one slot per rank. A rank holds at most (p+4)//3 microbatches per stage.

    The later two slots are shifted if they would collide with the first two, modulo the period.
    """
    shift = 2 if ranks % 3 == 0 else 0
    return rank, 2 * ranks - rank - 1, 2 * ranks + shift + rank, 4 * ranks + shift - rank - 1


def orders(offsets: Callable[[int, int], Offsets], ranks: int, microbatches: int, chunks: int) -> Orders:
    """Rank r holds stages r and 2p−1−r. This is V-Half, then V-Min:

    rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2
    rank 1      1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2

    rank 0  0F0         3F0 3I0 3W0 0F1 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2     0I2 0W2
    rank 1      1F0 2F0         2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2
    """
    slots = _Slots(ranks, microbatches)
    for rank in range(ranks):
        slots.place_blocks(rank, offsets(ranks, rank))
        slots.fill_weights(rank)
    slots.move_up()
    for rank in range(ranks):
        slots.take_last_weights(rank)
    slots.move_up_gradients()
    for rank in range(ranks):
        slots.fill_weights(rank)
    return [[action for action in row if action is not None] for row in slots.rows]


class _Slots:
    """What each rank does in each slot, and the slots of F and I of each stage and microbatch."""

    def __init__(self, ranks: int, microbatches: int) -> None:
        self.ranks, self.microbatches = ranks, microbatches
        count = _PERIOD * (microbatches + ranks + 2)  # more than any block's last slot, and room for its W
        self.rows: list[list[Action | None]] = [[None] * count for _ in range(ranks)]
        self.slot: dict[Kind, list[list[int]]] = {
            kind: [[0] * microbatches for _ in range(2 * ranks)] for kind in (Kind.F, Kind.I)
        }

    def place_blocks(self, rank: int, offsets: Offsets) -> None:
        down, up = rank, 2 * self.ranks - 1 - rank
        block = zip(offsets, ((down, Kind.F), (up, Kind.F), (up, Kind.I), (down, Kind.I)), strict=True)
        for offset, (stage, kind) in block:
            for j in range(self.microbatches):
                slot = offset + _PERIOD * j
                self.rows[rank][slot] = Action(stage, kind, j)
                self.slot[kind][stage][j] = slot

    def fill_weights(self, rank: int) -> None:
        """Put each W that has no slot into the first free one after its I, the oldest first."""
        row = self.rows[rank]
        placed = {(action.stage, action.microbatch) for action in row if action is not None and action.kind is Kind.W}
        waiting: deque[Action] = deque()
        for slot, action in enumerate(row):
            if action is None:
                if waiting:
                    row[slot] = waiting.popleft()
            elif action.kind is Kind.I and (action.stage, action.microbatch) not in placed:
                waiting.append(Action(action.stage, Kind.W, action.microbatch))

    def take_last_weights(self, rank: int) -> None:
        """Take out each W after the rank's last F: from there on, memory only falls, and I is more urgent."""
        row = self.rows[rank]
        last = max(max(self.slot[Kind.F][stage]) for stage in (rank, 2 * self.ranks - 1 - rank))
        for slot in range(last + 1, len(row)):
            action = row[slot]
            if action is not None and action.kind is Kind.W:
                row[slot] = None

    def move_up(self) -> None:
        """Move every action, in order of time, to the first free slot that its inputs and the rank's peak allow."""
        rank_levels = [_activation_levels(row) for row in self.rows]
        peaks = [max(levels) for levels in rank_levels]
        for slot, rank, action in self._in_time():
            levels, earliest = rank_levels[rank], self._earliest(action)
            if action.kind is Kind.F:  # it is held for longer by every slot it moves
                reach = slot
                while reach > earliest and levels[reach - 1] < peaks[rank]:
                    reach -= 1
                earliest = reach
            new = self._move(rank, slot, earliest, action)
            if action.kind is Kind.F:
                for between in range(new, slot):
                    levels[between] += 1
            elif action.kind is Kind.W:
                for between in range(new + 1, slot + 1):
                    levels[between] -= 1

    def move_up_gradients(self) -> None:
        """Move every I, in order of time, to the first free slot that its inputs allow."""
        for slot, rank, action in self._in_time():
            if action.kind is Kind.I:
                self._move(rank, slot, self._earliest(action), action)

    def _in_time(self) -> Iterator[tuple[int, int, Action]]:
        """Yield (slot, rank, action) of all actions, in order of time. The slots before the current one may change."""
        for slot in range(len(self.rows[0])):
            for rank, row in enumerate(self.rows):
                if (action := row[slot]) is not None:
                    yield slot, rank, action

    def _earliest(self, action: Action) -> int:
        """Return the slot after those of everything that the action needs."""
        stage, j = action.stage, action.microbatch
        if action.kind is Kind.F:
            return self.slot[Kind.F][stage - 1][j] + 1 if stage else 0
        if action.kind is Kind.W:
            return self.slot[Kind.I][stage][j] + 1
        if stage == 2 * self.ranks - 1:
            return self.slot[Kind.F][stage][j] + 1
        return self.slot[Kind.I][stage + 1][j] + 1

    def _move(self, rank: int, slot: int, earliest: int, action: Action) -> int:
        """Move an action to the first free slot from ``earliest`` on, if that comes before its own; return its slot."""
        row = self.rows[rank]
        new = next((free for free in range(earliest, slot) if row[free] is None), slot)
        row[slot], row[new] = None, action
        if action.kind is not Kind.W:
            self.slot[action.kind][action.stage][action.microbatch] = new
        return new


def _activation_levels(row: list[Action | None]) -> list[int]:
    """Return how many activations a rank holds in each slot."""
    levels, level = [], 0
    for action in row:
        level += action is not None and action.kind is Kind.F
        levels.append(level)
        level -= action is not None and action.kind is Kind.W
    return levels


def _recipe(name: str, offsets: Callable[[int, int], Offsets]) -> Recipe:
    return Recipe(name, partial(orders, offsets), chunks=2, placement=v, rule=full_pipeline(-1), is_compared=False)


V_HALF = _recipe("v-half", v_half)
V_MIN = _recipe("v-min", v_min)
