"""A simulated schedule as a picture: a self-contained SVG with a lane per rank.

    title, figures, legend
    rank 0 ┃▇▇▇▇    ▇▇  ▇▇    a box per action, its microbatch in it where it fits
           ┃▁▃▅▅▅▅▅▅▅▃▁       how many saved activations the rank holds
    rank 1 ┃  ▇▇▇▇▇▇▇▇
           ┗━━┷━━━┷━━━┷━━     time

Everything is placed in pixels of two decimals at most, so that equal schedules give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pipegraph.report.colours import MEANING, TONES, chunks_of, colour, ink, kinds_of, tones
from pipegraph.report.pictures.svg import GREY, LETTER, LIGHT, LINE, picture, px, text
from pipegraph.report.text.schedule_figures import Simulation, title
from pipegraph.report.text.tables import clip
from pipegraph.schedule import Event, Kind
from pipegraph.units import format_percent, tick_marks

_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 64, 92, 40  # around the lanes
_BOX, _MEMORY, _BETWEEN = 24, 14, 8  # heights of a box and the curve below it, and the gap to the next lane
_LANE = _BOX + _MEMORY + _BETWEEN
_NARROWEST, _WIDEST = 780, 3600  # of the lanes
_DIGIT = 6.2  # width of a digit in a box
_MOST_ARROWS = 64
_CRITICAL = "#d6006c"
_CURVE = "#c3cad3"


def timeline_svg(simulation: Simulation) -> str:
    """The whole picture as the text of an SVG file."""
    width, height, drawing = timeline_drawing(simulation)
    return picture(width, height, title(simulation.schedule), drawing)


def timeline_drawing(simulation: Simulation) -> tuple[float, float, list[str]]:
    """(width, height, elements) of it, as a part of a larger picture."""
    narrowest = max(_NARROWEST, sum(width for _, width in _legend(simulation)) - _RIGHT)
    scale = _scale(simulation, narrowest)
    width = _LEFT + max(simulation.timeline.makespan * scale, narrowest) + _RIGHT
    height = _TOP + simulation.schedule.ranks * _LANE + _BOTTOM
    drawing = [
        *_head(simulation),
        *_axis(simulation, scale),
        *_memory(simulation, scale),
        *_boxes(simulation, scale),
        *_arrows(simulation, scale),
        *_critical_path(simulation, scale),
    ]
    return width, height, drawing


def _scale(simulation: Simulation, narrowest: float) -> float:
    """Pixels per time: the number of a microbatch fits into the shortest action, if the picture stays narrow enough."""
    timeline = simulation.timeline
    if timeline.makespan <= 0:
        return 0.0
    lasting = [event.end - event.start for row in timeline.events for event in row if event.end > event.start]
    shortest = min(lasting, default=timeline.makespan)  # where nothing but hops takes time
    wanted = _number_width(simulation.schedule.microbatches - 1) / shortest * timeline.makespan
    return min(max(wanted, narrowest), _WIDEST) / timeline.makespan


def _number_width(number: int) -> float:
    return len(str(number)) * _DIGIT + 5


def _lane(rank: int) -> int:
    return _TOP + rank * _LANE


def _head(simulation: Simulation) -> Iterator[str]:
    """The title, the figures and the legend."""
    timeline, unit = simulation.timeline, simulation.unit
    said = [
        f"makespan {unit.text(timeline.makespan)} (bubble {format_percent(timeline.bubble)})",
        f"span {unit.text(timeline.span)} (bubble {format_percent(timeline.span_bubble)})",
        f"lower bound {unit.text(simulation.lower_bound)} (gap {format_percent(simulation.gap)})",
        f"at most {max(timeline.peak_activations)} saved activations on a rank",
    ]
    name = text(clip(title(simulation.schedule), 90))
    yield f'<text x="{_LEFT}" y="26" font-size="17" font-weight="600">{name}</text>'
    yield f'<text x="{_LEFT}" y="45" font-size="12" fill="{GREY}">{text("  ·  ".join(said))}</text>'
    x: float = _LEFT
    for drawn, width in _legend(simulation):
        yield f'<g transform="translate({px(x)} 58)">{drawn}</g>'
        x += width


def _legend(simulation: Simulation) -> list[tuple[str, float]]:
    """(drawing, from 0, 0 on; its width) for everything that is to be explained."""
    most, _ = chunks_of(simulation.schedule)
    shown = tones(most)
    parts = []
    for kind in kinds_of(simulation.schedule):
        swatches = []
        for index, fill in enumerate(colour(kind, chunk, most) for chunk in shown):
            swatches.append(f'<rect x="{index * 19}" width="18" height="16" rx="2" fill="{fill}"/>')
            swatches.append(
                f'<text x="{index * 19 + 9}" y="12" text-anchor="middle" fill="{ink(fill)}">{kind.value}</text>'
            )
        parts.append(_entry("".join(swatches), len(shown) * 19, MEANING[kind]))
    if most > 1:
        parts.append(_entry("", -6, TONES))
    outline = f'<rect x="1" y="1" width="18" height="14" rx="2" fill="none" stroke="{_CRITICAL}" stroke-width="2"/>'
    parts.append(_entry(outline, 20, "critical path"))
    if simulation.schedule.trains:
        parts.append(_entry(f'<path d="M0 16v-5h6v-6h6v8h6v3z" fill="{_CURVE}"/>', 18, "held activations, and peak"))
    return parts


def _entry(drawing: str, width: float, said: str) -> tuple[str, float]:
    return f'{drawing}<text x="{px(width + 6)}" y="12">{text(said)}</text>', width + 6 + LETTER * len(said) + 16


def _axis(simulation: Simulation, scale: float) -> Iterator[str]:
    """The lanes' names and grounds, and the times below with a line through all lanes for each."""
    schedule, timeline, unit = simulation.schedule, simulation.timeline, simulation.unit
    length = timeline.makespan * scale
    bottom = _lane(schedule.ranks) - _BETWEEN
    for rank in range(schedule.ranks):
        held = [stage for stage, place in enumerate(schedule.placement) if place == rank]
        y = _lane(rank)
        at = f'x="{_LEFT - 10}" text-anchor="end"'
        yield f'<text {at} y="{y + 16}" font-size="12" font-weight="600">rank {rank}</text>'
        if len(held) > 1:
            stages = f"stages {held[0]}, {held[1]}" if len(held) == 2 else f"{held[0]}, {held[1]} … {held[-1]}"
            yield f'<text {at} y="{y + 30}" font-size="9" fill="{GREY}">{stages}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{px(length)}" height="{_BOX}" fill="{LIGHT}"/>'
    shown = tick_marks(timeline.makespan / unit.size, max(2, int(length / 80)))
    for tick in shown:
        x = px(_LEFT + tick * unit.size * scale)
        yield f'<path d="M{x} {_TOP - 4}V{bottom + 6}" stroke="{LINE}" stroke-width="0.7"/>'
        number = unit.number(tick * unit.size)
        yield f'<text x="{x}" y="{bottom + 19}" text-anchor="middle" fill="{GREY}">{number}</text>'
    name = f"time in {unit.unit}" if unit.unit else "time"
    yield f'<text x="{_LEFT - 10}" y="{bottom + 19}" text-anchor="end" fill="{GREY}">{name}</text>'


