"""HTML pages that load nothing: a recorded run; and a package, with a card for each stage and its schedule over time.

Their templates, styles and scripts are in ``pages``. Names of a model may hold anything: templates escape them, and
JSON in a script cannot end the script. The script draws the timeline, from data in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.errors import one_line
from pipegraph.package import Manifest, Package, StageEntry, Value
from pipegraph.planner.step_prediction import describe_step, memory_by_kind
from pipegraph.report.colours import COLLECTIVE_MEANING, COLLECTIVES, MEANING, MEMORY, ActionColours, colour, ink
from pipegraph.report.package_picture import EQUAL_TIMES, SAME_RANK, simulated_package, stage_sizes
from pipegraph.report.text import Table, is_number, short_modules
from pipegraph.report.text.package_tables import (
    boundary_table,
    bytes_of,
    explain_cuts,
    has_times,
    held_modules,
    package_title,
    stage_table,
    tied_groups,
)
from pipegraph.report.text.run_report import (
    CAUSES,
    ERROR,
    critical_step,
    heading,
    idle_table,
    idle_times,
    loss_lines,
    memory_of_ranks,
    prediction_error,
    remarks,
    stage_time_format,
    stage_time_table,
)
from pipegraph.report.text.schedule_report import schedule_title
from pipegraph.schedule import Collective, CollectiveKind, Event, Kind, Schedule, Timeline, to_csv
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.tracing.analysis.advice import WORTH
from pipegraph.tracing.analysis.measured_steps import MeasuredStep, measured_timeline, messages
from pipegraph.tracing.analysis.run_analysis import RunAnalysis
from pipegraph.units import UNKNOWN, TimeFormat, format_bytes, format_number_of, format_percent, format_seconds

_FOLDER = Path(__file__).parent / "pages"

_PARTS = {
    "computes": "#0072b2",
    **dict(zip(CAUSES, ("#f0e442", "#d55e00", "#009e73", "#cc79a7"), strict=True)),
}
"""The parts of a rank's time, each with its colour; the causes have those of Okabe and Ito (2008)."""

_MOST = 60_000  # actions, messages and collectives on a page; more steps than that, or a longer schedule, are left out
_MOST_OPEN = 16  # stages and sentences of a list that is open at first


# ---- page of a run ---------------------------------------------------------------------------------------------------


def trace_page(analysis: RunAnalysis) -> str:
    """Return the whole page."""
    return templates().get_template("trace.html.jinja").render(
        title=_title(analysis),
        subtitle=heading(analysis),
        figures=list(_figures(analysis)),
        advice=one_line(analysis.advice.sentence),
        commands=[one_line(command) for command in analysis.advice.commands],
        problems=[one_line(problem) for problem in analysis.run.problems],
        alternative=one_line(_alternative(analysis)),
        critical_of=critical_step(analysis),
        critical_path=analysis.critical_path,
        notes=[one_line(remark) for remark in remarks(analysis) if not remark.startswith("problem")],
        candidates=list(_changes(analysis)),
        **timeline_parts(page_data(analysis)),
        **_idle(analysis),
        **_stages(analysis),
        **_collectives(analysis),
        **_run_figures(analysis),
    )  # fmt: skip


def _title(analysis: RunAnalysis) -> str:
    run = analysis.run
    model = "" if run.manifest is None else run.manifest.model.class_name
    description = describe_step(run.schedule.name, run.schedule.microbatches, run.schedule.ranks)
    return one_line(f"{model}: {description}" if model else description)


def _alternative(analysis: RunAnalysis) -> str:
    """Describe the timeline for screen readers."""
    return (
        f"Timeline of a step on {analysis.run.schedule.ranks} ranks: what each one computes over time, measured above "
        f"what was predicted{'; below each, its collectives' if analysis.collectives else ''}. Arrow keys go from "
        "action to action. The tables below have the figures. "
        f"{analysis.advice.sentence}"
    )


