"""A package, and a recorded run, as HTML pages that load nothing. Their templates, styles and scripts are in ``pages``.

Names of a model may hold anything: templates escape them, and JSON in a script cannot end the script. The script of a
run's page draws the timeline, from data in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.errors import one_line
from pipegraph.package import Package
from pipegraph.planner.step_prediction import describe_step, memory_by_kind
from pipegraph.report.colours import MEANING, ActionColours, colour, ink
from pipegraph.report.package_picture import package_svg
from pipegraph.report.text import Table, is_number
from pipegraph.report.text.package_tables import boundary_table, explain_cuts, package_title, stage_table, tied_groups
from pipegraph.report.text.predicted_vs_measured import prediction_error, stage_time_format
from pipegraph.report.text.trace_report import CAUSES, critical_step, heading, idle_table, idle_times, remarks
from pipegraph.schedule import Event, Kind, Schedule, Timeline, to_csv
from pipegraph.tracing.analysis.advice import WORTH
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_timeline, messages
from pipegraph.tracing.analysis.run_analysis import RunAnalysis
from pipegraph.units import UNKNOWN, TimeFormat, format_bytes, format_percent, format_seconds

_FOLDER = Path(__file__).parent / "pages"

_PARTS = {
    "computes": colour(Kind.F),
    **dict(zip(CAUSES, ("#aab4c2", "#8a5bb5", "#1f9e8f", "#4b5262"), strict=True)),
}
"""The parts of a rank's time, each with its colour."""

_MOST = 60_000  # actions and messages on a page; more steps than that are left out


def package_page(package: Package, schedule: Schedule) -> str:
    """Return the text of an HTML file."""
    manifest = package.manifest
    return _templates().get_template("package.html.jinja").render(
        title=package_title(manifest),
        svg=package_svg(package, schedule),
        tables={
            "Stages": stage_table(package),
            "What crosses between them": boundary_table(manifest),
            "Memory of each rank": _memory(package, schedule),
        },
        reasons=explain_cuts(manifest),
        tied=tied_groups(manifest),
        edited=package.edited(),
        orders=to_csv(schedule).splitlines(),
        generator=one_line(manifest.generator),
    )  # fmt: skip


def _memory(package: Package, schedule: Schedule) -> Table:
    ranks = memory_by_kind(package.manifest, schedule)
    rows = [[str(rank.rank), *map(format_bytes, rank.by_kind().values()), format_bytes(rank.total)] for rank in ranks]
    return ["rank", *(ranks[0].by_kind() if ranks else ()), "together"], rows


def trace_page(analysis: RunAnalysis) -> str:
    """Return the whole page."""
    return _templates().get_template("trace.html.jinja").render(
        title=_title(analysis),
        subtitle=heading(analysis),
        figures=list(_figures(analysis)),
        advice=one_line(analysis.advice.sentence),
        problems=[one_line(problem) for problem in analysis.run.problems],
        alternative=one_line(_alternative(analysis)),
        critical_of=critical_step(analysis),
        critical_path=analysis.critical_path,
        notes=[one_line(each) for each in remarks(analysis) if not each.startswith("problem")],
        candidates=list(_changes(analysis)),
        data=script_json(page_data(analysis)),
        style=_read_text("trace.css"),
        script=_read_text("trace_view.js", "trace_paint.js", "trace_controls.js"),
        **_idle(analysis),
        **_stages(analysis),
    )  # fmt: skip


def _title(analysis: RunAnalysis) -> str:
    run = analysis.run
    model = "" if run.manifest is None else run.manifest.model.class_name
    what = describe_step(run.schedule.name, run.schedule.microbatches, run.schedule.ranks)
    return one_line(f"{model}: {what}" if model else what)


def _alternative(analysis: RunAnalysis) -> str:
    """Describe the timeline for screen readers."""
    return (
        f"Timeline of a step on {analysis.run.schedule.ranks} ranks: what each one computes over time, measured above "
        "what was predicted. Arrow keys go from action to action. The tables below have the figures. "
        f"{analysis.advice.sentence}"
    )


