"""What the prices of a package come to under a schedule: a step, its bubble, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass

from pipegraph.cost import SegmentCost
from pipegraph.cost.hardware import Hardware
from pipegraph.package import Manifest
from pipegraph.planner.package_costs import has_times, stage_costs
from pipegraph.planner.step_estimate import RankMemory, memory_parts_of, times_of
from pipegraph.report.planned_step import Planned
from pipegraph.schedule import Schedule, Times, simulate


@dataclass(frozen=True)
class Predicted:
    """What was predicted of a step.

    Attributes:
        costs: of each stage; None where the package was not priced.
        times: for `simulate`; None where stages have no predicted times.
        step: seconds; with all ranks in one process, which then take turns, what they take together.
        bubble: the part of a step in which even the busiest rank computes nothing; None where ranks take turns.
        memory: of each rank.
        links_known: whether crossing between ranks is counted, where that takes time.
    """

    costs: tuple[SegmentCost, ...] | None
    times: Times | None
    step: float | None
    bubble: float | None
    memory: tuple[RankMemory, ...] | None
    links_known: bool


def predicted(
    manifest: Manifest, schedule: Schedule, hardware: Hardware | None = None, in_turn: bool = False
) -> Predicted:
    """What a run of a package is expected to take; ``in_turn`` tells that one process runs all ranks.

    ``hardware`` has the links. By default a planned step is what the plan says; one of another schedule has the links
    of the profile that priced the package, where it is one that pipegraph has, or else crossing takes no time.
    """
    costs, plan = stage_costs(manifest), manifest.prediction
    timed = costs is not None and has_times(manifest)
    planned, value = Planned.of(manifest), None
    if hardware is None and plan is not None and planned is not None and planned.is_run_by(schedule):
        value = plan.value
    if hardware is None and plan is not None and plan.hardware in Hardware.names():
        hardware = Hardware.load(plan.hardware)
    priced = costs if timed else None
    times = times_of(priced, schedule, None if hardware is None else hardware.link) if priced else None
    step, bubble = _step(schedule, times, value, in_turn)
    return Predicted(
        costs=costs,
        times=times,
        step=step,
        bubble=bubble,
        memory=None if costs is None else memory_parts_of(costs, schedule),
        links_known=in_turn or hardware is not None or value is not None,
    )


def _step(
    schedule: Schedule, times: Times | None, value: float | None, in_turn: bool
) -> tuple[float | None, float | None]:
    """A step's predicted seconds and bubble; ``value`` is what the plan says of it."""
    if times is None:
        return None, None
    if in_turn:
        return sum(times.of(action) for row in schedule.actions for action in row), None
    timeline = simulate(schedule, times)
    if value is None:
        value = timeline.makespan
    return value, 1 - max(timeline.busy) / value if value else 0.0
