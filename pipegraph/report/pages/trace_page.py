"""A recorded run as one HTML page that needs nothing else: timeline, tables and advice.

The texts are in ``pages/``: the template, its style and its script. Names of a model may hold anything: the template
escapes them, and in the script's data nothing is left that could end it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from pipegraph.errors import one_line
from pipegraph.planner.package_prediction import describe_step
from pipegraph.report.colours import colour, ink
from pipegraph.report.pages.trace_page_data import page_data
from pipegraph.report.text.trace_report import (
    CAUSES,
    MEANING_OF_CAUSES,
    cause_cells,
    critical_of,
    error_of,
    heading,
    remarks,
    time_unit,
)
from pipegraph.tracing.analysis.advice import WORTH
from pipegraph.tracing.analysis.idle_causes import RankBubble
from pipegraph.tracing.analysis.run_analysis import Analysis
from pipegraph.units import UNKNOWN, TimeFormat, format_percent, format_seconds

_PAGES = Path(__file__).parent
_SCRIPT = ("trace_view.js", "trace_paint.js", "trace_controls.js")
_COMPUTES = "#1b5faa"
_CAUSE_COLOURS = ("#aab4c2", "#8a5bb5", "#1f9e8f", "#4b5262")


def trace_page(analysis: Analysis) -> str:
    """The whole page."""
    return _environment().get_template("trace.html.jinja").render(
        title=_title(analysis),
        subtitle=heading(analysis),
        figures=list(_figures(analysis)),
        advice=one_line(analysis.advice.sentence),
        problems=[one_line(problem) for problem in analysis.run.problems],
        alternative=one_line(_alternative(analysis)),
        critical_of=critical_of(analysis),
        critical_path=analysis.critical_path,
        notes=[one_line(each) for each in remarks(analysis) if not each.startswith("problem")],
        candidates=list(_candidates(analysis)),
        data=script_json(page_data(analysis)),
        style=(_PAGES / "trace.css").read_text(encoding="utf-8"),
        script="\n".join((_PAGES / name).read_text(encoding="utf-8") for name in _SCRIPT),
        **_bubble(analysis),
        **_stages(analysis),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_PAGES),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )


def script_json(data: Any) -> str:
    """JSON for a script element: ASCII, and without the signs that end one or begin a comment in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _title(analysis: Analysis) -> str:
    run = analysis.run
    model = "" if run.manifest is None else run.manifest.model.class_name
    what = describe_step(run.schedule.name, run.schedule.microbatches, run.schedule.ranks)
    return one_line(f"{model}: {what}" if model else what)


def _alternative(analysis: Analysis) -> str:
    """What the timeline shows, for who does not see it."""
    schedule = analysis.run.schedule
    return (
        f"Timeline of a step on {schedule.ranks} ranks: what each one computes over time, measured above what was "
        f"predicted. Arrow keys go from action to action. The tables below have the figures. {analysis.advice.sentence}"
    )


def _figures(analysis: Analysis) -> Iterator[dict[str, str]]:
    turns = analysis.run.takes_turns
    measured = analysis.simulated.makespan if turns else analysis.makespan
    unit, expected = TimeFormat.of(measured), analysis.expected
    count = len(analysis.steps)
    aside = "with a process for each rank" if turns else f"median of {count}" if count > 1 else "the only one recorded"
    yield {"name": "a step, simulated" if turns else "a step", "value": unit.text(measured), "aside": aside}
    if expected is None:
        yield {"name": "predicted", "value": UNKNOWN, "aside": "the package has no predicted times"}
    else:
        off = expected.makespan / measured - 1 if measured else 0.0
        aside = f"{format_percent(abs(off))} {'less' if off < 0 else 'more'} than that"
        yield {"name": "predicted", "value": unit.text(expected.makespan), "aside": aside}
    if analysis.bubble:
        idle = sum(bubble.idle for bubble in analysis.bubble)
        total = sum(bubble.makespan for bubble in analysis.bubble) or 1.0
        told = "" if expected is None else f"predicted {format_percent(_idle_part(analysis))}"
        yield {"name": "bubble, mean of ranks", "value": format_percent(idle / total), "aside": told}
        most = max(range(len(CAUSES)), key=lambda n: sum(astuple(bubble.causes)[n] for bubble in analysis.bubble))
        part = sum(astuple(bubble.causes)[most] for bubble in analysis.bubble)
        yield {
            "name": "largest part of it",
            "value": format_percent(part / idle if idle else 0.0),
            "aside": CAUSES[most],
        }
    if analysis.took is not None:
        yield {
            "name": "a step, ranks in turn" if turns else "with data and optimizer",
            "value": format_seconds(analysis.took),
            "aside": "with data and optimizer" if turns else "a step",
        }


