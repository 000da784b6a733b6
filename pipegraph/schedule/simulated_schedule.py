"""A schedule, run in simulated time, and how far it is from the best that there can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pipegraph.schedule.order_search.lower_bound import lower_bound
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.timeline import Timeline
from pipegraph.schedule.times import Times
from pipegraph.units import TimeFormat


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
            nothing = (0.0,) * times.stages
            times, limit = replace(times, input_grad=nothing, weight_grad=nothing), None
        return lower_bound(times, schedule.placement, schedule.microbatches, limit)

    @property
    def gap(self) -> float:
        """The part by which the makespan is above the lower bound."""
        return self.timeline.makespan / self.lower_bound - 1 if self.lower_bound > 0 else 0.0

    @cached_property
    def time_format(self) -> TimeFormat:
        return TimeFormat.of(self.timeline.makespan) if self.in_seconds else TimeFormat()
