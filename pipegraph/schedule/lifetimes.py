"""What each rank holds, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.action_arrays import RECV_B, RECV_F, SEND_B, SEND_F, ActionArrays, B, F, I, Integers, W
from pipegraph.schedule.schedule import Schedule, require_schedule

# ---- offload windows -------------------------------------------------------------------------------------------------
# When the saved values of a forward are not needed on its rank, so that they can be offloaded until the backward.
#
#     a    a + 1      …   b − 1      b        a rank's computing actions
#     F ─▶ copied out …   copied in ─▶ I or B  of one stage and microbatch
#
# They are on the rank until action a + 1 ends, and again from when action b − 1 begins, so that each copy overlaps with
# one action. If there is no action between the two copies, they stay.


_SHORTEST = 3  # actions from F to the backward


class OffloadWindow(NamedTuple):
    """Positions among a rank's computing actions.

    Attributes:
        stage, microbatch: of the saved values that are away.
        departure: the action during which they are copied out: they are away when it has ended.
        back: the action during which they are copied in: they take memory again when it begins.
    """

    stage: int
    microbatch: int
    departure: int
    back: int


def offload_windows(actions: Sequence[Action]) -> list[OffloadWindow]:
    """Return when the saved values of each stage and microbatch of a rank can be away, in the order of F."""
    forward: dict[tuple[int, int], int] = {}
    windows = []
    for position, action in enumerate(action for action in actions if not action.kind.is_transfer):
        key = action.stage, action.microbatch
        if action.kind is Kind.F:
            forward[key] = position
        elif key in forward:
            begin = forward.pop(key)
            if position - begin >= _SHORTEST:
                windows.append(OffloadWindow(*key, begin + 1, position - 1))
    return sorted(windows, key=lambda window: window.departure)


# ---- lifetimes -------------------------------------------------------------------------------------------------------


class What(StrEnum):
    """What a rank holds for one microbatch."""

    VALUES = "values"  # the values of one edge, which F made or RECV_F received
    SAVED = "saved"  # what F saved for B, or for I and W
    GRADIENTS = "gradients"  # the gradients of one edge, which B or I made, or RECV_B received


class Lifetime(NamedTuple):
    """Something that a rank holds from the action that makes it to the end of the last action that reads it."""

    what: What
    stages: tuple[int, int]
    """(the stage that made it, the stage that reads it); for saved values the two are the same"""
    microbatch: int
    made: int
    """position of the action that makes it, among the actions of the rank"""
    last_read: int
    """position of the last action that reads it"""


def lifetimes(schedule: Schedule) -> tuple[tuple[Lifetime, ...], ...]:
    """Return everything that each rank holds at some time, in the order of the last reads.

    Values for several consumers count as several, and values for another rank last until their SEND. If the schedule
    has no transfers, only what stays on its rank is listed. The schedule must pass `check`.
    """
    require_schedule("lifetimes", schedule)
    arrays = schedule.arrays
    parts = {
        What.VALUES: _over_edges(arrays, (F,), RECV_F, SEND_F),
        What.GRADIENTS: _over_edges(arrays, (B, I), RECV_B, SEND_B),
        What.SAVED: _saved(arrays),
    }
    rows: list[list[Lifetime]] = [[] for _ in schedule.actions]
    first = np.array(arrays.bounds)
    for kind, (maker, read) in parts.items():
        rank = arrays.rank[maker]
        begins = np.where(np.isin(arrays.kind[maker], (RECV_F, RECV_B)), arrays.peer[maker], arrays.stage[maker])
        ends = np.where(np.isin(arrays.kind[read], (SEND_F, SEND_B)), arrays.peer[read], arrays.stage[read])
        columns = rank, begins, ends, arrays.microbatch[maker], maker - first[rank], read - first[rank]
        for holder, begin, end, microbatch, position, last in zip(*(c.tolist() for c in columns), strict=True):
            rows[holder].append(Lifetime(kind, (begin, end), microbatch, position, last))
    return tuple(tuple(sorted(row, key=lambda lifetime: lifetime.last_read)) for row in rows)


def receive_buffers(schedule: Schedule, ahead: int = 0, saved: bool = True) -> dict[tuple[int, int], int]:
    """Return how many received messages are held at one time, at most: (from stage, to stage) → messages.

    A message is held from when its receive is posted to its last read.

    Args:
        schedule: a lowered one that passes `check`.
        ahead: how many receives a rank posts before the schedule reaches them.
        saved: whether a message is held until what its stage has saved is released: the stage may have saved its
            inputs, or its outputs' gradients, in the buffers in which they came.
    """
    largest: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(lifetimes(schedule)):
        actions = schedule.actions[rank]
        receives = [at for at, action in enumerate(actions) if action.peer is not None and not action.sends]
        posted = dict(zip(receives, [0] * ahead + receives, strict=False))
        released = {
            (saved_lifetime.stages[1], saved_lifetime.microbatch): saved_lifetime.last_read
            for saved_lifetime in row
            if saved_lifetime.what is What.SAVED
        }
        spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for lifetime in row:
            if lifetime.made in posted:
                end = (
                    released.get((lifetime.stages[1], lifetime.microbatch), lifetime.last_read)
                    if saved
                    else lifetime.last_read
                )
                spans.setdefault(lifetime.stages, []).append((posted[lifetime.made], end))
        largest |= {stages: _largest_overlap(edge) for stages, edge in sorted(spans.items())}
    return largest


def _largest_overlap(spans: list[tuple[int, int]]) -> int:
    """Return the largest number of spans that share a position; both ends of a span belong to it."""
    begins, ends = np.sort(np.array(spans), axis=0).T
    return int((np.arange(len(spans)) + 1 - np.searchsorted(ends, begins)).max())


def _over_edges(arrays: ActionArrays, makers: tuple[int, ...], receive: int, send: int) -> tuple[Integers, Integers]:
    """Return what goes over edges, as (the action that makes it on a rank, the action of that rank that reads it)."""
    maker, read = _on_one_rank(arrays)
    mask = np.isin(arrays.kind[maker], (*makers, receive)) & np.isin(arrays.kind[read], (*makers, send))
    return maker[mask], read[mask]


def _saved(arrays: ActionArrays) -> tuple[Integers, Integers]:
    """Return what is saved, as (its F, the last action that reads it)."""
    last = np.flatnonzero((arrays.kind == B) | (arrays.kind == W))
    return arrays.forwards_of(last), last


def _on_one_rank(arrays: ActionArrays) -> tuple[Integers, Integers]:
    """Return what an action makes and a later one of its rank needs, as (the first, the second)."""
    read, maker = arrays.needs
    same_rank = arrays.rank[read] == arrays.rank[maker]
    return maker[same_rank], read[same_rank]


def held_activations(schedule: Schedule) -> list[Integers]:
    """Return how many activations each rank holds while each of its actions runs: an array (actions,) per rank.

    One activation is what one stage saves for one microbatch, held from the start of its F to the end of its W or B.
    Without a backward nothing is saved.
    """
    require_schedule("peak_activations", schedule)
    arrays = schedule.arrays
    saves = (arrays.kind == F) & schedule.trains
    frees = (arrays.kind == W) | (arrays.kind == B)
    rows = [(saves[first:last], frees[first:last]) for first, last in pairwise(arrays.bounds)]
    return [np.cumsum(saved) - np.cumsum(freed) + freed for saved, freed in rows]


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return the largest number of activations that each rank holds at one time."""
    return tuple(int(activations.max(initial=0)) for activations in held_activations(schedule))
