"""The pass that adds transfers to a schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import NamedTuple

import numpy as np

from pipegraph.arguments import require_type
from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.action_arrays import KINDS, SEND_B, SEND_F, B, F, I, Integers
from pipegraph.schedule.check import check
from pipegraph.schedule.replay import UNIT, replay
from pipegraph.schedule.schedule import Schedule, require_schedule
from pipegraph.schedule.stages import Edge

_DURATIONS = {**UNIT, Kind.B: 2}  # a full backward does the work of I and W


def lower(
    schedule: Schedule, edges: Iterable[Edge] | None = None, gradient_edges: Iterable[Edge] | None = None
) -> Schedule:
    """Return the schedule with one SEND and one RECV for each edge, microbatch and direction.

    All ranks' orders are parts of one global order in which each SEND is next to its RECV. So every two ranks have
    their transfers in the same order, and nothing can deadlock even if each transfer blocks until its partner arrives.
    The global order is that of time, with unit times and instant transfers: a RECV comes after everything that its
    rank has begun by the time the value is made. The two actions of an overlapped pair count as one, so that no
    transfer comes between them.

    Args:
        schedule: one without transfers.
        edges: (producer stage, consumer stage) pairs that carry values; by default the schedule's own, which for a
            built one are the chain. An edge between stages of one rank needs no transfer.
        gradient_edges: the edges over which a gradient returns; by default all.

    Raises:
        ScheduleError: edges that do not fit, or a schedule that is wrong or has transfers already.
    """
    require_schedule("lower", schedule)
    for each in (edges, gradient_edges):
        require_type(each, (Iterable, NoneType), "Edges are pairs of stages", "edges=[(0, 1)]", ScheduleError)
    if schedule.lowered:
        raise ScheduleError(f"{schedule.name} has transfers already. without_transfers takes them out.")
    if edges is not None or gradient_edges is not None:
        schedule = schedule.changed(
            edges=schedule.dependencies.edges if edges is None else tuple(edges),
            gradient_edges=None if gradient_edges is None else tuple(gradient_edges),
        )
    check(schedule)  # so that it can be replayed to its end
    arrays = schedule.arrays
    starts = replay(arrays, _DURATIONS)
    ends = starts + np.array([_DURATIONS[kind] for kind in KINDS])[arrays.kind]
    ends[arrays.pairs], starts[arrays.pairs + 1] = ends[arrays.pairs + 1], starts[arrays.pairs]
    sends = _sends(schedule, ends)
    transfers = [action for send in _actions(schedule, sends) for action in (send, send.partner)]
    # Sort all actions by rank and time; at equal times the transfers come first, in their order.
    receiver = np.array(schedule.placement)[sends.to]
    rank = np.append(arrays.rank, np.stack([arrays.rank[sends.maker], receiver], axis=1))
    time = np.append(2 * starts + 1, np.repeat(2 * ends[sends.maker], 2))
    unordered = [*arrays.flat(), *transfers]
    ordered = [unordered[number] for number in np.lexsort((time, rank)).tolist()]
    bounds = [0, *np.cumsum(np.bincount(rank)).tolist()]
    rows = (tuple(ordered[first:last]) for first, last in itertools.pairwise(bounds))
    return schedule.changed(actions=tuple(rows))


def without_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule without SEND and RECV, and without edges, which were theirs: what `lower` takes."""
    rows = tuple(tuple(action for action in row if action.peer is None) for row in schedule.actions)
    return schedule.changed(actions=rows, edges=None, gradient_edges=None)


class _Sends(NamedTuple):
    """What leaves a rank: the action that makes it, SEND_F or SEND_B, and the stage to which it goes. (sends,) each."""

    maker: Integers
    kind: Integers
    to: Integers


def _sends(schedule: Schedule, ends: Integers) -> _Sends:
    """Return all sends in their global order.

    At equal times, those nearest to their last stage come first, so that a rank passes on what it made before it
    receives the next.
    """
    arrays = schedule.arrays
    producer, consumer = arrays.edges[arrays.crosses].T
    values = arrays.join(np.flatnonzero(arrays.kind == F), producer, consumer)
    producer, consumer = arrays.edges[arrays.crosses & arrays.returns].T
    backward = np.flatnonzero((arrays.kind == B) | (arrays.kind == I))
    gradients = arrays.join(backward, consumer, producer)
    maker, to = np.append(values[0], gradients[0]), np.append(values[1], gradients[1])
    kind = np.repeat([SEND_F, SEND_B], [len(values[0]), len(gradients[0])])
    stages_left = np.where(kind == SEND_F, -arrays.stage[maker], arrays.stage[maker])
    order = np.lexsort((to, stages_left, kind, ends[maker]))
    return _Sends(maker[order], kind[order], to[order])


def _actions(schedule: Schedule, sends: _Sends) -> Iterator[Action]:
    stage, microbatch = schedule.arrays.stage[sends.maker].tolist(), schedule.arrays.microbatch[sends.maker].tolist()
    for stage_, kind, microbatch_, to in zip(stage, sends.kind.tolist(), microbatch, sends.to.tolist(), strict=True):
        yield Action(stage_, KINDS[kind], microbatch_, to)
