"""The schedule that the options of a command name."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.arguments import argument
from pipegraph.errors import ScheduleError
from pipegraph.package import Package
from pipegraph.planner.step_prediction import PlannedStep
from pipegraph.runtime.schedule_choice import resolve_schedule
from pipegraph.schedule import PLACEMENTS, Schedule, Times, build, check, join_backwards, read_csv, search
from pipegraph.schedule.collectives import place_collectives
from pipegraph.schedule.recipes import find_recipe

SEARCH = "search"
"""The name that asks for `search` instead of a known order."""


def choose_schedule(
    package: Package, schedule: str | None = None, microbatches: int | None = None, ranks: int | None = None
) -> Schedule:
    """Return the schedule to run a package with.

    Args:
        package: whose stages are run.
        schedule: a name or a CSV file; by default the package's plan, or 1f1b without one.
        microbatches: of a step; by default the plan's, else as many as stages.
        ranks: for schedules with any number of stages on a rank; by default the plan's.

    Raises:
        ScheduleError: there is no such schedule for these stages.
    """
    stages, planned = len(package.manifest.stages), PlannedStep.from_manifest(package.manifest)
    planned_schedule = planned.to_schedule() if planned is not None else None
    if schedule is None and planned_schedule is not None and planned is not None and planned.order:
        return resolve_schedule(planned_schedule, microbatches, stages, processes=None)
    if schedule is None:
        schedule = planned_schedule.name if planned_schedule is not None else "1f1b"
    if not schedule.endswith(".csv"):
        if microbatches is None:
            microbatches = planned.microbatches if planned else stages
        if ranks is None and planned and planned.schedule == find_recipe(schedule).name:
            ranks = planned.ranks
    chosen = resolve_schedule(schedule, microbatches, stages, processes=None, ranks=ranks)
    check(chosen)
    return chosen


def named_schedule(name: str) -> str | Schedule:
    """Read a schedule's CSV file, or check a schedule's name and return it. Raises ScheduleError."""
    return read_csv(name, transfers=False) if name.endswith(".csv") else find_recipe(name).name


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """A schedule to build, to read from a CSV file, or to `search`.

    Attributes:
        name: of a recipe, a CSV file, or `SEARCH`.
        ranks, microbatches, chunks: its sizes. A CSV file has all of them; those that are given must agree with it.
        placement: where `SEARCH` places the stages.
        times: of stages; by default F, I and W take 1 each.
        memory_limit: saved activations that a rank may hold.
        effort: scales how long `SEARCH` looks.
        join: whether to join I and W. A file's transfers are then taken out.
        sharded: whether the schedule has the collectives of sharded stages: a file's own, if it has any.
        resident: how many sharded stages of a rank may be whole at a time.
    """

    name: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    placement: str | None = None
    times: Times | None = None
    memory_limit: int | None = None
    effort: float = 1.0
    join: bool = False
    sharded: bool = False
    resident: int | None = None

    def schedule(self) -> Schedule:
        """Make the schedule, and check it. Raises ScheduleError if a size is missing or does not fit."""
        name, ranks, microbatches = self.name, self.ranks, self.microbatches
        sizes = {"ranks": ranks, "microbatches": microbatches}
        if name.endswith(".csv"):
            schedule = read_csv(name, transfers=not self.join)
        elif ranks is None or microbatches is None:
            if name.casefold() != SEARCH:
                find_recipe(name)  # an unknown name matters more than a missing size
            missing = " and ".join(argument(noun) for noun, size in sizes.items() if size is None)
            example = f"{argument('ranks', 4)} and {argument('microbatches', 8)}"
            raise ScheduleError(f"{name} lacks {missing}.", f"{example}.")
        elif name.casefold() == SEARCH:
            schedule = self._search(ranks, microbatches)
            is_gathered = self.sharded and self.resident is None
            return place_collectives(schedule, range(schedule.stages)) if is_gathered else schedule
        else:
            schedule = build(name, ranks, microbatches, self.chunks)
        for noun, size in sizes.items():
            if size not in (None, count := getattr(schedule, noun)):
                request = argument(noun, size)
                raise ScheduleError(f"{name} has {count} {noun}, and {request} was given.", "leave it out.")
        if self.chunks is not None and schedule.stages != self.chunks * schedule.ranks:
            raise ScheduleError(
                f"{name} has {schedule.stages} stages on {schedule.ranks} ranks, and "
                f"{argument('chunks', self.chunks)} was given.",
                "leave it out.",
            )
        if self.placement is not None and schedule.placement != PLACEMENTS[self.placement].places(
            schedule.ranks, schedule.stages // schedule.ranks
        ):
            raise ScheduleError(
                f"{schedule.name} places its stages on the ranks {schedule.placement}, which is no {self.placement}.",
                f"leave {argument('placement')} out; it chooses where {SEARCH} places stages.",
            )
        if self.join:
            if schedule.collectives:
                raise ScheduleError(f"{name} has collectives, which depend on the order.", "without --join-backwards.")
            schedule = join_backwards(schedule, self.times or unit_times(schedule.stages))
        if (self.sharded or self.resident is not None) and not schedule.collectives:
            schedule = place_collectives(schedule, range(schedule.stages), (), self.resident)
        check(schedule, self.memory_limit, self.resident)
        return schedule

    def _search(self, ranks: int, microbatches: int) -> Schedule:
        placement, times, chunks = self.placement or "loop", self.times, self.chunks
        form = PLACEMENTS[placement]
        if chunks is None:
            chunks = form.chunks if times is None else max(1, times.stages // ranks)
        elif chunks != form.chunks and not form.any_chunks:
            raise ScheduleError(
                f"With the placement {placement} a rank holds {form.chunks} stages.",
                f"leave {argument('chunks')} out.",
            )
        if times is None:
            times = unit_times(ranks * chunks)
        if times.stages != ranks * chunks:
            raise ScheduleError(
                f"{ranks} ranks with {chunks} chunk{'s' if chunks > 1 else ''} each have {ranks * chunks} stages, "
                f"and the times are for {times.stages}."
            )
        return search(times, ranks, microbatches, placement, self.memory_limit, self.effort, self.resident)


def unit_times(stages: int) -> Times:
    """Return times in which F, I and W take 1 each, and so does a gather or a reduction."""
    return Times.equal(stages, unshard=1.0, reduce_grad=1.0)
