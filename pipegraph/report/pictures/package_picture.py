"""A package as one picture: its stages and boundaries, the memory of its ranks, and its schedule over time."""

from __future__ import annotations

from collections.abc import Sequence

from pipegraph.package import Package
from pipegraph.planner.package_prediction import RankMemoryByKind, memory_by_kind, predict_step
from pipegraph.report.colours import MEMORY
from pipegraph.report.pictures.drawing import GREY, LETTER, Drawing, Label, Rectangle, Shape
from pipegraph.report.pictures.stages_picture import bars, rank_mark, stages_drawing
from pipegraph.report.pictures.timeline_picture import schedule_drawing
from pipegraph.report.text.package_tables import explain_cuts, package_title
from pipegraph.report.text.tables import clip
from pipegraph.schedule import Schedule, Times
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import format_bytes

_MARGIN, _NARROWEST, _WIDEST = 36, 1080, 1500
_ROW, _BAR = 34, 22  # of the memory of a rank
_BETWEEN = 40  # two parts


def package_svg(package: Package, schedule: Schedule) -> str:
    """Return the whole picture as the text of an SVG file."""
    manifest = package.manifest
    times = predict_step(manifest, schedule).times
    simulated = SimulatedSchedule(schedule, times or Times.equal(schedule.stages), in_seconds=times is not None)
    timeline = schedule_drawing(simulated)
    width = min(max(timeline.width, _NARROWEST), _WIDEST)
    scale = min(1.0, width / timeline.width)
    parts = [
        (_head(package, width), 1.0),
        (stages_drawing(manifest, schedule, width), 1.0),
        (_memory(memory_by_kind(manifest, schedule), width), 1.0),
        (timeline, scale),
    ]
    shapes: list[Shape] = []
    y = float(_MARGIN)
    for drawing, factor in parts:
        shapes += drawing.moved(_MARGIN, y, factor)
        y += drawing.height * factor + _BETWEEN
    if times is None:
        note = "No times are known: this is drawn as if F, I and W took the same time on every stage."
        shapes.append(Label(_MARGIN + 80, y - _BETWEEN, note, fill=GREY))
    return Drawing(width + 2 * _MARGIN, y - _BETWEEN / 2, shapes).to_svg(package_title(manifest))


def _head(package: Package, width: float) -> Drawing:
    """The package's name, and what a step is expected to take."""
    lines = explain_cuts(package.manifest)[:2]
    shapes: list[Shape] = [Label(0, 10, clip(package_title(package.manifest), int(width / 13.5)), 21, bold=True)]
    for number, line in enumerate(lines):
        shapes.append(Label(0, 32 + 17 * number, clip(line, int(width / LETTER)), 12, GREY))
    return Drawing(width, 17 * len(lines) - 12, shapes)


def _memory(ranks: Sequence[RankMemoryByKind], width: float) -> Drawing:
    """A bar for each rank, by kind of memory, all in one scale."""
    shapes: list[Shape] = [Label(0, 10, "memory of each rank", 13, bold=True)]
    if not ranks:
        hint = "not known: this package has no sizes. pipegraph split writes it anew, with them."
        return Drawing(width, 36, [*shapes, Label(0, 30, hint, fill=GREY)])
    x = 170.0
    for kind in ranks[0].by_kind():
        shapes += [Rectangle(x, -1, 14, 13, MEMORY[kind], 2), Label(x + 19, 10, kind)]
        x += 34 + LETTER * len(kind)
    if ranks[0].saved_activations is None:
        shapes.append(Label(x, 10, "saved activations are not known: --balance time predicts them", fill=GREY))
    left, most = 76.0, max(rank.total for rank in ranks)
    scale = (width - left - 90) / most if most else 0.0
    for number, rank in enumerate(ranks):
        y = 26 + number * _ROW
        parts = [(kind, MEMORY[kind], held * scale, format_bytes(held)) for kind, held in rank.by_kind().items()]
        shapes += [*rank_mark(rank.rank, 0, y + 2), *bars(parts, left, y, _BAR)]
        shapes.append(Label(left + rank.total * scale + 8, y + 15, format_bytes(rank.total), bold=True))
    return Drawing(width, 26 + len(ranks) * _ROW, shapes)
