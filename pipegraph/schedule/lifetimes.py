"""How long what an action makes is needed on its rank."""

from __future__ import annotations

from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.schedule.action_arrays import RECV_B, RECV_F, SEND_B, SEND_F, Arrays, B, F, I, Integers, W
from pipegraph.schedule.schedule import Schedule


class What(StrEnum):
    """What a rank holds for one microbatch."""

    VALUES = "values"  # of one edge: those that F made or RECV_F received
    SAVED = "saved"  # what F saved for B, or for I and W
    GRADIENTS = "gradients"  # of one edge: those that B or I made, or RECV_B received


class Lifetime(NamedTuple):
    """Something that a rank holds, from the action that makes it to the end of the last one that reads it."""

    what: What
    stages: tuple[int, int]
    """the stage that made it, and the stage that it is for, which for what is saved is the same"""
    microbatch: int
    made: int
    """position of an action of the rank"""
    last_read: int
    """likewise"""


def lifetimes(schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """Of each rank, all that it holds at any time, in the order of its last reads.

    Values for several consumers count as several, and those for another rank last until their SEND. Of a schedule
    without transfers only what stays on its rank is told. It must be one that passes `check`.
    """
    arrays = schedule.arrays
    parts = {
        What.VALUES: _over_edges(arrays, (F,), RECV_F, SEND_F),
        What.GRADIENTS: _over_edges(arrays, (B, I), RECV_B, SEND_B),
        What.SAVED: _saved(arrays),
    }
    rows: list[list[Lifetime]] = [[] for _ in schedule.actions]
    first = np.array(arrays.bounds)
    for what, (made, read) in parts.items():
        rank = arrays.rank[made]
        begins = np.where(np.isin(arrays.kind[made], (RECV_F, RECV_B)), arrays.peer[made], arrays.stage[made])
        ends = np.where(np.isin(arrays.kind[read], (SEND_F, SEND_B)), arrays.peer[read], arrays.stage[read])
        columns = rank, begins, ends, arrays.microbatch[made], made - first[rank], read - first[rank]
        for holder, begin, end, microbatch, position, last in zip(*(c.tolist() for c in columns), strict=True):
            rows[holder].append(Lifetime(what, (begin, end), microbatch, position, last))
    return tuple(tuple(sorted(row, key=lambda held: held.last_read)) for row in rows)


def receive_buffers(schedule: Schedule, ahead: int = 0, saved: bool = True) -> dict[tuple[int, int], int]:
    """Of each edge and direction of a lowered schedule, (from stage, to stage): how many received messages are held at
    one time, at most.

    A message is held from when its receive is posted, which is ``ahead`` receives of its rank before the schedule
    reaches it, to its last read. With ``saved``, that is when what the stage has saved is let go: it may have saved
    its inputs, or its outputs' gradients, in the buffers in which they came.
    """
    most: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(lifetimes(schedule)):
        actions = schedule.actions[rank]
        receives = [at for at, action in enumerate(actions) if action.peer is not None and not action.sends]
        posted = dict(zip(receives, [0] * ahead + receives, strict=False))
        let_go = {(held.stages[1], held.microbatch): held.last_read for held in row if held.what is What.SAVED}
        spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for held in row:
            if held.made in posted:
                end = let_go.get((held.stages[1], held.microbatch), held.last_read) if saved else held.last_read
                spans.setdefault(held.stages, []).append((posted[held.made], end))
        most |= {stages: _at_once(edge) for stages, edge in sorted(spans.items())}
    return most


def _at_once(spans: list[tuple[int, int]]) -> int:
    """The most spans that hold any one position; both ends belong to them."""
    begins, ends = np.sort(np.array(spans), axis=0).T
    return int((np.arange(len(spans)) + 1 - np.searchsorted(ends, begins)).max())


def _over_edges(arrays: Arrays, makers: tuple[int, ...], receive: int, send: int) -> tuple[Integers, Integers]:
    """What goes over edges, as (the action that makes it on a rank, the action of that rank that reads it)."""
    made, read = _on_one_rank(arrays)
    kept = np.isin(arrays.kind[made], (*makers, receive)) & np.isin(arrays.kind[read], (*makers, send))
    return made[kept], read[kept]


def _saved(arrays: Arrays) -> tuple[Integers, Integers]:
    """What is saved, as (its F, the last action that reads it)."""
    last = np.flatnonzero((arrays.kind == B) | (arrays.kind == W))
    return arrays.forwards_of(last), last


def _on_one_rank(arrays: Arrays) -> tuple[Integers, Integers]:
    """What an action makes and a later one of its rank needs, as (the first, the second)."""
    read, made = arrays.needs
    kept = arrays.rank[read] == arrays.rank[made]
    return made[kept], read[kept]


def held_activations(schedule: Schedule) -> list[Integers]:
    """Of each rank, how many activations it holds while each of its actions runs.

    One activation is what one stage saves for one microbatch, held from the start of its F to the end of its W or B.
    Without a backward nothing is saved.
    """
    arrays = schedule.arrays
    saves = (arrays.kind == F) & schedule.has_backward
    frees = (arrays.kind == W) | (arrays.kind == B)
    rows = [(saves[first:last], frees[first:last]) for first, last in pairwise(arrays.bounds)]
    return [np.cumsum(saved) - np.cumsum(freed) + freed for saved, freed in rows]


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank, the most activations it holds at one time."""
    return tuple(int(held.max(initial=0)) for held in held_activations(schedule))
