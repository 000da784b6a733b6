"""A lower bound of the makespan of every schedule, and how far above it a schedule is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from typing import NamedTuple

from pipegraph.arguments import require_type
from pipegraph.errors import ScheduleError
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.timeline import Timeline
from pipegraph.schedule.times import Times, require_times
from pipegraph.units import TimeFormat


class _Task(NamedTuple):
    """F, I or W of one microbatch on one stage: the least time before its start, its own time, the least time after."""

    head: float
    time: float
    tail: float


def lower_bound(times: Times, placement: Sequence[int], microbatches: int, memory_limit: float | None = None) -> float:
    """Seconds that every schedule of a chain of stages takes from 0 to its end, however its actions are ordered.

    The larger of two bounds, over all ranks.

    - One machine (Carlier, 1982): before the F of a stage come all F of earlier stages; before its I that and all F and
      I of later stages; before its W its I. What follows a task takes its time likewise. So for any set of a rank's
      tasks: the first starts no earlier than the least of their heads, the rank then works for all of them, m times,
      and the least of their tails follows.
    - Memory: stage s holds an activation for R(s) or more, from its F through all later stages and back to its W. Rank
      r holds at most K = min(memory limit, all) at once, none before head(r), the least of its heads. Holding starts f
      apart and ends w apart, the least times of r's stages. So K·(M − head(r)) ≥ m·ΣR(s) + K(K−1)/2·(f + w).

    Raises:
        ScheduleError: times and placement have different numbers of stages, or a number is impossible.
    """
    require_times("lower_bound", times)
    require_type(placement, Sequence, "placement has the rank of each stage", "placement=(0, 1)", ScheduleError)
    if len(placement) != times.stages:
        raise ScheduleError(f"The placement is of {len(placement)} stages, and the times are for {times.stages}.")
    if type(microbatches) is not int or microbatches < 1:
        raise ScheduleError(f"There is no bound for {microbatches!r} microbatches: give a whole number from 1 on.")
    if memory_limit is not None and not memory_limit >= 1:
        raise ScheduleError(f"A memory limit of {memory_limit!r} activations lets nothing run.", "1 or more.")
    tasks = _tasks(times, placement)
    bound = 0.0
    for rank in set(placement):
        rank_tasks = [tasks[stage] for stage in range(len(placement)) if placement[stage] == rank]
        bound = max(bound, *_one_machine([task for stage in rank_tasks for task in stage], microbatches))
        if memory_limit is not None:
            limit = int(min(memory_limit, microbatches * len(rank_tasks)))
            lives = sum(weight.head + weight.time - forward.head for forward, _, weight in rank_tasks)
            apart = min(forward.time for forward, _, _ in rank_tasks) + min(weight.time for _, _, weight in rank_tasks)
            head = min(forward.head for forward, _, _ in rank_tasks)
            bound = max(bound, head + (microbatches * lives + limit * (limit - 1) / 2 * apart) / limit)
    return bound


def _tasks(times: Times, placement: Sequence[int]) -> list[tuple[_Task, _Task, _Task]]:
    """Return F, I and W of each stage."""
    hops = [
        0.0 if rank == next_rank else times.hop_of((stage, stage + 1)) + times.transfer_of((stage, stage + 1))
        for stage, (rank, next_rank) in enumerate(pairwise(placement))
    ]
    stages = range(len(placement))
    f, b, w = times.forward, times.input_grad, times.weight_grad
    before_f = [sum(f[:stage]) + sum(hops[:stage]) for stage in stages]
    turn = before_f[-1] + f[-1]
    before_b = [turn + sum(b[stage + 1 :]) + sum(hops[stage:]) for stage in stages]
    after_b = [w[0]]
    for stage in stages[1:]:
        after_b.append(max(w[stage], hops[stage - 1] + b[stage - 1] + after_b[-1]))
    # After an F comes the way to its own I and back. A W on the way counts as far as it sticks out.
    after_f = [0.0 for _ in stages]
    after_f[-1] = b[-1] + after_b[-1]
    for stage in reversed(stages[:-1]):
        after_f[stage] = hops[stage] + f[stage + 1] + after_f[stage + 1]
    return [
        (
            _Task(before_f[stage], f[stage], after_f[stage]),
            _Task(before_b[stage], b[stage], after_b[stage]),
            _Task(before_b[stage] + b[stage], w[stage], 0.0),
        )
        for stage in stages
    ]


def _one_machine(tasks: Sequence[_Task], microbatches: int) -> Iterator[float]:
    """Yield the bound of each set of tasks that is worth it: all with a head and a tail of some length or more."""
    for head, tail in product({task.head for task in tasks}, {task.tail for task in tasks}):
        chosen = [task for task in tasks if task.head >= head and task.tail >= tail]
        if chosen:
            work = microbatches * sum(task.time for task in chosen)
            yield min(task.head for task in chosen) + work + min(task.tail for task in chosen)


@dataclass(frozen=True)
class SimulatedSchedule:
    """A schedule with times: seconds if ``in_seconds``, else multiples of some action's."""

    schedule: Schedule
    times: Times
    memory_limit: int | None = None
    in_seconds: bool = False

    @cached_property
    def timeline(self) -> Timeline:
        return simulate(self.schedule, self.times)

    @cached_property
    def lower_bound(self) -> float:
        """What no schedule of these stages can beat; without a backward, no schedule that has none."""
        schedule, times, limit = self.schedule, self.times, self.memory_limit
        if not schedule.trains:
            zeros = (0.0,) * times.stages
            times, limit = replace(times, input_grad=zeros, weight_grad=zeros), None
        return lower_bound(times, schedule.placement, schedule.microbatches, limit)

    @property
    def gap(self) -> float:
        """The part by which the makespan is above the lower bound."""
        return self.timeline.makespan / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @cached_property
    def time_format(self) -> TimeFormat:
        return TimeFormat.for_seconds(self.timeline.makespan) if self.in_seconds else TimeFormat()
