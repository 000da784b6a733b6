"""The pass that adds transfers to a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Kind
from pipegraph.schedule.check import check
from pipegraph.schedule.dependencies import Dependencies, Edge, chain
from pipegraph.schedule.replay import UNIT, replay
from pipegraph.schedule.schedule import Schedule

_DURATIONS = {**UNIT, Kind.B: 2}  # a full backward does the work of I and W


def lower(
    schedule: Schedule, edges: Iterable[Edge] | None = None, gradient_edges: Iterable[Edge] | None = None
) -> Schedule:
    """Return the schedule with one SEND and one RECV for each edge, microbatch and direction.

    ``edges`` are the (producer stage, consumer stage) pairs that carry values: by default the schedule's own, which
    for a built one is the chain. ``gradient_edges`` are those over which a gradient comes back: by default all. An edge
    between stages of one rank needs no transfer.

    All ranks' orders are parts of one global order in which each SEND stands next to its RECV. So every two ranks have
    their transfers in the same order, and even if each one blocked until its partner arrived, nothing could deadlock.
    The global order is that of time, with unit times and instant transfers: a RECV stands behind everything that its
    rank has begun by the time the value is made.

    Raises ScheduleError for edges that do not fit, and for a schedule that is wrong or has transfers already.
    """
    if schedule.lowered:
        raise ScheduleError(f"{schedule.name} has transfers already. Lower the schedule that has none.")
    if edges is not None or gradient_edges is not None:
        own = chain(schedule.stages) if schedule.edges is None else schedule.edges
        every = own if edges is None else tuple(edges)
        back = every if gradient_edges is None else tuple(gradient_edges)
        schedule = replace(schedule, edges=every, gradient_edges=back)
    check(schedule)  # what passes this can be replayed to its end
    dependencies = schedule.dependencies
    orders: list[list[Action]] = [[] for _ in schedule.actions]
    events = replay(schedule.actions, dependencies, _DURATIONS)
    for (_, ended), together in groupby(events, key=lambda event: (event.time, event.ended)):
        actions = [schedule.actions[event.rank][event.position] for event in together]
        if ended:
            sends = [send for action in sorted(actions, key=_downstream) for send in _sends(action, dependencies)]
            actions = [action for send in sends for action in (send, send.partner)]
        for action in actions:
            orders[schedule.placement[action.stage]].append(action)
    return replace(schedule, actions=tuple(map(tuple, orders)))


def _downstream(action: Action) -> tuple[bool, int]:
    """Sorts by the way still to go, least first, so that a rank passes on what it made before it receives the next."""
    return (True, action.stage) if action.kind.is_backward else (False, -action.stage)


def _sends(action: Action, dependencies: Dependencies) -> Iterator[Action]:
    """The transfers by which the results of an action leave its rank."""
    if action.kind is Kind.F:
        kind, others = Kind.SEND_F, dependencies.consumers
    elif action.kind is Kind.B or action.kind is Kind.I:
        kind, others = Kind.SEND_B, dependencies.gradient_producers
    else:
        return
    for other in others.get(action.stage, ()):
        if dependencies.crosses((action.stage, other)):
            yield Action(action.stage, kind, action.microbatch, other)