def _figures(analysis: RunAnalysis) -> Iterator[dict[str, str]]:
    """Yield the key figures, each with its name and a remark."""

    def figure(name: str, value: str, remark: str) -> dict[str, str]:
        return {"name": name, "value": value, "aside": remark}

    in_turn, count, expected = analysis.run.shares_process, len(analysis.steps), analysis.expected
    measured = analysis.simulated.makespan if in_turn else analysis.makespan
    unit = TimeFormat.for_seconds(measured)
    if in_turn:
        yield figure("a step, simulated", unit.text(measured), "with a process for each rank")
    else:
        yield figure("a step", unit.text(measured), f"median of {count}" if count > 1 else "the only one recorded")
    if expected is None:
        yield figure("predicted", UNKNOWN, "the package has no predicted times")
    else:
        off = expected.makespan / measured - 1 if measured else 0.0
        remark = f"{format_percent(abs(off))} {'less' if off < 0 else 'more'} than that"
        yield figure("predicted", unit.text(expected.makespan), remark)
    if analysis.bubble is not None:
        idle = sum(rank.idle for rank in analysis.idle)
        remark = "" if expected is None else f"predicted {format_percent(expected.bubble)}"
        yield figure("bubble", format_percent(analysis.bubble), remark)
        causes = [sum(column) for column in zip(*(astuple(rank.causes) for rank in analysis.idle), strict=True)]
        most, name = max(zip(causes, CAUSES, strict=True))
        yield figure("largest part of it", format_percent(most / idle if idle else 0.0), name)
    if analysis.iteration is not None:
        name = "a step, ranks in turn" if in_turn else "with data and optimizer"
        remark = "with data and optimizer" if in_turn else "a step"
        yield figure(name, format_seconds(analysis.iteration), remark)


def _idle(analysis: RunAnalysis) -> dict[str, Any]:
    """The idle time of ranks by cause, as bars and as a table."""
    unit = idle_times(analysis)
    headers, rows = idle_table(analysis)
    bars = [
        [
            {"width": round(100 * seconds / (rank.makespan or 1.0), 3), "colour": fill, "title": f"{name}: {text}"}
            for (name, fill), seconds in zip(_PARTS.items(), (rank.busy, *astuple(rank.causes)), strict=True)
            for text in [unit.text(seconds)]
        ]
        for rank in analysis.idle
    ]
    count = len([ranks for ranks in analysis.idle_by_step if ranks])
    subject = (
        "the simulated step"
        if analysis.run.shares_process
        else f"a step (mean of {count})"
        if count > 1
        else "the step"
    )
    return {
        "bubble": [{"rank": row[0], "parts": bar, "cells": row[1:]} for row, bar in zip(rows, bars, strict=True)],
        "bubble_of": subject,
        "bubble_headers": [unit.unit, *headers[1:]],
        "parts": [{"name": name, "colour": fill} for name, fill in _PARTS.items()],
        "causes": [{"name": name, "meaning": meaning} for name, meaning in CAUSES.items()],
    }


def _stages(analysis: RunAnalysis) -> dict[str, Any]:
    """The times of stages, predicted and measured, as a table with bars."""
    unit, placement = stage_time_format(analysis.stages), analysis.run.schedule.placement
    actions = [(stage, kind, pair) for stage, kinds in enumerate(analysis.stages) for kind, pair in kinds.items()]
    longest = max((max(pair.predicted or 0.0, pair.measured or 0.0) for _, _, pair in actions), default=0.0)
    rows = []
    for stage, kind, times in actions:
        fill, figures = colour(kind), (times.predicted, times.measured)
        rows.append(
            {
                "name": f"stage {stage}, rank {placement[stage]}" if kind is Kind.F else "",
                "kind": kind.value,
                "colour": fill,
                "ink": ink(fill),
                "cells": [*map(unit.number, figures), prediction_error(times)],
                "bars": [
                    {"width": round(100 * (figure or 0.0) / (longest or 1.0), 2), "part": part}
                    for figure, part in zip(figures, (45, 100), strict=True)
                ],
            }
        )
    headers = ["a microbatch", "", f"predicted {unit.unit}", f"measured {unit.unit}", "error", "one above the other"]
    has_errors = any(pair.error is not None for _, _, pair in actions)
    return {"stages": rows, "stage_headers": headers, "stage_note": f"error: {ERROR}" if has_errors else ""}


def _collectives(analysis: RunAnalysis) -> dict[str, Any]:
    """What the collectives of stages take, as a table; no rows without any."""
    collectives = analysis.collectives
    if not collectives:
        return {"collectives": []}
    headers, rows = stage_time_table(collectives, analysis.run.schedule.placement, CollectiveKind)
    unit = stage_time_format(collectives).unit
    return {"collective_headers": headers, "collectives": rows, "collective_unit": unit}


