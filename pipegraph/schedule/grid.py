"""A schedule as a picture: a row per rank, a column per time slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipegraph.schedule.action import Action

# What a marked grid shows of a large schedule.
_SLOTS_BEFORE, _SLOTS_AFTER, _RANKS_AROUND = 10, 2, 2
_FEW_RANKS = 16  # so many are all shown


def grid(actions: Sequence[Sequence[Action]], slots: Sequence[Sequence[int]]) -> str:
    """Draw all actions, each in its slot.

    rank 0  0F0 0F1     0B0 0B1
    rank 1      1F0 1B0 1F1 1B1
    """
    end = max((slot + 1 for row in slots for slot in row), default=0)
    return "\n".join(_rows(actions, slots, range(len(actions)), range(end), {}))


def marked_grid(actions: Sequence[Sequence[Action]], slots: Sequence[Sequence[int]], marks: Mapping[int, int]) -> str:
    """Draw the surroundings of the marked actions (rank → position). A marked rank's row ends at its mark.

    A position behind the last action of its rank marks the place of a missing one.
    """
    ends = {rank: (slots[rank][: at + 1] or [0])[-1] for rank, at in marks.items()}
    shown = range(max(0, min(ends.values()) - _SLOTS_BEFORE), max(ends.values()) + _SLOTS_AFTER + 1)
    ranks = [rank for rank in range(len(actions)) if any(abs(rank - marked) <= _RANKS_AROUND for marked in marks)]
    if len(actions) <= _FEW_RANKS:
        ranks = list(range(len(actions)))
    return "\n".join(_rows(actions, slots, ranks, shown, ends))


def _rows(
    actions: Sequence[Sequence[Action]],
    slots: Sequence[Sequence[int]],
    ranks: Sequence[int],
    shown: range,
    ends: Mapping[int, int],
) -> list[str]:
    cells: dict[tuple[int, int], str] = {}
    for rank in ranks:
        for action, slot in zip(actions[rank], slots[rank], strict=True):
            if slot in shown and slot <= ends.get(rank, slot):
                cells[rank, slot] = str(action)
    widths = dict.fromkeys(shown, 0)
    for (_, slot), text in cells.items():
        widths[slot] = max(widths[slot], len(text))
    before = "… " if shown.start > 0 else ""
    label = len(f"rank {len(actions) - 1}")
    lines = []
    for rank in ranks:
        drawn = [slot for slot in shown if slot <= ends.get(rank, slot)]
        line = " ".join(cells.get((rank, slot), "").ljust(widths[slot]) for slot in drawn)
        line = f"{f'rank {rank}':<{label}}  {before}{line}".rstrip()
        lines.append(f"{line} <-- ERROR HERE" if rank in ends else line)
    return lines
