"""The schedule that a verb's options name."""

from __future__ import annotations

from pipegraph.package import Package
from pipegraph.runtime.choose import choose
from pipegraph.schedule import Schedule, check


def choose_schedule(package: Package, schedule: str, microbatches: int | None) -> Schedule:
    """The schedule named, or in the CSV file named, for a package's stages; by default with a microbatch per stage."""
    stages = len(package.manifest.stages)
    if microbatches is None and not schedule.endswith(".csv"):
        microbatches = stages
    chosen = choose(schedule, microbatches, stages, processes=None)
    check(chosen)
    return chosen
