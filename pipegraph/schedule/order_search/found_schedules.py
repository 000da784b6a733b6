"""The schedules that a search has found so far, and which of them is best."""

from __future__ import annotations

from pipegraph.schedule.collectives import place_collectives
from pipegraph.schedule.join_backwards import EQUAL, join_backwards
from pipegraph.schedule.lifetimes import peak_activations
from pipegraph.schedule.schedule import Schedule
from pipegraph.schedule.simulate import simulate
from pipegraph.schedule.times import Times


class FoundSchedules:
    """Schedules that fit, with the collectives of their stages, and their makespans."""

    def __init__(self, times: Times, resident: int | None) -> None:
        self.timed: list[tuple[float, Schedule]] = []
        self._times, self._resident = times, resident

    def add(self, schedule: Schedule) -> None:
        self.timed.append(self.time(schedule))

    def time(self, schedule: Schedule) -> tuple[float, Schedule]:
        if self._resident is not None:
            if self._resident == 1:  # the two of an overlapped pair are of two stages
                schedule = schedule.changed(overlapped=frozenset())
            schedule = place_collectives(schedule, range(schedule.stages), (), self._resident)
        return simulate(schedule, self._times).makespan, schedule

    def joined(self, schedule: Schedule, tries: int) -> Schedule:
        """Return one of the schedules with whole backwards where they make nothing slower, nor gathers more."""
        origin = schedule.changed(collectives=())
        _, joined = self.time(join_backwards(origin, self._times, tries).changed(name=schedule.name))
        is_slower = simulate(joined, self._times).makespan > simulate(schedule, self._times).makespan * (1 + EQUAL)
        return schedule if is_slower or sum(joined.gathers) > sum(schedule.gathers) else joined

    def best(self, count: int) -> list[Schedule]:
        """Return the fastest, and of those that are equally fast the ones with the fewest gathers and least memory."""
        fastest = min(makespan for makespan, _ in self.timed)

        def key(pair: tuple[float, Schedule]) -> tuple[float, int, int, int]:
            makespan, schedule = pair
            peaks = peak_activations(schedule)
            slower = 0.0 if makespan <= fastest * (1 + EQUAL) else makespan
            return slower, sum(schedule.gathers), max(peaks), sum(peaks)

        return [schedule for _, schedule in sorted(self.timed, key=key)[:count]]