_CURVE = 600, 120  # width and height of the curve of losses


def _run_figures(analysis: RunAnalysis) -> dict[str, Any]:
    """The losses of the run as a curve, and the memory of its ranks as a table; nothing if they were not recorded."""
    figures = analysis.run.figures
    if figures is None:
        return {"loss_line": "", "memory": []}
    headers, rows = memory_of_ranks(figures.memory_pairs)
    losses = [(loss.step, loss.loss) for loss in figures.losses if loss.loss is not None]
    (first, last), values = ((losses[0][0], losses[-1][0]), [loss for _, loss in losses]) if losses else ((0, 0), [])
    low, high = min(values, default=0.0), max(values, default=0.0)
    width, height = _CURVE
    points = [
        (width * (step - first) / ((last - first) or 1), height * (1 - (loss - low) / ((high - low) or 1.0)))
        for step, loss in losses
    ]
    return {
        "loss_line": next(loss_lines(figures), ""),
        "loss_points": " ".join(f"{x:.1f},{y:.1f}" for x, y in points) if len(points) > 1 else "",
        "loss_range": f"{low:.6g} to {high:.6g}",
        "curve_width": width,
        "curve_height": height,
        "memory_headers": headers,
        "memory": rows,
    }


def _changes(analysis: RunAnalysis) -> Iterator[dict[str, Any]]:
    for change in analysis.advice.changes:
        yield {
            "change": one_line(change.change),
            "assuming": one_line(change.assuming),
            "gain": format_percent(-change.gain, signed=True),
            "of": change.measure,
            "better": change.gain >= WORTH,
        }


# ---- page of a package -----------------------------------------------------------------------------------------------


def package_page(package: Package, schedule: Schedule) -> str:
    """Return the text of an HTML file."""
    manifest, simulated = package.manifest, simulated_package(package.manifest, schedule)
    return templates().get_template("package.html.jinja").render(
        title=package_title(manifest),
        subtitle=schedule_title(schedule),
        figures=_package_figures(manifest, simulated),
        cards=list(_cards(manifest.at_capture(), schedule)),
        kinds=[
            {"name": kind.value, "colour": colour(kind), "ink": ink(colour(kind))} for kind in (Kind.F, Kind.I, Kind.W)
        ],
        most_open=_MOST_OPEN,
        memory=_rank_memory(manifest, schedule),
        memory_kinds=[{"name": name, "colour": fill} for name, fill in MEMORY.items()],
        drawn=sum(map(len, schedule.actions)) <= _MOST,
        note="" if simulated.in_seconds else EQUAL_TIMES,
        alternative=f"Timeline of {schedule_title(schedule)}, simulated. Arrow keys go from action to action.",
        tables={
            "Stages": stage_table(package),
            "What crosses between them": boundary_table(manifest),
            "Memory of each rank": _memory_table(manifest, schedule),
        },
        reasons=explain_cuts(manifest.prediction),
        tied=tied_groups(manifest),
        edited=[one_line(name) for name in package.edited()],
        orders=to_csv(schedule).splitlines(),
        generator=one_line(manifest.generator),
        **timeline_parts(_simulated_data(simulated)),
    )  # fmt: skip


def _package_figures(manifest: Manifest, simulated: SimulatedSchedule) -> list[dict[str, str]]:
    timeline, unit = simulated.timeline, simulated.time_format
    in_seconds = simulated.in_seconds
    figures = [
        ("stages", str(len(manifest.stages)), f"on {format_number_of('rank', simulated.schedule.ranks)}"),
        ("a step, simulated", unit.text(timeline.makespan), "predicted" if in_seconds else "F, I and W take 1 each"),
        ("bubble", format_percent(timeline.bubble), "idle, the mean over ranks"),
        ("saved activations", str(max(timeline.peak_activations)), "on the rank with the most"),
    ]
    return [dict(zip(("name", "value", "aside"), figure, strict=True)) for figure in figures]


