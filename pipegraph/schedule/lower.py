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
from pipegraph.schedule.collectives import place_collectives
from pipegraph.schedule.replay import UNIT, replay
from pipegraph.schedule.schedule import Schedule, require_schedule
from pipegraph.schedule.stages import Edge

_DURATIONS = {**UNIT, Kind.B: 2}  # a full backward does the work of I and W


def lower(
    schedule: Schedule,
    edges: Iterable[Edge] | None = None,
    gradient_edges: Iterable[Edge] | None = None,
    *,
    sharded: Iterable[int] = (),
    replicated: Iterable[int] = (),
    resident: int | None = None,
) -> Schedule:
    """Return the schedule with all transfers, and with the collectives of sharded and replicated stages.

    There is one SEND and one RECV for each edge, microbatch and direction.

    All ranks' orders are parts of one global order in which each SEND is next to its RECV. So every two ranks have
    their transfers in the same order, and nothing can deadlock even if each transfer blocks until its partner arrives.
    The global order is that of time, with unit times and instant transfers: a RECV comes after everything that its
    rank has begun by the time the value is made. The two actions of an overlapped pair count as one, so that no
    transfer comes between them.

    UNSHARD gathers the parameters of a sharded stage, RESHARD frees what was gathered, and REDUCE_GRAD sums gradients:

    - Each action that computes, W too, has its stage whole. With ``resident``, `residencies` decides which stages stay,
      so that no order of UNSHARD and RESHARD needs fewer gathers for this order of actions.
    - An UNSHARD comes as early as it can be prefetched: when a stage may be whole for it, in the order of first use. A
      RESHARD comes right after the last use.
    - Gradients add up unsharded from a stage's first W to its last, also while its parameters are resharded in between.
      They are reduced once: right after the last W or B, in parallel with the rest of the step.
    - The ranks that share a stage's parameters hold the same stages and so have the same order of collectives. It is
      part of the global order, of which each replica of the pipeline has its own: no two can wait for each other.

    Args:
        schedule: one without transfers.
        edges: (producer stage, consumer stage) pairs that carry values; by default the schedule's own, which for a
            built one are the chain. An edge between stages of one rank needs no transfer.
        gradient_edges: the edges over which a gradient returns; by default all.
        sharded: the stages whose parameters are gathered for use and whose gradients are reduced (dp_shard).
        replicated: other stages whose gradients are reduced (dp_replicate).
        resident: how many sharded stages of a rank may be whole at a time, one that is being prefetched included; None:
            all. One more than are used by turns leaves room for prefetching.

    Collectives that the schedule already has, such as those of a file, are not moved.

    Raises:
        ScheduleError: edges or stages that do not fit; a ``resident`` that is too small for an overlapped pair; a
            schedule that is wrong, has transfers already, or has collectives of other stages.
    """
    require_schedule("lower", schedule)
    for pairs in (edges, gradient_edges):
        require_type(pairs, (Iterable, NoneType), "Edges are pairs of stages", "edges=[(0, 1)]", ScheduleError)
    for stages in (sharded, replicated):
        require_type(stages, Iterable, "Sharded and replicated are stages", "sharded=[0, 1]", ScheduleError)
    if schedule.lowered:
        raise ScheduleError(f"{schedule.name} has transfers already. without_transfers takes them out.")
    if edges is not None or gradient_edges is not None:
        schedule = schedule.changed(
            edges=schedule.dependencies.edges if edges is None else tuple(edges),
            gradient_edges=None if gradient_edges is None else tuple(gradient_edges),
        )
    check(schedule, resident=resident)  # so that it can be replayed to its end
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
    lowered = schedule.changed(actions=tuple(rows))
    sharded, replicated = {*sharded}, {*replicated}
    if schedule.collectives:
        _require_same_stages(schedule, sharded, replicated)
        return lowered
    return place_collectives(lowered, sharded, replicated, resident) if sharded or replicated else lowered


def _require_same_stages(schedule: Schedule, sharded: set[int], replicated: set[int]) -> None:
    """Raise ScheduleError if stages are sharded or replicated, but not those for which the schedule has collectives."""
    reduced = sharded | replicated if schedule.trains else set()
    for verb, named, placed in (("gathers", sharded, schedule.sharded), ("reduces", reduced, schedule.reduced)):
        if (sharded or replicated) and named != placed:
            raise ScheduleError(
                f"{schedule.name} {verb} the stages {sorted(placed)}, and those of this pipeline are {sorted(named)}.",
                "schedule.changed(collectives=()), for which lower() places all of them.",
            )


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
