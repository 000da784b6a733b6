"""The actions of a schedule, run one after the other in time slots, and drawn there.

actions ──▶ replay: when each starts ──▶ slots ──▶ grid: a row per rank, a column per time slot
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from pipegraph.schedule.action import Kind
from pipegraph.schedule.action_arrays import KINDS, SEND_F, ActionArrays, Integers

UNIT = dict.fromkeys(Kind, 1)
"""Every action takes one time slot, as in the grid of a schedule."""

NEVER = -1

# What a marked grid shows of a large schedule.
_SLOTS_BEFORE, _SLOTS_AFTER, _RANKS_AROUND = 10, 2, 2
_FEW_RANKS = 16  # up to this number, all ranks are shown


def replay(arrays: ActionArrays, durations: Mapping[Kind, int] = UNIT) -> Integers:
    """Return when each action starts; NEVER for those that cannot run, whatever the durations are.

    An action starts as soon as its rank has ended the one before and everything it needs is available. The result of an
    action that computes is available when the action ends. A transfer needs its partner, and is available to it as soon
    as its rank arrives: both ends start together, a blocking rendezvous. Two adjacent actions of an overlapped pair
    count as one: it begins when both have what they need, and both results are available at its end.
    """
    duration = np.array([durations[kind] for kind in KINDS])[arrays.kind].tolist()
    transfers = (arrays.kind >= SEND_F).tolist()
    paired = set(arrays.pairs.tolist())
    first, needs = _needs_to_wait_for(arrays)
    bounds = arrays.bounds
    starts = [NEVER] * arrays.count
    available = [NEVER] * (arrays.count + 1)  # from when on each result is; the last: never
    waiting: dict[int, list[int]] = {}  # action → the ranks that wait for it
    position, clock = list(bounds[:-1]), [0] * len(arrays.actions)
    free = list(range(len(arrays.actions)))
    while free:
        rank = free.pop()
        time, number, end = clock[rank], position[rank], bounds[rank + 1]
        while number < end:
            if transfers[number]:
                available[number] = time
                if number in waiting:
                    free += waiting.pop(number)
            start = time
            for need in needs[first[number] : first[number + 1]]:
                if available[need] == NEVER:
                    waiting.setdefault(need, []).append(rank)
                    break
                start = max(start, available[need])
            else:
                starts[number] = start
                time = start + duration[number]
                if not transfers[number] and number not in paired:
                    for done in (number - 1, number) if number - 1 in paired else (number,):
                        available[done] = time
                        if done in waiting:
                            free += waiting.pop(done)
                number += 1
                continue
            break
        clock[rank], position[rank] = time, number
    return np.array(starts, np.int64)


def slots(arrays: ActionArrays) -> list[list[int]]:
    """Return each rank's time slots, one per action. Actions that can never run follow in order after all that can."""
    starts = replay(arrays)
    end = int(starts.max(initial=-1)) + 1
    rows = []
    for first, last in pairwise(arrays.bounds):
        row = starts[first:last]
        ran = int((row != NEVER).sum())
        rows.append([*row[:ran].tolist(), *range(end, end + last - first - ran)])
    return rows


def _needs_to_wait_for(arrays: ActionArrays) -> tuple[list[int], list[int]]:
    """Return the needs of each action without the results of earlier actions of its rank.

    They are (for each action, where its needs begin; all needs). The first action of an overlapped pair has the needs
    of both.
    """
    action, maker = arrays.needs
    if len(arrays.pairs):
        second = np.isin(action - 1, arrays.pairs)
        action, maker = np.append(action, action[second] - 1), np.append(maker, maker[second])
        order = np.argsort(action, kind="stable")
        action, maker = action[order], maker[order]
    rank = np.append(arrays.rank, -1)
    mask = (maker > action) | (rank[maker] != rank[action])
    mask &= maker != action
    counts = np.bincount(action[mask], minlength=arrays.count)
    return [0, *np.cumsum(counts).tolist()], maker[mask].tolist()


def grid(cells: Sequence[Sequence[str]], slots: Sequence[Sequence[int]]) -> str:
    """Draw the texts of all actions, each in its slot.

    rank 0  0F0 0F1     0B0 0B1
    rank 1      1F0 1B0 1F1 1B1
    """
    end = max((slot + 1 for row in slots for slot in row), default=0)
    return "\n".join(_rows(cells, slots, range(len(cells)), range(end), {}))


def marked_grid(cells: Sequence[Sequence[str]], slots: Sequence[Sequence[int]], marks: Mapping[int, int]) -> str:
    """Draw the surroundings of the marked actions (rank → position). A marked rank's row ends at its mark.

    A position after the last action of its rank marks the place of a missing action.
    """
    ends = {rank: (slots[rank][: at + 1] or [0])[-1] for rank, at in marks.items()}
    visible_slots = range(max(0, min(ends.values()) - _SLOTS_BEFORE), max(ends.values()) + _SLOTS_AFTER + 1)
    ranks = [rank for rank in range(len(cells)) if any(abs(rank - marked) <= _RANKS_AROUND for marked in marks)]
    if len(cells) <= _FEW_RANKS:
        ranks = list(range(len(cells)))
    return "\n".join(_rows(cells, slots, ranks, visible_slots, ends))


def _rows(
    cells: Sequence[Sequence[str]],
    slots: Sequence[Sequence[int]],
    ranks: Sequence[int],
    visible_slots: range,
    ends: Mapping[int, int],
) -> list[str]:
    texts: dict[tuple[int, int], str] = {}
    for rank in ranks:
        for text, slot in zip(cells[rank], slots[rank], strict=True):
            if slot in visible_slots and slot <= ends.get(rank, slot):
                texts[rank, slot] = text
    widths = dict.fromkeys(visible_slots, 0)
    for (_, slot), text in texts.items():
        widths[slot] = max(widths[slot], len(text))
    prefix = "… " if visible_slots.start > 0 else ""
    label = len(f"rank {len(cells) - 1}")
    lines = []
    for rank in ranks:
        up_to_mark = [slot for slot in visible_slots if slot <= ends.get(rank, slot)]
        line = " ".join(texts.get((rank, slot), "").ljust(widths[slot]) for slot in up_to_mark)
        line = f"{f'rank {rank}':<{label}}  {prefix}{line}".rstrip()
        lines.append(f"{line} <-- ERROR HERE" if rank in ends else line)
    return lines