def _cards(manifest: Manifest, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yield the stages, each with what the caller gives it and what it sends."""
    is_timed = has_times(manifest)
    totals = [sum(stage.cost.times or (0.0, 0.0, 0.0)) for stage in manifest.stages]
    unit, longest = TimeFormat.of_column(totals), max(totals, default=0.0) or 1.0
    for stage, total in zip(manifest.stages, totals, strict=True):
        times = zip((Kind.F, Kind.I, Kind.W), stage.cost.times or (0.0, 0.0, 0.0), strict=True)
        yield {
            "index": stage.index,
            "rank": schedule.placement[stage.index],
            "holds": one_line(short_modules(held_modules(manifest, stage.index)) or stage.class_name),
            "sizes": stage_sizes(stage),
            "total": unit.text(total) if is_timed else "",
            "bars": [
                {
                    "kind": kind.value,
                    "width": round(100 * seconds / longest, 2),
                    "colour": colour(kind),
                    "ink": ink(colour(kind)),
                    "title": f"{kind.value}: {unit.text(seconds)}",
                }
                for kind, seconds in times
                if is_timed and seconds
            ],
            "takes": [_described(value) for value in manifest.caller_tensors(stage.index)],
            "sends": list(_sends(manifest, schedule, stage)),
        }


def _sends(manifest: Manifest, schedule: Schedule, stage: StageEntry) -> Iterator[dict[str, str]]:
    """Yield a line for each stage that reads something of this one."""
    for producer, consumer in sorted(manifest.edges()):
        if producer != stage.index:
            continue
        values = [manifest.values[name] for name in manifest.edge_values(producer, consumer)]
        back = sum(bytes_of(value) for value in values if value.requires_grad)
        place, consumer_rank = schedule.placement[producer], schedule.placement[consumer]
        yield {
            "to": f"stage {consumer}",
            "way": SAME_RANK if place == consumer_rank else f"rank {place} to rank {consumer_rank}",
            "what": "; ".join(map(_described, values)),
            "amount": format_bytes(sum(map(bytes_of, values))) + (f", {format_bytes(back)} back" if back else ""),
        }
    if stage.index == len(manifest.stages) - 1:
        outputs = "; ".join(_described(manifest.values[name]) for name in stage.outputs)
        yield {"to": "the caller", "way": "the model's output", "what": outputs, "amount": ""}


def _described(value: Value) -> str:
    return one_line(str(value))


def _rank_memory(manifest: Manifest, schedule: Schedule) -> list[dict[str, Any]]:
    ranks = memory_by_kind(manifest, schedule)
    most = max((rank.total for rank in ranks), default=0) or 1
    return [
        {
            "rank": number,
            "total": format_bytes(rank.total),
            "parts": [
                {
                    "width": round(100 * size / most, 2),
                    "colour": MEMORY[kind],
                    "title": f"{kind}: {format_bytes(size)}",
                }
                for kind, size in rank.by_kind().items()
                if size
            ],
        }
        for number, rank in enumerate(ranks)
    ]


def _memory_table(manifest: Manifest, schedule: Schedule) -> Table:
    ranks = memory_by_kind(manifest, schedule)
    rows = [
        [str(number), *map(format_bytes, rank.by_kind().values()), format_bytes(rank.total)]
        for number, rank in enumerate(ranks)
    ]
    return ["rank", *(ranks[0].by_kind() if ranks else ()), "together"], rows


def _simulated_data(simulated: SimulatedSchedule) -> dict[str, Any]:
    """Return the data of ``timeline_view.js``: one step, which is simulated."""
    timeline = simulated.timeline
    step = {"number": 0, "complete": True, "messages": [], "critical": critical_places(timeline.events, timeline)}
    return {
        **schedule_data(simulated.schedule),
        "simulated": True,
        "unitless": not simulated.in_seconds,
        "shown": 0,
        "steps": [{**step, **timeline_data(timeline)}],
        "below": [],
    }


# ---- timelines -------------------------------------------------------------------------------------------------------
# What ``timeline.html.jinja`` draws on both pages.


def timeline_parts(data: dict[str, Any]) -> dict[str, str]:
    """Return what ``timeline.html.jinja`` and the frame of a page take: style, script and data."""
    return {
        "data": script_json(data),
        "style": _read_text("page.css"),
        "script": _read_text("timeline_view.js", "timeline_paint.js", "timeline_controls.js"),
    }


def schedule_data(schedule: Schedule) -> dict[str, Any]:
    """Return the ranks, and how actions look."""
    colours = ActionColours.from_schedule(schedule)
    tones = {kind: [colour(kind, chunk, colours.most) for chunk in range(colours.most)] for kind in colours.kinds}
    return {
        "ranks": [
            {"stages": [n for n, place in enumerate(schedule.placement) if place == rank]}
            for rank in range(schedule.ranks)
        ],
        "chunks": colours.chunks,
        "colours": {kind.value: [{"fill": fill, "ink": ink(fill)} for fill in fills] for kind, fills in tones.items()},
        "tones": colours.tones,
        "meaning": {kind.value: meaning for kind, meaning in MEANING.items()},
        "collectives": {
            kind.value: {"fill": fill, "ink": ink(fill), "meaning": COLLECTIVE_MEANING[kind]}
            for kind, fill in COLLECTIVES.items()
            if any(collective.kind is kind for collective in schedule.collectives)
        },
    }


def page_data(analysis: RunAnalysis) -> dict[str, Any]:
    """Return the data of ``timeline_view.js``, which says how actions and messages are written."""
    steps = _page_steps(analysis)
    timelines = [
        ("predicted", "predicted", analysis.expected),
        ("simulated", "simulated with measured times", analysis.simulated),
    ]
    if analysis.run.shares_process:
        timelines.reverse()
    return {
        **schedule_data(analysis.run.schedule),
        "shown": steps.index(analysis.step),
        "steps": [_step(step, analysis) for step in steps],
        "below": [
            {"short": short, "name": name, **timeline_data(timeline)} for short, name, timeline in timelines if timeline
        ],
    }


def _page_steps(analysis: RunAnalysis) -> list[MeasuredStep]:
    """Return the shown step and its neighbours, as many as a page can hold."""
    sizes = [sum(map(len, (*step.events, *step.transfers, *step.collectives))) for step in analysis.steps]
    room = _MOST
    numbers: list[int] = []
    for number in sorted(range(len(sizes)), key=lambda n: (abs(n - analysis.step_index), n)):
        room -= sizes[number]
        if numbers and room < 0:
            break
        numbers.append(number)
    return [analysis.steps[number] for number in sorted(numbers)]


def _step(step: MeasuredStep, analysis: RunAnalysis) -> dict[str, Any]:
    critical: list[tuple[int, int]] = []
    if step.complete and not analysis.run.shares_process:
        timeline = measured_timeline(step, analysis.run.schedule, analysis.times.hops)
        critical = critical_places(step.events, timeline)
    return {
        "number": step.number,
        "makespan": _microseconds(step.makespan),
        "complete": step.complete,
        "rows": [list(map(_event, row)) for row in step.events],
        "beside": [
            _collective_events((recorded.collective, recorded.start, recorded.end) for recorded in row)
            for row in step.collectives
        ],
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


def critical_places(rows: Sequence[Sequence[Event]], timeline: Timeline) -> list[tuple[int, int]]:
    """Return (rank, position in its row) of each action of the critical path."""
    places = {event.action: (rank, n) for rank, row in enumerate(rows) for n, event in enumerate(row)}
    return [places[event.action] for event in timeline.critical_path]


def timeline_data(timeline: Timeline) -> dict[str, Any]:
    """Return a timeline without messages."""
    rows: Sequence[Sequence[Event]] = timeline.events
    return {
        "makespan": _microseconds(timeline.makespan),
        "rows": [list(map(_event, row)) for row in rows],
        "beside": [_collective_events(rank_collectives.events) for rank_collectives in timeline.collectives]
        or [[] for _ in rows],
    }


def _event(event: Event) -> list[Any]:
    action = event.action
    times = map(_microseconds, (event.start, event.end))
    return [action.kind.value, action.stage, action.microbatch, *times]


def _collective_events(collectives: Iterable[tuple[Collective, float, float]]) -> list[list[Any]]:
    """Return the collectives of a rank that take time, as events without a microbatch."""
    return [
        [collective.kind.value, collective.stage, None, _microseconds(start), _microseconds(end)]
        for collective, start, end in collectives
        if collective.kind in COLLECTIVES and end > start
    ]


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


@lru_cache(maxsize=1)
def templates() -> jinja2.Environment:
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