def _boxes(simulation: Simulation, scale: float) -> Iterator[str]:
    """A box for each event, those of one colour together; its title says what it is and when."""
    schedule, unit = simulation.schedule, simulation.unit
    most, chunks = chunks_of(schedule)
    widest = _number_width(schedule.microbatches - 1) - 1
    by_colour: dict[tuple[Kind, int], list[tuple[int, Event]]] = {}
    for rank, row in enumerate(simulation.timeline.events):
        for event in row:
            by_colour.setdefault((event.action.kind, chunks[event.action.stage]), []).append((rank, event))
    for (kind, chunk), found in sorted(by_colour.items()):
        fill = colour(kind, chunk, most)
        yield f'<g fill="{fill}">'
        numbers = []
        for rank, event in found:
            x, width, y = _LEFT + event.start * scale, (event.end - event.start) * scale, _lane(rank)
            gap = min(0.8, width / 4)
            said = f"{event.action}: {unit.text(event.start)} to {unit.text(event.end)}"
            shape = f'x="{px(x)}" y="{y}" width="{px(width - gap)}" height="{_BOX}" rx="{px(min(2, width / 8))}"'
            yield f"<rect {shape}><title>{said}</title></rect>"
            if width >= widest:
                number = event.action.microbatch
                numbers.append(f'<text x="{px(x + (width - gap) / 2)}" y="{y + 16}">{number}</text>')
        yield "</g>"
        if numbers:
            yield f'<g fill="{ink(fill)}" font-size="10" text-anchor="middle" pointer-events="none">'
            yield from numbers
            yield "</g>"


