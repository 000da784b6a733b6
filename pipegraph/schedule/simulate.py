"""A schedule in simulated time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pipegraph.errors import ScheduleError
from pipegraph.schedule.action import Action, Collective, Kind
from pipegraph.schedule.check import check, check_actions, check_collectives
from pipegraph.schedule.collective_stream import CollectiveStream
from pipegraph.schedule.lifetimes import offload_windows, peak_activations
from pipegraph.schedule.schedule import Schedule, require_schedule
from pipegraph.schedule.timeline import Event, Place, Timeline
from pipegraph.schedule.times import Times, require_times

# ---- host copies -----------------------------------------------------------------------------------------------------
# The copies of a rank to the memory of its host and back, in simulated time.


_Key = tuple[int, int]  # stage, microbatch


class HostCopies:
    """When a rank waits for copies. Copies in one direction come one after the other; the two directions overlap.

    A copy out starts when its F has ended, and the action after that F does not end before the copy. A copy in starts
    when the action before its I or B begins, and the I or B waits for it. Calls are in the order of the rank's work.
    """

    def __init__(self, actions: Sequence[Action], seconds: Sequence[float]) -> None:
        """``seconds``: for each stage, the time to copy one microbatch; 0 for a stage that offloads nothing."""
        self._seconds, self._position = seconds, 0
        self._out_free = self._in_free = 0.0
        self._leaving: set[_Key] = set()
        self._departures: dict[int, list[_Key]] = defaultdict(list)
        self._come: dict[int, list[_Key]] = defaultdict(list)
        self._copied: dict[_Key, float] = {}
        self._arrived: dict[_Key, float] = {}
        for window in offload_windows(actions):
            if seconds[window.stage]:
                key = window.stage, window.microbatch
                self._leaving.add(key)
                self._departures[window.departure].append(key)
                self._come[window.back].append(key)

    def begin(self, action: Action, start: float) -> float:
        """Return when an action begins that could at ``start``."""
        if action.kind in (Kind.I, Kind.B):
            start = max(start, self._arrived.pop((action.stage, action.microbatch), start))
        for key in self._come.get(self._position, ()):
            begin = max(start, self._in_free, self._copied.pop(key))
            self._in_free = self._arrived[key] = begin + self._seconds[key[0]]
        return start

    def end(self, action: Action, end: float) -> float:
        """Return when the rank continues after an action that took until ``end``."""
        for key in self._departures.get(self._position, ()):
            end = max(end, self._copied[key])
        key = action.stage, action.microbatch
        if action.kind is Kind.F and key in self._leaving:
            self._out_free = self._copied[key] = max(end, self._out_free) + self._seconds[action.stage]
        self._position += 1
        return end


# ---- simulate --------------------------------------------------------------------------------------------------------


_F, _I, _W, _B = Kind.F, Kind.I, Kind.W, Kind.B


def simulate(schedule: Schedule, times: Times) -> Timeline:
    """Run a schedule, with or without transfers, in simulated time.

    Each rank does its actions one after the other, each as soon as its inputs have arrived. Without transfers a value
    leaves its rank when it is made; with them, when its rank arrives at the SEND. A SEND does not block, and receives
    are posted ahead: so an order that would deadlock with blocking transfers may run here, and `check` refuses it. Two
    adjacent actions of an overlapped pair are one block, as in torch: it starts when both can, lasts as long as one
    after the other, and has both results at its end.

    A rank's collectives run in parallel with its actions, one after the other: each begins when the rank comes to it
    and the one before has ended. An action waits for the UNSHARD of its stage. No rank waits for other replicas.
    Offloaded values are also copied in parallel with the actions (`HostCopies`).

    Raises ScheduleError if times and schedule do not fit together; if actions are missing, occur twice or are on the
    wrong rank; if parameters are not whole when they are used; and if the ranks cannot come to an end.
    """
    require_schedule("simulate", schedule)
    require_times("simulate", times)
    if times.stages != schedule.stages:
        raise ScheduleError(
            f"{schedule.name} has {schedule.stages} stages, and the times are for {times.stages}.",
            f"times with {schedule.stages} numbers for each of forward, input_grad and weight_grad.",
        )
    check_actions(schedule)
    check_collectives(schedule)
    run = _Simulation(schedule, times)
    free = list(range(schedule.ranks))
    while free:
        free += run.advance(free.pop())
    if not run.finished():
        check(schedule)  # says why
    collectives = tuple(stream.finished() for stream in run.streams) if schedule.collectives else ()
    return Timeline(tuple(map(tuple, run.events)), peak_activations(schedule), tuple(run.waited), collectives)


class _Destination(NamedTuple):
    """A stage to which results of a stage go."""

    stage: int
    link: tuple[int, int] | None  # (from rank, to rank), None on one rank
    hop: float
    transfer: float


class _Simulation:
    """The state of a simulation: how far each rank has come, and what has arrived for each task.

    A task is one stage's F, I or B, or W of one microbatch. The numbers of tasks come in these three blocks.
    """

    def __init__(self, schedule: Schedule, times: Times) -> None:
        needs, stages, microbatches = schedule.dependencies, range(schedule.stages), schedule.microbatches
        self.events: list[list[Event]] = [[] for _ in schedule.actions]
        self.waited: list[dict[int, Place]] = [{} for _ in schedule.actions]
        self._schedule, self._times = schedule, times
        self.streams = [CollectiveStream(times, schedule.reduced) for _ in schedule.actions]
        copies = [times.offload_of(stage) for stage in stages]
        self._copies = [HostCopies(row, copies) if any(copies) else None for row in schedule.actions]
        self._units = [schedule.program_units(rank) for rank in range(schedule.ranks)]
        self._next = [next(units, None) for units in self._units]
        self._clock = [0.0] * schedule.ranks
        full = tuple(map(sum, zip(times.input_grad, times.weight_grad, strict=True)))
        self._duration = {_F: times.forward, _I: times.input_grad, _W: times.weight_grad, _B: full}
        self._block = block = schedule.stages * microbatches
        self._first = {_F: 0, _I: block, _B: block, _W: 2 * block}
        # For each task: how many results it still waits for, its own stage's task before it included; when the last of
        # them arrives; and the event that makes it.
        values = [len(needs.producers.get(stage, ())) for stage in stages]
        gradients = [1 + len(needs.gradient_consumers.get(stage, ())) for stage in stages]
        weights = [1 for _ in stages]
        self._missing = [count for count in (*values, *gradients, *weights) for _ in range(microbatches)]
        self._ready = [0.0] * len(self._missing)
        self._source: list[Place] = [(0, 0)] * len(self._missing)
        self._done = bytearray(len(self._missing))
        self._link_ends: dict[tuple[int, int], float] = {}  # link → when its last transfer has left
        self._destinations: dict[Kind, list[list[_Destination]]] = {
            _F: [self._destinations_of(stage, needs.consumers.get(stage, ())) for stage in stages],
            _I: [self._destinations_of(stage, needs.gradient_producers.get(stage, ())) for stage in stages],
            _W: [[] for _ in stages],
        }
        self._destinations[_B] = self._destinations[_I]

    def _destinations_of(self, stage: int, target_stages: Iterable[int]) -> list[_Destination]:
        placement, crosses = self._schedule.placement, self._schedule.dependencies.crosses
        destinations = []
        for target in target_stages:
            edge = (min(stage, target), max(stage, target))
            if crosses(edge):
                link = placement[stage], placement[target]
                destinations.append(_Destination(target, link, self._times.hop_of(edge), self._times.transfer_of(edge)))
            else:
                destinations.append(_Destination(target, None, 0.0, 0.0))
        return destinations

    def finished(self) -> bool:
        return all(unit is None for unit in self._next)

    def advance(self, rank: int) -> list[int]:
        """Run the actions of a rank until one has to wait. Returns the ranks that may continue because of that."""
        woken: list[int] = []
        while (unit := self._next[rank]) is not None:
            if isinstance(unit, Collective):
                self.streams[rank].run(unit, self._clock[rank], len(self.events[rank]) - 1)
                done = True
            elif unit[0].kind.is_transfer:
                done = not unit[0].sends or self._send(unit[0], rank, woken)
            else:
                done = self._compute(unit, rank, woken)
            if not done:
                break
            self._next[rank] = next(self._units[rank], None)
        return woken

    def _compute(self, unit: tuple[Action, ...], rank: int, woken: list[int]) -> bool:
        """Run one action, or an overlapped pair, if its inputs have arrived."""
        tasks = [self._task(action.kind, action) for action in unit]
        for task in tasks:
            if self._missing[task]:
                return False
        events, start = self.events[rank], self._clock[rank]
        for task in tasks:
            if self._ready[task] > start:
                start = self._ready[task]
                self.waited[rank][len(events)] = self._source[task]
        clock, copies = self.streams[rank].wait(unit, start, len(events)), self._copies[rank]
        for action in unit:
            start = clock if copies is None else copies.begin(action, clock)
            end = start + self._duration[action.kind][action.stage]
            events.append(Event(action, start, end))
            self.streams[rank].compute(action, start)
            clock = end if copies is None else copies.end(action, end)
        self._clock[rank] = clock
        for action, task in zip(unit, tasks, strict=True):
            self._done[task] = True
            if action.kind is not _W:
                self._missing[task + self._block] -= 1
                for to in self._destinations[action.kind][action.stage]:
                    if to.link is None or not self._schedule.lowered:
                        self._arrive(to, action, task, rank, woken)
        return True

    def _send(self, action: Action, rank: int, woken: list[int]) -> bool:
        """Send the result of an action to another rank, if the action has run."""
        kind = _F if action.kind is Kind.SEND_F else _I
        task = self._task(kind, action)
        for to in self._destinations[kind][action.stage]:
            if to.stage == action.peer and self._done[task]:
                self._arrive(to, action, task, rank, woken)
        return bool(self._done[task])

    def _task(self, kind: Kind, action: Action) -> int:
        return self._first[kind] + action.stage * self._schedule.microbatches + action.microbatch

    def _arrive(self, to: _Destination, action: Action, task: int, rank: int, woken: list[int]) -> None:
        """Deliver the result of an action from the rank on which it, or its SEND, was the last to run."""
        arrival = self._clock[rank]
        if to.link is not None:
            # A message of no bytes waits for those before it as well.
            arrival = self._link_ends[to.link] = max(arrival, self._link_ends.get(to.link, 0.0)) + to.transfer
            arrival += to.hop
        target = task + (to.stage - action.stage) * self._schedule.microbatches
        self._missing[target] -= 1
        if arrival >= self._ready[target]:
            self._ready[target] = arrival
            self._source[target] = (rank, len(self.events[rank]) - 1)
        woken.append(self._schedule.placement[to.stage])