def _idle_part(analysis: Analysis) -> float:
    expected = analysis.expected
    assert expected is not None
    whole = expected.makespan * len(expected.busy)
    return 1 - sum(expected.busy) / whole if whole else 0.0


def _bubble(analysis: Analysis) -> dict[str, Any]:
    names = ("computes", *CAUSES)
    unit = TimeFormat.of_column(bubble.makespan for bubble in analysis.bubble)
    colours = (_COMPUTES, *_CAUSE_COLOURS)

    def row(bubble: RankBubble) -> dict[str, Any]:
        figures = (bubble.busy, *astuple(bubble.causes))
        whole = bubble.makespan or 1.0
        parts = [
            {"width": round(100 * figure / whole, 3), "colour": fill, "title": f"{name}: {unit.text(figure)}"}
            for name, figure, fill in zip(names, figures, colours, strict=True)
        ]
        cells = [unit.number(bubble.busy), unit.number(bubble.idle), format_percent(bubble.idle / whole)]
        return {"rank": bubble.rank, "parts": parts, "cells": [*cells, *cause_cells(analysis, bubble, unit)]}

    count = len([each for each in analysis.bubbles if each])
    of = "the simulated step" if analysis.run.takes_turns else f"a step (mean of {count})" if count > 1 else "the step"
    return {
        "bubble": [row(bubble) for bubble in analysis.bubble],
        "bubble_of": of,
        "bubble_headers": [unit.unit, "computes", "idle", "of the step", *CAUSES],
        "parts": [{"name": name, "colour": fill} for name, fill in zip(names, colours, strict=True)],
        "causes": [{"name": name, "meaning": told} for name, told in zip(CAUSES, MEANING_OF_CAUSES, strict=True)],
    }


def _stages(analysis: Analysis) -> dict[str, Any]:
    unit = time_unit(analysis)
    known = [figure for each in analysis.stages for figure in (each.predicted, each.measured) if figure]
    longest = max(known, default=1.0)
    rows = []
    for number, each in enumerate(analysis.stages):
        fill = colour(each.kind, 0, 1)
        first = number == 0 or analysis.stages[number - 1].stage != each.stage
        figures = (each.predicted, each.measured)
        rows.append(
            {
                "name": f"stage {each.stage}, rank {each.rank}" if first else "",
                "kind": each.kind.value,
                "colour": fill,
                "ink": ink(fill),
                "cells": [
                    *map(unit.number, figures),
                    error_of(*figures),
                ],
                "bars": [
                    {"width": round(100 * (figure or 0.0) / longest, 2), "opacity": opacity}
                    for figure, opacity in zip(figures, (0.45, 1), strict=True)
                ],
            }
        )
    headers = [
        "a microbatch",
        "",
        f"predicted {unit.unit}",
        f"measured {unit.unit}",
        "error",
        "one above the other",
    ]
    return {"stages": rows, "stage_headers": headers}


def _candidates(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for each in analysis.advice.candidates:
        yield {
            "change": one_line(each.change),
            "assuming": one_line(each.assuming),
            "gain": format_percent(each.gain),
            "of": "a step" if each.same_batch else "a microbatch",
            "better": each.gain >= WORTH,
        }
