"""A simulated schedule on a terminal: a row per rank, and boxes as wide as their actions last.

In colour a box shows its microbatch, the colour says the kind and its tone the stage:

rank 0   0 1 2 3       0   4   1   5
rank 1     0 1 2     0   3   1   4

Without colour it shows the whole action, ``0B3──``, as far as it lasts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text

from pipegraph.report.colours import MEANING, TONES, chunks_of, colour, ink, kinds_of, tones
from pipegraph.report.text.schedule_figures import Simulation, figures, title
from pipegraph.schedule import Event, Schedule, Timeline
from pipegraph.units import TimeFormat, tick_marks

_MOST_LINES = 100  # of a folded grid; a longer one is drawn in one block, without the numbers that do not fit
_WIDEST = 12  # columns of all boxes ÷ columns that their texts need; what is more is waiting for a slow link


@dataclass(frozen=True)
class Box:
    """An action in columns ``start`` to ``end``, that one excluded. The text stands at its left, if it fits."""

    start: int
    end: int
    text: str
    style: Style


def described(simulation: Simulation, width: int | None = None, coloured: bool = False) -> Text:
    """The text of ``pipegraph schedule``: title, grid, legend of the colours, figures."""
    schedule = simulation.schedule
    text = Text(f"{title(schedule)}\n").append(grid(schedule, simulation.timeline, width, coloured, simulation.unit))
    if coloured:
        text.append("\n\n").append(legend(schedule))
    return text.append(f"\n\n{figures(simulation)}")


def grid(
    schedule: Schedule,
    timeline: Timeline,
    width: int | None = None,
    coloured: bool = False,
    unit: TimeFormat | None = None,
) -> Text:
    """Draw a schedule; with a unit, below an axis of time.

    A grid wider than ``width`` is folded into blocks of columns one below the other; None draws whole lines.
    """
    labels = [f"rank {rank}" for rank in range(schedule.ranks)]
    labels = [f"{label:<{len(labels[-1])}}  " for label in labels]
    scale, cell = _scale(schedule, timeline, coloured)
    columns = _columns(timeline.makespan, scale)
    block = max(columns, 1)
    if width is not None:
        width = max(cell, (width - len(labels[0])) // cell * cell)
        blocks = -(-columns // width)
        if blocks * (schedule.ranks + 2) > _MOST_LINES:
            scale, columns, blocks = min(scale, scale * width / columns), min(columns, width), 1
        block = -(-columns // max(blocks, 1) // cell) * cell or cell  # all of them alike
    rows = _boxes(schedule, timeline, scale, coloured)
    lines: list[Text] = []
    for first in range(0, max(columns, 1), block):
        last = min(first + block, columns)
        lines += [Text()] if lines else []
        if unit is not None:
            axis = _axis(timeline, scale, first, last, unit)
            lines.append(Text(f"{unit.unit or 'time':<{len(labels[0])}}{axis}".rstrip()))
        lines += [_line(label, row, first, last) for label, row in zip(labels, rows, strict=True)]
    return Text("\n").join(lines)


def legend(schedule: Schedule) -> Text:
    """What the colours of a coloured grid mean."""
    most, _ = chunks_of(schedule)
    line = Text()
    for kind in kinds_of(schedule):
        for chunk in tones(most):
            line.append(f" {kind.value} ", _style(colour(kind, chunk, most)))
        line.append(f" {MEANING[kind]}   ")
    line.append("0", Style(underline=True)).append(" critical path")
    return line.append(f"   {TONES}") if most > 1 else line


def _scale(schedule: Schedule, timeline: Timeline, coloured: bool) -> tuple[float, int]:
    """(columns per time, columns of a text and the space beside it): wide enough for the text of the shortest action,
    unless most are far longer."""
    longest = schedule.microbatches - 1 if coloured else f"{schedule.stages - 1}F{schedule.microbatches - 1}"
    cell = 1 + len(str(longest))
    lasting = [event.end - event.start for row in timeline.events for event in row if event.end > event.start]
    if not lasting:
        return 0.0, cell
    scale = min(cell / min(lasting), 4 * cell / statistics.median(lasting))
    most = _WIDEST * cell * max(map(len, timeline.events))
    return min(scale, most / timeline.makespan), cell


def _columns(time: float, scale: float) -> int:
    return int(time * scale + 0.5)


def _boxes(schedule: Schedule, timeline: Timeline, scale: float, coloured: bool) -> list[list[Box]]:
    most, chunks = chunks_of(schedule)
    fills = {
        (kind, chunk): _style(colour(kind, chunk, most)) if coloured else Style()
        for kind in kinds_of(schedule)
        for chunk in range(most)
    }
    underlined = Style(underline=coloured)
    critical = {event.action for event in timeline.critical_path}
    rows = []
    for events in timeline.events:
        row = []
        for event in events:
            start, end = _columns(event.start, scale), _columns(event.end, scale)
            fill = fills[event.action.kind, chunks[event.action.stage]]
            style = fill + underlined if event.action in critical else fill
            if start < end:
                row.append(Box(start, end, _text(event, end - start, coloured), style))
        rows.append(row)
    return rows


def _text(event: Event, width: int, coloured: bool) -> str:
    """The text of a box of this width: its action, as much of it as fits."""
    action = event.action
    if coloured:
        number = str(action.microbatch)
        return f" {number}" if len(number) < width else number if len(number) == width else ""
    name = str(action)
    name = name if len(name) < width else action.kind.value
    return f"{name:─<{width - 1}} " if len(name) < width else name


def _style(background: str) -> Style:
    return Style(color=ink(background), bgcolor=background)


def _line(label: str, row: list[Box], first: int, last: int) -> Text:
    """The part of a rank's row from one column to another, with nothing after its last box."""
    line = Text(label)
    column = first
    for box in row:
        if box.end <= first or box.start >= last:
            continue
        start, end = max(box.start, first), min(box.end, last)
        line.append(" " * (start - column))
        for text, style in _pieces(box, start, end):
            line.append(text, style)
        column = end
    if not row or not row[0].style.bgcolor:
        line.rstrip()
    return line


def _pieces(box: Box, start: int, end: int) -> Iterator[tuple[str, Style]]:
    """The text of a box between two columns, and the space around its number, which is never underlined."""
    text = f"{box.text:<{box.end - box.start}}"[start - box.start : end - box.start]
    plain = box.style + Style(underline=False)
    number = text.strip()
    before = len(text) - len(text.lstrip()) if number else len(text)
    yield text[:before], plain
    yield number, box.style
    yield text[before + len(number) :], plain


def _axis(timeline: Timeline, scale: float, first: int, last: int, unit: TimeFormat) -> str:
    """Round times, each above the column where it begins."""
    end = timeline.makespan / unit.size
    line = ""
    for tick in tick_marks(end, max(2, _columns(timeline.makespan, scale) // 10)):
        column = _columns(tick * unit.size, scale)
        if first <= column < last:
            line = f"{line:<{column - first}}{unit.number(tick * unit.size)}"
    return line
