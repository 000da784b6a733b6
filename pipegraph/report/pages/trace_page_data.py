"""What the script of a run's page draws: actions and messages of each step, in microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipegraph.report.colours import MEANING, ActionColours, colour, ink
from pipegraph.schedule import Event, Timeline
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_timeline, messages
from pipegraph.tracing.analysis.run_analysis import RunAnalysis
from pipegraph.units import TimeFormat

_MOST = 60_000  # actions and messages on a page; more steps than that are left out


def page_data(analysis: RunAnalysis) -> dict[str, Any]:
    """Return the data of ``trace_view.js``, which says how actions and messages are written."""
    schedule, colours = analysis.run.schedule, ActionColours.of(analysis.run.schedule)
    unit, kept = TimeFormat.of(analysis.step.makespan), _kept(analysis)
    timelines = [
        ("predicted", "predicted", analysis.expected),
        ("simulated", "simulated with measured times", analysis.simulated),
    ]
    if analysis.run.shares_process:
        timelines.reverse()
    tones = {kind: [colour(kind, chunk, colours.most) for chunk in range(colours.most)] for kind in colours.kinds}
    return {
        "unit": {"name": unit.unit, "microseconds": unit.size * 1e6},
        "ranks": [
            {"stages": [n for n, place in enumerate(schedule.placement) if place == rank]}
            for rank in range(schedule.ranks)
        ],
        "chunks": colours.chunks,
        "colours": {kind.value: [{"fill": fill, "ink": ink(fill)} for fill in fills] for kind, fills in tones.items()},
        "tones": colours.tones,
        "meaning": {kind.value: meaning for kind, meaning in MEANING.items()},
        "shown": kept.index(analysis.step),
        "steps": [_step(step, analysis) for step in kept],
        "below": [{"short": short, "name": name, **_timeline(each)} for short, name, each in timelines if each],
    }


def _kept(analysis: RunAnalysis) -> list[MeasuredStep]:
    """Return the shown step and its neighbours, as many as a page can hold."""
    sizes = [sum(map(len, (*step.events, *step.transfers))) for step in analysis.steps]
    room = _MOST
    kept: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda n: (abs(n - analysis.shown), n)):
        room -= sizes[number]
        if kept and room < 0:
            break
        kept.append(number)
    return [analysis.steps[number] for number in sorted(kept)]


def _step(step: MeasuredStep, analysis: RunAnalysis) -> dict[str, Any]:
    critical: list[tuple[int, int]] = []
    if step.complete and not analysis.run.shares_process:
        places = {event.action: (rank, n) for rank, row in enumerate(step.events) for n, event in enumerate(row)}
        timeline = measured_timeline(step, analysis.run.schedule, analysis.times.hops)
        critical = [places[event.action] for event in timeline.critical_path]
    return {
        "number": step.number,
        "makespan": _microseconds(step.makespan),
        "complete": step.complete,
        "rows": [list(map(_event, row)) for row in step.events],
        "messages": [
            [
                send.rank,
                receive.rank,
                *map(_microseconds, (send.start, receive.start, receive.end)),
                send.action.kind.value,
                send.action.stage,
                send.action.peer,
                send.action.microbatch,
                send.bytes or receive.bytes,
            ]
            for send, receive in messages(step)
        ],
        "critical": critical,
    }


def _timeline(timeline: Timeline) -> dict[str, Any]:
    rows: Sequence[Sequence[Event]] = timeline.events
    return {"makespan": _microseconds(timeline.makespan), "rows": [list(map(_event, row)) for row in rows]}


def _event(event: Event) -> list[Any]:
    action = event.action
    times = map(_microseconds, (event.start, event.end))
    return [action.kind.value, action.stage, action.microbatch, *times]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