def _figures(analysis: RunAnalysis) -> Iterator[dict[str, str]]:
    """Yield the key figures, each with its name and a remark."""

    def figure(name: str, value: str, aside: str) -> dict[str, str]:
        return {"name": name, "value": value, "aside": aside}

    in_turn, count, expected = analysis.run.shares_process, len(analysis.steps), analysis.expected
    measured = analysis.simulated.makespan if in_turn else analysis.makespan
    unit = TimeFormat.of(measured)
    if in_turn:
        yield figure("a step, simulated", unit.text(measured), "with a process for each rank")
    else:
        yield figure("a step", unit.text(measured), f"median of {count}" if count > 1 else "the only one recorded")
    if expected is None:
        yield figure("predicted", UNKNOWN, "the package has no predicted times")
    else:
        off = expected.makespan / measured - 1 if measured else 0.0
        aside = f"{format_percent(abs(off))} {'less' if off < 0 else 'more'} than that"
        yield figure("predicted", unit.text(expected.makespan), aside)
    if analysis.idle:
        idle = sum(each.idle for each in analysis.idle)
        total = sum(each.makespan for each in analysis.idle) or 1.0
        aside = "" if expected is None else f"predicted {format_percent(expected.bubble)}"
        yield figure("bubble", format_percent(idle / total), aside)
        causes = [sum(column) for column in zip(*(astuple(each.causes) for each in analysis.idle), strict=True)]
        most, name = max(zip(causes, CAUSES, strict=True))
        yield figure("largest part of it", format_percent(most / idle if idle else 0.0), name)
    if analysis.iteration is not None:
        name = "a step, ranks in turn" if in_turn else "with data and optimizer"
        aside = "with data and optimizer" if in_turn else "a step"
        yield figure(name, format_seconds(analysis.iteration), aside)


def _idle(analysis: RunAnalysis) -> dict[str, Any]:
    """The idle time of ranks by cause, as bars and as a table."""
    unit = idle_times(analysis)
    headers, rows = idle_table(analysis)
    bars = [
        [
            {"width": round(100 * seconds / (each.makespan or 1.0), 3), "colour": fill, "title": f"{name}: {text}"}
            for (name, fill), seconds in zip(_PARTS.items(), (each.busy, *astuple(each.causes)), strict=True)
            for text in [unit.text(seconds)]
        ]
        for each in analysis.idle
    ]
    count = len([each for each in analysis.idle_by_step if each])
    of = (
        "the simulated step"
        if analysis.run.shares_process
        else f"a step (mean of {count})"
        if count > 1
        else "the step"
    )
    return {
        "bubble": [{"rank": row[0], "parts": bar, "cells": row[1:]} for row, bar in zip(rows, bars, strict=True)],
        "bubble_of": of,
        "bubble_headers": [unit.unit, *headers[1:]],
        "parts": [{"name": name, "colour": fill} for name, fill in _PARTS.items()],
        "causes": [{"name": name, "meaning": meaning} for name, meaning in CAUSES.items()],
    }


def _stages(analysis: RunAnalysis) -> dict[str, Any]:
    """The times of stages, predicted and measured, as a table with bars."""
    unit, placement = stage_time_format(analysis.stages), analysis.run.schedule.placement
    actions = [(stage, kind, each) for stage, kinds in enumerate(analysis.stages) for kind, each in kinds.items()]
    longest = max((max(each.predicted or 0.0, each.measured or 0.0) for _, _, each in actions), default=0.0)
    rows = []
    for stage, kind, each in actions:
        fill, figures = colour(kind), (each.predicted, each.measured)
        rows.append(
            {
                "name": f"stage {stage}, rank {placement[stage]}" if kind is Kind.F else "",
                "kind": kind.value,
                "colour": fill,
                "ink": ink(fill),
                "cells": [*map(unit.number, figures), prediction_error(each)],
                "bars": [
                    {"width": round(100 * (figure or 0.0) / (longest or 1.0), 2), "opacity": opacity}
                    for figure, opacity in zip(figures, (0.45, 1), strict=True)
                ],
            }
        )
    headers = ["a microbatch", "", f"predicted {unit.unit}", f"measured {unit.unit}", "error", "one above the other"]
    return {"stages": rows, "stage_headers": headers}


def _changes(analysis: RunAnalysis) -> Iterator[dict[str, Any]]:
    for each in analysis.advice.changes:
        yield {
            "change": one_line(each.change),
            "assuming": one_line(each.assuming),
            "gain": format_percent(each.gain),
            "of": "a step" if each.same_batch else "a microbatch",
            "better": each.gain >= WORTH,
        }


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


@lru_cache(maxsize=1)
def _templates() -> jinja2.Environment:
    """Return the templates of the pages; they escape their values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    environment.tests["number"] = is_number
    return environment


def _read_text(*names: str) -> str:
    """Return the text of files of that folder, one after the other."""
    return "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in names)


def script_json(data: Any) -> str:
    """Return JSON for a script element: ASCII, and without the signs that end one or begin a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
