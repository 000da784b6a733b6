"""The schedule that the options of a command name."""

from __future__ import annotations

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
        schedule: a name or a CSV file; by default the package's plan, if a name and numbers make it, else 1f1b.
        microbatches: of a step; by default the plan's, else as many as stages.
        ranks: for schedules with any number of stages on a rank; by default the plan's.

    Raises:
        ScheduleError: there is no such schedule for these stages.
    """
    stages, planned = len(package.manifest.stages), PlannedStep.from_manifest(package.manifest)
    if schedule is None:
        schedule = planned.schedule if planned and planned.is_buildable else "1f1b"
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


def make_schedule(
    name: str,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    placement: str | None = None,
    times: Times | None = None,
    memory_limit: int | None = None,
    effort: float = 1.0,
    sharded: bool = False,
    resident: int | None = None,
    join: bool = False,
) -> Schedule:
    """Build, read (from a CSV file) or `search` a schedule, and check it.

    A CSV file has all the sizes; arguments must agree with them. If the stages are ``sharded``, or ``resident`` says
    how many of a rank may be whole at a time, the schedule has their collectives: a file's own, if it has any. To
    ``join`` backwards, a file's transfers are taken out.

    Raises:
        ScheduleError: a size is missing or does not fit, or the schedule is wrong.
    """
    if name.endswith(".csv"):
        schedule = read_csv(name, transfers=not join)
    elif ranks is None or microbatches is None:
        if name.casefold() != SEARCH:
            find_recipe(name)  # an unknown name matters more than a missing size
        missing = " and ".join(argument(noun) for noun, size in _sizes(ranks, microbatches).items() if size is None)
        example = f"{argument('ranks', 4)} and {argument('microbatches', 8)}"
        raise ScheduleError(f"{name} lacks {missing}.", f"{example}.")
    elif name.casefold() == SEARCH:
        schedule = _search(ranks, microbatches, chunks, placement or "loop", times, memory_limit, effort, resident)
        return place_collectives(schedule, range(schedule.stages)) if sharded and resident is None else schedule
    else:
        schedule = build(name, ranks, microbatches, chunks)
    for noun, size in _sizes(ranks, microbatches).items():
        if size not in (None, count := getattr(schedule, noun)):
            raise ScheduleError(f"{name} has {count} {noun}, and {argument(noun, size)} was given.", "leave it out.")
    if chunks is not None and schedule.stages != chunks * schedule.ranks:
        raise ScheduleError(
            f"{name} has {schedule.stages} stages on {schedule.ranks} ranks, and {argument('chunks', chunks)} was "
            "given.",
            "leave it out.",
        )
    if placement is not None and schedule.placement != _places(placement, schedule):
        raise ScheduleError(
            f"{schedule.name} places its stages on the ranks {schedule.placement}, which is no {placement}.",
            f"leave {argument('placement')} out; it chooses where {SEARCH} places stages.",
        )
    if join:
        if schedule.collectives:
            raise ScheduleError(f"{name} has collectives, which depend on the order.", "without --join-backwards.")
        schedule = join_backwards(schedule, times or unit_times(schedule.stages))
    if (sharded or resident is not None) and not schedule.collectives:
        schedule = place_collectives(schedule, range(schedule.stages), (), resident)
    check(schedule, memory_limit, resident)
    return schedule


def _sizes(ranks: int | None, microbatches: int | None) -> dict[str, int | None]:
    return {"ranks": ranks, "microbatches": microbatches}


def _search(
    ranks: int,
    microbatches: int,
    chunks: int | None,
    placement: str,
    times: Times | None,
    memory_limit: int | None,
    effort: float,
    resident: int | None,
) -> Schedule:
    form = PLACEMENTS[placement]
    if chunks is None:
        chunks = form.chunks if times is None else max(1, times.stages // ranks)
    elif chunks != form.chunks and not form.any_chunks:
        raise ScheduleError(
            f"With the placement {placement} a rank holds {form.chunks} stages.", f"leave {argument('chunks')} out."
        )
    if times is None:
        times = unit_times(ranks * chunks)
    if times.stages != ranks * chunks:
        raise ScheduleError(
            f"{ranks} ranks with {chunks} chunk{'s' if chunks > 1 else ''} each have {ranks * chunks} stages, "
            f"and the times are for {times.stages}."
        )
    return search(times, ranks, microbatches, placement, memory_limit, effort, resident)


def unit_times(stages: int) -> Times:
    """Return times in which F, I and W take 1 each, and so does a gather or a reduction."""
    return Times.equal(stages, unshard=1.0, reduce_grad=1.0)


def _places(placement: str, schedule: Schedule) -> tuple[int, ...]:
    """Return stage → rank, if the schedule's stages were placed like this."""
    return PLACEMENTS[placement].places(schedule.ranks, schedule.stages // schedule.ranks)
