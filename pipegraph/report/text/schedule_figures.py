"""What a schedule costs: its figures as text, and everything as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipegraph.errors import one_line
from pipegraph.schedule import Schedule, SearchedSchedule
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import format_number_of, format_percent

_MOST_RANKS = 16  # whose figures are listed one by one


def schedule_title(schedule: Schedule) -> str:
    """Return ``1f1b: 4 ranks, 4 stages, 8 microbatches``."""
    sizes = {"rank": schedule.ranks, "stage": schedule.stages, "microbatch": schedule.microbatches}
    return f"{one_line(schedule.name)}: {', '.join(format_number_of(name, size) for name, size in sizes.items())}"


def render_figures(simulated: SimulatedSchedule) -> str:
    """Return a line for each figure."""
    timeline, unit = simulated.timeline, simulated.time_format
    times = [unit.text(time) for time in (timeline.makespan, timeline.span, simulated.lower_bound)]
    width = max(map(len, times))
    lines = [
        ("makespan", f"{times[0]:<{width}}   bubble {format_percent(timeline.bubble)}"),
        ("span", f"{times[1]:<{width}}   bubble {format_percent(timeline.span_bubble)}"),
        ("lower bound", f"{times[2]:<{width}}   {_gap(simulated)}"),
        ("peak activations", _peaks(timeline.peak_activations, simulated.memory_limit)),
        ("critical path", timeline.describe_critical_path()),
    ]
    if isinstance(simulated.schedule, SearchedSchedule):
        lines.append(("found from", simulated.schedule.origin))
    label = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{label}}  {text}" for name, text in lines)


def simulated_schedule_dict(simulated: SimulatedSchedule) -> dict[str, Any]:
    """Return everything as data, for ``--json``, with every action. Times are in the unit of the given ones."""
    schedule, timeline, times = simulated.schedule, simulated.timeline, simulated.times
    return {
        "name": schedule.name,
        **({"origin": schedule.origin} if isinstance(schedule, SearchedSchedule) else {}),
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "chunks": max(schedule.placement.count(rank) for rank in range(schedule.ranks)),
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
        "lower_bound": simulated.lower_bound,
        "peak_activations": list(timeline.peak_activations),
        "memory_limit": simulated.memory_limit,
        "busy": list(timeline.busy),
        "critical_path": [str(event.action) for event in timeline.critical_path],
        "actions": [[str(action) for action in row] for row in schedule.actions],
        "events": [
            [{"action": str(event.action), "start": event.start, "end": event.end} for event in row]
            for row in timeline.events
        ],
    }


def _gap(simulated: SimulatedSchedule) -> str:
    if simulated.gap < 5e-4:
        return "reached" if simulated.gap < 1e-9 else "all but reached"
    return f"makespan {format_percent(simulated.gap)} above it"


def _peaks(peaks: Sequence[int], limit: int | None) -> str:
    """``4, 3, 2, 1`` of a few ranks, ``8 on every rank``, or the extremes of many."""
    allowed = "" if limit is None else f" (limit {limit})"
    if len(set(peaks)) == 1 and len(peaks) > 1:
        return f"{peaks[0]} on every rank{allowed}"
    if len(peaks) <= _MOST_RANKS:
        return f"{', '.join(map(str, peaks))}{allowed}"
    return f"{min(peaks)} to {max(peaks)}, the most on rank {peaks.index(max(peaks))}{allowed}"


def _per_boundary(figures: Any) -> Any:
    if isinstance(figures, Mapping):
        return {f"{producer}-{consumer}": figure for (producer, consumer), figure in figures.items()}
    return list(figures) if isinstance(figures, Sequence) else figures
