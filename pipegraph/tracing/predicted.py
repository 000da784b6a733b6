"""What was predicted of a step when its package was written."""

from __future__ import annotations

from pipegraph.cost.hardware import Hardware
from pipegraph.errors import PipegraphError
from pipegraph.package import Manifest
from pipegraph.planner.package_costs import has_times, stage_costs
from pipegraph.planner.step_estimate import times_of
from pipegraph.schedule import Schedule, Timeline, Times, simulate


def predicted_times(manifest: Manifest | None, schedule: Schedule) -> Times | None:
    """What the package's prices come to, with the links of the profile that priced it where pipegraph has it.

    None for a package without times, of other stages, or with prices that are damaged.
    """
    if manifest is None or len(manifest.stages) != schedule.stages or not has_times(manifest):
        return None
    try:
        costs = stage_costs(manifest)
        if costs is None:
            return None
        link = Hardware.load(_hardware(manifest)).link if links_known(manifest) else None
        return times_of(costs, schedule, link)
    except (PipegraphError, KeyError, TypeError, ValueError):
        return None


def links_known(manifest: Manifest) -> bool:
    """Whether pipegraph has the profile that priced the package; otherwise crossing takes no predicted time."""
    return _hardware(manifest) in Hardware.names()


def _hardware(manifest: Manifest) -> str:
    return manifest.prediction.hardware if manifest.prediction else ""


def predicted_step(manifest: Manifest | None, schedule: Schedule) -> Timeline | None:
    """A step of the schedule with these times."""
    times = predicted_times(manifest, schedule)
    return None if times is None else simulate(schedule, times)