def _memory(simulation: Simulation, scale: float) -> Iterator[str]:
    """Below each lane, how many activations its rank holds over time, and the most of them at the right."""
    timeline = simulation.timeline
    most = max(timeline.peak_activations)
    if most == 0:
        return
    step = (_MEMORY - 2) / most
    for rank, row in enumerate(timeline.events):
        base = _lane(rank) + _BOX + _MEMORY
        changes = [(event.start, 1) for event in row if event.action.kind is Kind.F]
        changes += [(event.end, -1) for event in row if event.action.kind in (Kind.W, Kind.B)]
        held, path = 0, [f"M{_LEFT} {base}"]
        for time, group in groupby(sorted(changes), key=lambda change: change[0]):
            held += sum(change for _, change in group)
            path.append(f"H{px(_LEFT + time * scale)}V{px(base - held * step)}")
        yield f'<path d="{"".join(path)}" fill="{_CURVE}"/>'
        x = px(_LEFT + timeline.makespan * scale + 8)
        yield f'<text x="{x}" y="{base - 2}" fill="{GREY}">{timeline.peak_activations[rank]}</text>'


def _arrows(simulation: Simulation, scale: float) -> Iterator[str]:
    """From each action to those on other ranks that use its result, where they are few enough to be followed."""
    dependencies = simulation.schedule.dependencies
    ends: dict[tuple[bool, int, int], tuple[int, float]] = {}  # (backward, stage, microbatch) → (rank, time)
    events = [(rank, event) for rank, row in enumerate(simulation.timeline.events) for event in row]
    events = [(rank, event) for rank, event in events if event.action.kind is not Kind.W]
    for rank, event in events:
        ends[event.action.kind is not Kind.F, event.action.stage, event.action.microbatch] = rank, event.end
    lines = []
    for rank, event in events:
        backward = event.action.kind is not Kind.F
        sources = dependencies.gradient_consumers if backward else dependencies.producers
        for source in sources.get(event.action.stage, ()):
            other, end = ends[backward, source, event.action.microbatch]
            if other != rank:
                down = rank > other
                start = f"M{px(_LEFT + end * scale)} {_lane(other) + _BOX * down}"
                lines.append(f"{start}L{px(_LEFT + event.start * scale)} {_lane(rank) + _BOX * (not down)}")
    if 0 < len(lines) <= _MOST_ARROWS:
        yield f'<path d="{"".join(lines)}" fill="none" stroke="{GREY}" stroke-width="0.6" stroke-opacity="0.8"/>'


def _critical_path(simulation: Simulation, scale: float) -> Iterator[str]:
    """An outline around each stretch of it on one rank, and a line from each stretch to the next."""
    schedule = simulation.schedule
    yield f'<g fill="none" stroke="{_CRITICAL}" stroke-width="2" stroke-linejoin="round" pointer-events="none">'
    before: tuple[float, int] | None = None
    path = simulation.timeline.critical_path
    for rank, group in groupby(path, key=lambda event: schedule.placement[event.action.stage]):
        stretch = list(group)
        start, end = _LEFT + stretch[0].start * scale, _LEFT + stretch[-1].end * scale
        y = _lane(rank)
        if before is not None:
            x, other = before
            down = rank > other
            yield f'<path d="M{px(x)} {_lane(other) + _BOX * down}L{px(start)} {y + _BOX * (not down)}"/>'
        yield f'<rect x="{px(start)}" y="{y}" width="{px(end - start)}" height="{_BOX}" rx="2"/>'
        before = (end, rank)
    yield "</g>"
