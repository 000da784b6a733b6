"""The step that a package was planned for, and what a run does instead."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.errors import ScheduleError
from pipegraph.package import Manifest
from pipegraph.schedule import Schedule, build


@dataclass(frozen=True)
class Planned:
    """The schedule of a package's plan, the rank of each stage, and the microbatches of a step."""

    schedule: str
    placement: tuple[int, ...]
    microbatches: int

    @classmethod
    def of(cls, manifest: Manifest) -> Planned | None:
        """None where a package was cut without a plan: at given points, or into equal numbers of segments."""
        plan = manifest.prediction
        return None if plan is None else cls(plan.schedule, plan.placement, plan.microbatches)

    @property
    def ranks(self) -> int:
        return len(set(self.placement))

    @property
    def is_known(self) -> bool:
        """Whether this is a schedule that its name and numbers make; otherwise its order stands in a file."""
        try:
            made = build(self.schedule, self.ranks, self.microbatches, len(self.placement) // self.ranks)
        except ScheduleError:
            return False
        return made.placement == self.placement

    def is_run_by(self, schedule: Schedule) -> bool:
        """Whether this is the planned step."""
        return Planned(schedule.name, tuple(schedule.placement), schedule.microbatches) == self

    def __str__(self) -> str:
        return words(self.schedule, self.microbatches, self.ranks)


def words(name: str, microbatches: int, ranks: int) -> str:
    """What a step is: ``zb-v with 4 microbatches on 2 ranks``."""
    counts = ((microbatches, "microbatch", "es"), (ranks, "rank", "s"))
    return "{} with {} on {}".format(name, *(f"{n} {what}{'' if n == 1 else plural}" for n, what, plural in counts))


def difference(manifest: Manifest, schedule: Schedule) -> str:
    """A line that says what was planned where a run is of something else, and what to try; empty where it is not."""
    planned = Planned.of(manifest)
    if planned is None or planned.is_run_by(schedule):
        return ""
    ran = words(schedule.name, schedule.microbatches, schedule.ranks)
    how = (
        "without --schedule, --microbatches and --nproc" if planned.is_known else "--schedule with the plan's CSV file"
    )
    return f"The plan was {planned}, and this was {ran}. Try: {how}"
