"""A schedule and what it costs: the text, the table and the JSON of ``pipegraph schedule``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from pipegraph.errors import one_line
from pipegraph.report.colours import chunks_of
from pipegraph.schedule import Schedule, SearchedSchedule, Timeline, Times, lower_bound, simulate
from pipegraph.units import TimeFormat, format_percent

_MOST_RANKS = 16  # whose figures are told one by one


@dataclass(frozen=True)
class Simulation:
    """A schedule, run in simulated time.

    ``in_seconds`` tells whether the times are seconds, or multiples of some action's.
    """

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
    def unit(self) -> TimeFormat:
        return TimeFormat.of(self.timeline.makespan) if self.in_seconds else TimeFormat()


def title(schedule: Schedule) -> str:
    """``1f1b: 4 ranks, 4 stages, 8 microbatches``"""
    sizes = (
        ("rank", "s", schedule.ranks),
        ("stage", "s", schedule.stages),
        ("microbatch", "es", schedule.microbatches),
    )
    parts = (f"{size} {name}{plural if size > 1 else ''}" for name, plural, size in sizes)
    return f"{one_line(schedule.name)}: {', '.join(parts)}"


def figures(simulation: Simulation) -> str:
    """What it costs, a line each."""
    timeline, unit = simulation.timeline, simulation.unit
    times = [unit.text(time) for time in (timeline.makespan, timeline.span, simulation.lower_bound)]
    width = max(map(len, times))
    lines = [
        ("makespan", f"{times[0]:<{width}}   bubble {format_percent(timeline.bubble)}"),
        ("span", f"{times[1]:<{width}}   bubble {format_percent(timeline.span_bubble)}"),
        ("lower bound", f"{times[2]:<{width}}   {_gap(simulation)}"),
        ("peak activations", _peaks(timeline.peak_activations, simulation.memory_limit)),
        ("critical path", timeline.describe_critical_path()),
    ]
    if isinstance(simulation.schedule, SearchedSchedule):
        lines.append(("found from", simulation.schedule.origin))
    label = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{label}}  {text}" for name, text in lines)


def simulation_dict(simulation: Simulation) -> dict[str, Any]:
    """The same as data, for ``--json``, with every action. Times are in the unit of the given ones."""
    schedule, timeline, times = simulation.schedule, simulation.timeline, simulation.times
    return {
        "name": schedule.name,
        **({"origin": schedule.origin} if isinstance(schedule, SearchedSchedule) else {}),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "chunks": chunks_of(schedule)[0],
        "microbatches": schedule.microbatches,
        "placement": list(schedule.placement),
        "times": {
            "forward": list(times.forward),
            "input_grad": list(times.input_grad),
            "weight_grad": list(times.weight_grad),
            "hop": _per_boundary(times.hop),
            "transfer": _per_boundary(times.transfer),
        },
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "lower_bound": simulation.lower_bound,
        "peak_activations": list(timeline.peak_activations),
        "memory_limit": simulation.memory_limit,
        "busy": list(timeline.busy),
        "critical_path": [str(event.action) for event in timeline.critical_path],
        "actions": [[str(action) for action in row] for row in schedule.actions],
        "events": [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
            for row in timeline.events
        ],
    }


def _gap(simulation: Simulation) -> str:
    if simulation.gap < 5e-4:
        return "reached" if simulation.gap < 1e-9 else "all but reached"
    return f"makespan {format_percent(simulation.gap)} above it"


def _peaks(peaks: Sequence[int], limit: int | None) -> str:
    """``4, 3, 2, 1`` of a few ranks, ``8 on every rank``, or the extremes of many."""
    allowed = "" if limit is None else f" (limit {limit})"
    if len(set(peaks)) == 1 and len(peaks) > 1:
        return f"{peaks[0]} on every rank{allowed}"
    if len(peaks) <= _MOST_RANKS:
        return f"{', '.join(map(str, peaks))}{allowed}"
    runs = [(peak, len(list(group))) for peak, group in groupby(sorted(peaks))]
    return f"{runs[0][0]} to {runs[-1][0]}, the most on rank {peaks.index(max(peaks))}{allowed}"


def _per_boundary(figures: Any) -> Any:
    if isinstance(figures, Mapping):
        return {f"{producer}-{consumer}": figure for (producer, consumer), figure in figures.items()}
    return list(figures) if isinstance(figures, Sequence) else figures
