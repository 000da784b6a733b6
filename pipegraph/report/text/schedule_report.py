"""A simulated schedule on a terminal: its figures and its grid, a row per rank with boxes as wide as actions last.

In colour a box shows its microbatch, the colour says the kind and its tone the stage:

rank 0   0 1 2 3       0   4   1   5
rank 1     0 1 2     0   3   1   4

Without colour it shows the whole action, ``0B3──``, as far as it lasts. Below a rank stand its collectives.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.style import Style
from rich.text import Text

from pipegraph.errors import one_line
from pipegraph.report.colours import COLLECTIVE_MEANING, COLLECTIVES, MEANING, ActionColours, ink
from pipegraph.schedule import Action, CollectiveKind, RankCollectives, Schedule, SearchedSchedule, Timeline
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import TimeFormat, format_number_of, format_percent, tick_marks

_LETTER = {CollectiveKind.UNSHARD: "U", CollectiveKind.REDUCE_GRAD: "R"}  # in a narrow box
_MOST_RANKS = 16  # whose figures are listed one by one

_MOST_LINES = 100  # of a folded grid; a longer one is drawn in one block, without the numbers that do not fit
_WIDEST = 12  # columns of all boxes ÷ columns of their texts; more would be waiting for a slow link


def schedule_title(schedule: Schedule) -> str:
    """Return ``1f1b: 4 ranks, 4 stages, 8 microbatches``."""
    sizes = {"rank": schedule.ranks, "stage": schedule.stages, "microbatch": schedule.microbatches}
    return f"{one_line(schedule.name)}: {', '.join(format_number_of(name, size) for name, size in sizes.items())}"


def _render_figures(simulated: SimulatedSchedule) -> str:
    """Return a line for each figure."""
    timeline, unit = simulated.timeline, simulated.time_format
    times = [unit.text(time) for time in (timeline.makespan, simulated.lower_bound)]
    width = max(map(len, times))
    lines = [
        ("makespan", f"{times[0]:<{width}}   bubble {format_percent(timeline.bubble)}"),
        ("lower bound", f"{times[1]:<{width}}   {_gap(simulated)}"),
        ("peak activations", _peaks(timeline.peak_activations, simulated.memory_limit)),
        ("critical path", timeline.describe_critical_path()),
    ]
    if timeline.collectives:
        gathers = _per_rank(simulated.schedule.gathers)
        waits = unit.text(max(timeline.gather_waits))
        lines[3:3] = [
            ("gathers", f"{gathers}; a rank waits {waits} for them at most"),
            ("reductions", _per_rank(simulated.schedule.reductions)),
            ("whole stages", f"at most {_per_rank(timeline.peak_whole)}"),
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
            "unshard": _per_boundary(times.unshard),
            "reduce_grad": _per_boundary(times.reduce_grad),
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
        **(_collectives_dict(simulated) if timeline.collectives else {}),
    }


def _collectives_dict(simulated: SimulatedSchedule) -> dict[str, Any]:
    schedule, timeline = simulated.schedule, simulated.timeline
    return {
        "gathers": list(schedule.gathers),
        "reductions": list(schedule.reductions),
        "gather_waits": list(timeline.gather_waits),
        "peak_whole": list(timeline.peak_whole),
        "programs": [[str(operation) for operation in schedule.program(rank)] for rank in range(schedule.ranks)],
        "collectives": [
            [{"collective": str(event.collective), "start": event.start, "end": event.end} for event in rank.events]
            for rank in timeline.collectives
        ],
    }


def _gap(simulated: SimulatedSchedule) -> str:
    if simulated.gap < 5e-4:
        return "reached" if simulated.gap < 1e-9 else "all but reached"
    return f"makespan {format_percent(simulated.gap)} above it"


def _peaks(peaks: Sequence[int], limit: int | None) -> str:
    return _per_rank(peaks) + ("" if limit is None else f" (limit {limit})")


def _per_rank(figures: Sequence[int]) -> str:
    """``4, 3, 2, 1`` of a few ranks, ``8 on every rank``, or the extremes of many."""
    if len(set(figures)) == 1 and len(figures) > 1:
        return f"{figures[0]} on every rank"
    if len(figures) <= _MOST_RANKS:
        return ", ".join(map(str, figures))
    return f"{min(figures)} to {max(figures)}, the most on rank {figures.index(max(figures))}"


def _per_boundary(figures: Any) -> Any:
    if isinstance(figures, Mapping):
        return {f"{producer}-{consumer}": figure for (producer, consumer), figure in figures.items()}
    return list(figures) if isinstance(figures, Sequence) else figures


@dataclass(frozen=True)
class _Box:
    """An action in columns ``start`` to ``end``, that one excluded."""

    start: int
    end: int
    text: str
    style: Style


def render_schedule(simulated: SimulatedSchedule, width: int | None = None, coloured: bool = False) -> Text:
    """Return title, grid, legend of the colours, and figures."""
    schedule = simulated.schedule
    text = Text(f"{schedule_title(schedule)}\n")
    text.append(render_grid(schedule, simulated.timeline, width, coloured, simulated.time_format))
    if coloured:
        text.append("\n\n").append(render_legend(schedule, width))
    return text.append(f"\n\n{_render_figures(simulated)}")


def render_grid(
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
        if blocks * (schedule.ranks * (1 + bool(timeline.collectives)) + 2) > _MOST_LINES:
            scale, columns, blocks = min(scale, scale * width / columns), min(columns, width), 1
        block = -(-columns // max(blocks, 1) // cell) * cell or cell  # all blocks are equally wide
    rows = list(zip(labels, _boxes(schedule, timeline, scale, coloured), strict=True))
    if timeline.collectives:
        below = [(" " * len(labels[0]), _collective_boxes(strip, scale, coloured)) for strip in timeline.collectives]
        rows = [row for pair in zip(rows, below, strict=True) for row in pair]
    lines: list[Text] = []
    for first in range(0, max(columns, 1), block):
        last = min(first + block, columns)
        lines += [Text()] if lines else []
        if unit is not None:
            axis = _axis(timeline, scale, first, last, unit)
            lines.append(Text(f"{unit.unit or 'time':<{len(labels[0])}}{axis}".rstrip()))
        lines += [_line(label, row, first, last) for label, row in rows]
    return Text("\n").join(lines)


def render_legend(schedule: Schedule, width: int | None = None) -> Text:
    """Return the meaning of the colours of a coloured grid, in lines that fit the width."""
    colours = ActionColours.from_schedule(schedule)
    entries = []
    for kind, fills in colours.legend():
        signs = ((f" {kind.value} ", _style(fill)) for fill in fills)
        entries.append(Text.assemble(*signs, f" {MEANING[kind]}"))
    for collective, fill in COLLECTIVES.items() if schedule.collectives else ():
        sign = (f" {_LETTER[collective]} ", _style(fill))
        entries.append(Text.assemble(sign, f" {COLLECTIVE_MEANING[collective]}"))
    entries.append(Text.assemble(("0", Style(underline=True)), " critical path"))
    entries += [Text(colours.tones)] if colours.tones else []
    lines = [entries[0]]
    for entry in entries[1:]:
        if width is None or len(lines[-1]) + 3 + len(entry) <= width:
            lines[-1].append("   ").append(entry)
        else:
            lines.append(entry)
    return Text("\n").join(lines)


def _scale(schedule: Schedule, timeline: Timeline, coloured: bool) -> tuple[float, int]:
    """Return (columns per time, columns of a text and a space): wide enough for the text of the shortest action,
    unless most actions are far longer."""
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


def _boxes(schedule: Schedule, timeline: Timeline, scale: float, coloured: bool) -> list[list[_Box]]:
    colours = ActionColours.from_schedule(schedule)
    critical = {event.action for event in timeline.critical_path}
    styles: dict[str, Style] = {}  # making one takes longer than everything else
    widths = [_columns(span.end, scale) - _columns(span.start, scale) for row in timeline.events for span in row]
    digits = len(str(schedule.microbatches - 1))
    is_numbered = 2 * sum(width >= digits for width in widths) > len(widths)  # a few numbers among many say nothing
    rows = []
    for events in timeline.events:
        row = []
        for event in events:
            start, end = _columns(event.start, scale), _columns(event.end, scale)
            fill = colours.fill(event.action) if coloured else ""
            if fill not in styles:
                styles[fill] = _style(fill) if fill else Style()
            style = styles[fill]
            if coloured and event.action in critical:
                style += Style(underline=True)
            if start < end:
                text = _text(event.action, end - start, coloured) if is_numbered or not coloured else ""
                row.append(_Box(start, end, text, style))
        rows.append(row)
    return rows


def _collective_boxes(collectives: RankCollectives, scale: float, coloured: bool) -> list[_Box]:
    """Return ``0U─`` for each UNSHARD and ``0R─`` for each REDUCE_GRAD, by their whole names if these fit."""
    styles = {kind: _style(fill) if coloured else Style() for kind, fill in COLLECTIVES.items()}
    row = []
    for collective, begin, finish in collectives.events:
        start, end = _columns(begin, scale), _columns(finish, scale)
        if start < end:
            names = str(collective), f"{collective.stage}{_LETTER[collective.kind]}", _LETTER[collective.kind]
            name = next((name for name in names if len(name) < end - start), names[-1])
            text = f"{name:─<{end - start - 1}} " if len(name) < end - start else name
            row.append(_Box(start, end, text, styles[collective.kind]))
    return row


def _text(action: Action, width: int, coloured: bool) -> str:
    """Return the text of a box of this width: the part of its action that fits."""
    if coloured:
        number = str(action.microbatch)
        return f" {number}" if len(number) < width else number if len(number) == width else ""
    name = str(action)
    name = name if len(name) < width else action.kind.value
    return f"{name:─<{width - 1}} " if len(name) < width else name


def _style(background: str) -> Style:
    return Style(color=ink(background), bgcolor=background)


def _line(label: str, row: list[_Box], first: int, last: int) -> Text:
    """Return the part of a rank's row between two columns, without space after its last box."""
    line = Text(label)
    column = first
    for box in row:
        if box.end <= first or box.start >= last:
            continue
        start, end = max(box.start, first), min(box.end, last)
        line.append(" " * (start - column))
        text = f"{box.text:<{box.end - box.start}}"[start - box.start : end - box.start]
        leading, number, trailing = text.partition(text.strip()) if text.strip() else (text, "", "")
        plain = box.style + Style(underline=False)  # only the number of a critical action is underlined
        for part, style in ((leading, plain), (number, box.style), (trailing, plain)):
            line.append(part, style)
        column = end
    if not row or not row[0].style.bgcolor:
        line.rstrip()
    return line


def _axis(timeline: Timeline, scale: float, first: int, last: int, unit: TimeFormat) -> str:
    """Return round times, each above the column where it begins."""
    line = ""
    for tick in tick_marks(timeline.makespan / unit.size, max(2, _columns(timeline.makespan, scale) // 10)):
        column = _columns(tick * unit.size, scale)
        if first <= column < last:
            line = f"{line:<{column - first}}{unit.number(tick * unit.size)}"
    return line
