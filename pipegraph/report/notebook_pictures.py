"""What notebooks show: tables of captured models, plans and packages as HTML, schedules and timelines as SVG.

`pipegraph.notebook.draw` calls these functions by their names.
"""

from __future__ import annotations

import itertools

from pipegraph.errors import one_line
from pipegraph.graph.captured import Captured, Segment
from pipegraph.package import Package
from pipegraph.planner.plan import Plan
from pipegraph.planner.step_prediction import PlannedStep
from pipegraph.report.drawing import Drawing
from pipegraph.report.html_pages import templates
from pipegraph.report.package_picture import simulated_package
from pipegraph.report.text import Table
from pipegraph.report.text.package_tables import (
    cost_table,
    explain_cuts,
    package_title,
    short_boundary_table,
    short_stage_table,
)
from pipegraph.report.timeline_picture import schedule_drawing, simulated_timeline_drawing
from pipegraph.schedule import Schedule, Timeline, Times, build
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import format_count, format_number_of

_LEAST = 0.85  # of the width of a picture
_MOST = 2_000  # actions in a picture; a notebook with more of them is slow


def captured_html(captured: Captured) -> str:
    """Return where a model may be cut: its layers, and the modules between them, with its dynamic sizes."""
    rows = []
    for _, segments in itertools.groupby(captured.segments, key=lambda segment: _list_of(captured, segment)):
        first, *later_segments = segments
        stop = later_segments[-1].stop if later_segments else first.stop
        nodes = captured.nodes[first.start : stop]
        read = {str(value.target) for node in nodes for value in node.all_input_nodes if value.op == "get_attr"}
        weights = {captured.state[fqn].canonical for fqn in read if captured.state[fqn].kind == "parameter"}
        modules = f"{first.fqn} – {later_segments[-1].fqn}" if later_segments else first.fqn
        class_name = captured.modules[first.fqn].class_name if first.fqn else ""
        count = f"{class_name} × {1 + len(later_segments)}" if later_segments else class_name
        elements = format_count(sum(captured.state[fqn].numel for fqn in weights))
        rows.append([modules or "the model's own operations", count, elements, str(len(nodes))])
    fixed_sizes = [one_line(str(size)) for size in captured.sizes.fixed]
    dynamic_sizes = [f"dynamic sizes: {', '.join(captured.sizes.captured)}"] if captured.sizes.captured else []
    return _html(
        repr(captured), [(["modules", "class", "parameters", "operations"], rows)], [*dynamic_sizes, *fixed_sizes]
    )


def _list_of(captured: Captured, segment: Segment) -> tuple[str, str]:
    """Return the list of modules that a segment is in, and its class; the segment's own name outside of lists."""
    name, _, number = segment.fqn.rpartition(".")
    return (name, captured.modules[segment.fqn].class_name) if number.isdecimal() else (segment.fqn, "")


def plan_html(plan: Plan) -> str:
    """Return the stages of a plan with their costs, what a step is predicted to take, and the reasons of the cuts."""
    stage_modules = [line.partition(": ")[2] for line in plan.describe()]
    title = f"{plan.captured.model_name} in {format_number_of('stage', len(plan.stages))}"
    prediction = None if plan.prediction is None else plan.prediction.with_reasons()
    return _html(title, [cost_table(stage_modules, plan.costs)], explain_cuts(prediction))


def package_html(package: Package) -> str:
    """Return the stages of a package, what crosses between them, and the step that it was planned for."""
    manifest, schedule = package.manifest, _planned(package)
    picture = None
    if sum(map(len, schedule.actions)) <= _MOST:
        drawing = schedule_drawing(simulated_package(manifest, schedule))
        picture = _fitting(drawing, schedule.name)
    tables = [short_stage_table(manifest, schedule.placement), short_boundary_table(manifest)]
    return _html(package_title(manifest), tables, explain_cuts(manifest.prediction), picture)


def schedule_svg(schedule: Schedule) -> str | None:
    """Return a schedule over time, as if F, I and W took the same time on every stage; None if it is too large."""
    if sum(map(len, schedule.actions)) > _MOST:
        return None
    drawing = schedule_drawing(SimulatedSchedule(schedule, Times.equal(schedule.stages)))
    return _fitting(drawing, schedule.name)


def timeline_svg(timeline: Timeline) -> str | None:
    """Return a timeline, with times in its own unit; None if it is too large."""
    actions = tuple(tuple(event.action for event in row) for row in timeline.events)
    if not any(actions) or sum(map(len, actions)) > _MOST:
        return None
    ranks = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    microbatches = 1 + max(action.microbatch for action in itertools.chain.from_iterable(actions))
    schedule = Schedule("timeline", tuple(ranks[stage] for stage in sorted(ranks)), microbatches, actions)
    return _fitting(simulated_timeline_drawing(schedule, timeline), "timeline")


def _planned(package: Package) -> Schedule:
    """Return the schedule that a package was planned for, or 1f1b if that is in a file."""
    stages, planned = len(package.manifest.stages), PlannedStep.from_manifest(package.manifest)
    schedule = planned.to_schedule() if planned is not None else None
    return schedule or build("1f1b", stages, planned.microbatches if planned is not None else stages)


def _fitting(drawing: Drawing, name: str) -> str:
    """Return an SVG that shrinks where a cell is narrower, as far as its type can be read; then the cell scrolls."""
    style = f"max-width: 100%; min-width: {round(_LEAST * drawing.width)}px; height: auto"
    return drawing.to_svg(name).replace("<svg ", f'<svg style="{style}" ', 1)


def _html(title: str, tables: list[Table], lines: list[str], picture: str | None = None) -> str:
    page = templates().get_template("notebook.html.jinja")
    return page.render(title=title, tables=tables, lines=lines, picture=picture)
