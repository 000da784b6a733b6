"""A timeline, simulated or measured, as a picture with a lane per rank.

title, figures, legend
rank 0 ┃▇▇▇▇    ▇▇  ▇▇    a box per action, its microbatch in it if it fits
       ┃▁▃▅▅▅▅▅▅▅▃▁       how many saved activations the rank holds
rank 1 ┃  ▇▇▇▇▇▇▇▇
       ┗━━┷━━━┷━━━┷━━     time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from pipegraph.report.colours import COLLECTIVES, MEANING, ActionColours, ink, marks
from pipegraph.report.drawing import GREY, LETTER, LIGHT, LINE, Drawing, Label, Line, Rectangle, Shape
from pipegraph.report.text import clip
from pipegraph.report.text.schedule_report import schedule_title
from pipegraph.schedule import CollectiveKind, Kind, Schedule, Timeline
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import TimeFormat, format_number_of, format_percent, tick_marks

_LEFT_MARGIN, _BOTTOM = 80, 40  # around the lanes
_ROW = 22  # of a legend
_BOX, _MEMORY, _BETWEEN = 24, 14, 8  # heights of a box and the curve below it, and the gap to the next lane
_STRIP = 14  # height of a rank's collectives, between its boxes and its curve
_NARROWEST, _WIDEST = 780, 3600  # of the lanes
_IMAGE = 350  # lanes of an image, whose type has to be readable on a card of TensorBoard
_DIGIT = 6.2  # width of a digit in a box
_MARKED = 2  # the narrowest box that shows its kind without colour
_MOST_ARROWS = 64
_COLLECTIVE_MEANING = {
    CollectiveKind.UNSHARD: "that stage gathered",
    CollectiveKind.REDUCE_GRAD: "its gradients reduced",
}
_CRITICAL = "#d6006c"
_CURVE = "#c3cad3"


def schedule_svg(simulated: SimulatedSchedule) -> str:
    """Return a simulated schedule as the text of an SVG file."""
    return schedule_drawing(simulated).to_svg(schedule_title(simulated.schedule))


def schedule_drawing(simulated: SimulatedSchedule) -> Drawing:
    """Draw a simulated schedule, with its critical path, the activations that ranks hold, and messages if few."""
    timeline, unit = simulated.timeline, simulated.time_format
    figures = [
        f"makespan {unit.text(timeline.makespan)} (bubble {format_percent(timeline.bubble)})",
        f"lower bound {unit.text(simulated.lower_bound)} (gap {format_percent(simulated.gap)})",
        f"at most {max(timeline.peak_activations)} saved activations on a rank",
    ]
    if timeline.collectives:
        figures.append(f"at most {format_number_of('gather', max(simulated.schedule.gathers))} on a rank")
    lanes = _Lanes(simulated.schedule, timeline, unit)
    shapes = [*lanes.grounds(), *lanes.memory(), *lanes.boxes(), *lanes.collectives(), *lanes.arrows()]
    return lanes.drawing(schedule_title(simulated.schedule), figures, [*shapes, *lanes.critical_path()])


def simulated_timeline_drawing(schedule: Schedule, timeline: Timeline) -> Drawing:
    """Draw a timeline in its own unit, with its critical path and the activations that ranks hold."""
    unit = TimeFormat()
    figures = [f"makespan {unit.text(timeline.makespan)} (bubble {format_percent(timeline.bubble)})"]
    lanes = _Lanes(schedule, timeline, unit)
    shapes = [*lanes.grounds(), *lanes.memory(), *lanes.boxes(), *lanes.collectives(), *lanes.critical_path()]
    return lanes.drawing(schedule_title(schedule), figures, shapes)


def timeline_drawing(schedule: Schedule, timeline: Timeline, label: str) -> Drawing:
    """Draw the actions of a timeline in seconds as an image; ``label`` it is, such as ``predicted``."""
    unit = TimeFormat.for_seconds(timeline.makespan)
    figures = [label, f"step {unit.text(timeline.makespan)}", f"bubble {format_percent(timeline.bubble)}"]
    lanes = _Lanes(schedule, timeline, unit, is_image=True)
    return lanes.drawing(schedule_title(schedule), figures, [*lanes.grounds(), *lanes.boxes()])


@dataclass(frozen=True)
class _Lanes:
    """The places of ranks and times in a picture; ``is_image``: a small one, of actions alone."""

    schedule: Schedule
    timeline: Timeline
    unit: TimeFormat
    is_image: bool = False

    @cached_property
    def colours(self) -> ActionColours:
        return ActionColours.from_schedule(self.schedule)

    @cached_property
    def scale(self) -> float:
        """Pixels per time: a microbatch's number fits into the shortest action, if the picture stays narrow enough."""
        makespan = self.timeline.makespan
        if makespan <= 0:
            return 0.0
        lasting = sorted(event.end - event.start for row in self.timeline.events for event in row)
        shortest = next((duration for duration in lasting if duration > 0), makespan)  # only messages may take time
        fitting_width = self.number_width / shortest * makespan
        return (_IMAGE if self.is_image else min(max(fitting_width, self.narrowest), _WIDEST)) / makespan

    @cached_property
    def narrowest(self) -> float:
        """The width of the lanes at least: of the legend in one row, but for an image."""
        if self.is_image:
            return _IMAGE
        return max(_NARROWEST, sum(width for _, width in self.legend) - self.right)

    @property
    def right(self) -> float:
        """The width to the right of the lanes, for the largest number of activations that each rank holds."""
        return 16 if self.is_image else 64

    @cached_property
    def legend_rows(self) -> list[list[tuple[list[Shape], float]]]:
        rows: list[list[tuple[list[Shape], float]]] = [[]]
        for entry in self.legend:
            if rows[-1] and sum(wide for _, wide in rows[-1]) + entry[1] > self.narrowest + self.right + 1:
                rows.append([])
            rows[-1].append(entry)
        return rows

    @property
    def top(self) -> float:
        return 70 + _ROW * len(self.legend_rows)

    @property
    def number_width(self) -> float:
        return len(str(self.schedule.microbatches - 1)) * _DIGIT + 5

    def x(self, time: float) -> float:
        return _LEFT_MARGIN + time * self.scale

    @property
    def strip(self) -> float:
        return _STRIP if self.timeline.collectives else 0

    @property
    def lane(self) -> float:
        return _BOX + self.strip + (_BETWEEN if self.is_image else _MEMORY) + _BETWEEN

    def y(self, rank: int) -> float:
        return self.top + rank * self.lane

    def drawing(self, title: str, figures: list[str], shapes: list[Shape]) -> Drawing:
        """The lanes below a title, figures and a legend."""
        width = _LEFT_MARGIN + max(self.timeline.makespan * self.scale, self.narrowest) + self.right
        height = self.top + self.schedule.ranks * self.lane + _BOTTOM
        left_edge, size = (12, 15) if self.is_image else (_LEFT_MARGIN, 17)
        head: list[Shape] = [
            Label(left_edge, 26, clip(title, 54 if self.is_image else 90), size, bold=True),
            Label(left_edge, 45, "  ·  ".join(figures), 12, GREY),
        ]
        for number, row in enumerate(self.legend_rows):
            x: float = left_edge
            for entry, wide in row:
                head += Drawing(0, 0, entry).moved(x, 58 + _ROW * number)
                x += wide
        return Drawing(width, height, [*head, *shapes])

    @cached_property
    def legend(self) -> list[tuple[list[Shape], float]]:
        """(shapes from (0, 0) on, their width) for everything that is to be explained."""
        parts = []
        for kind, fills in self.colours.legend():
            swatches: list[Shape] = []
            for index, fill in enumerate(fills):
                swatches.append(Rectangle(index * 19, 0, 18, 16, fill, 2, **marks(kind, fill)))
                swatches.append(Label(index * 19 + 9, 12, kind.value, fill=ink(fill), anchor="middle"))
            parts.append(_explained(swatches, len(fills) * 19, MEANING[kind]))
        if self.colours.tones:
            parts.append(_explained([], -6, self.colours.tones))
        for collective, fill in COLLECTIVES.items() if self.timeline.collectives else ():
            sign: list[Shape] = [
                Rectangle(0, 2, 18, _STRIP - 2, fill, 2),
                Label(9, 12, "0", fill=ink(fill), anchor="middle"),
            ]
            parts.append(_explained(sign, 18, _COLLECTIVE_MEANING[collective]))
        if not self.is_image:
            parts.append(_explained([Rectangle(1, 1, 18, 14, "none", 2, _CRITICAL, 2)], 20, "critical path"))
        if not self.is_image and self.schedule.trains:
            curve = [(0, 16), (0, 11), (6, 11), (6, 5), (12, 5), (12, 13), (18, 13), (18, 16)]
            parts.append(_explained([Line(curve, fill=_CURVE)], 18, "held activations, and peak"))
        return parts

    def grounds(self) -> Iterator[Shape]:
        """The names and grounds of lanes, and the times below with a line through all lanes for each."""
        length = self.timeline.makespan * self.scale
        bottom = self.y(self.schedule.ranks) - _BETWEEN
        for rank in range(self.schedule.ranks):
            ids = [stage for stage, place in enumerate(self.schedule.placement) if place == rank]
            y = self.y(rank)
            yield Label(_LEFT_MARGIN - 10, y + 16, f"rank {rank}", 12, anchor="end", bold=True)
            if len(ids) > 1:
                stages = f"stages {ids[0]}, {ids[1]}" if len(ids) == 2 else f"{ids[0]}, {ids[1]} … {ids[-1]}"
                yield Label(_LEFT_MARGIN - 10, y + 31, stages, fill=GREY, anchor="end")
            yield Rectangle(_LEFT_MARGIN, y, length, _BOX, LIGHT)
        for tick in tick_marks(self.timeline.makespan / self.unit.size, max(2, int(length / 80))):
            x = self.x(tick * self.unit.size)
            yield Line([(x, self.top - 4), (x, bottom + 6)], LINE, 0.7)
            yield Label(x, bottom + 19, self.unit.number(tick * self.unit.size), fill=GREY, anchor="middle")
        name = f"time in {self.unit.unit}" if self.unit.unit else "time"
        yield Label(_LEFT_MARGIN - 10, bottom + 19, name, fill=GREY, anchor="end")

    def boxes(self) -> Iterator[Shape]:
        """A box for each event; its title says what it is and when."""
        for rank, row in enumerate(self.timeline.events):
            for event in row:
                fill, width = self.colours.fill(event.action), (event.end - event.start) * self.scale
                gap = min(0.8, width / 4)
                title = f"{event.action}: {self.unit.text(event.start)} to {self.unit.text(event.end)}"
                x, y = self.x(event.start), self.y(rank)
                kind = event.action.kind
                mark = marks(kind, fill) if width >= _MARKED else marks(Kind.F, fill)
                yield Rectangle(x, y, width - gap, _BOX, fill, min(2, width / 8), title=title, **mark)
                if width >= self.number_width - 1:
                    number = str(event.action.microbatch)
                    yield Label(x + (width - gap) / 2, y + 16, number, fill=ink(fill), anchor="middle")

    def collectives(self) -> Iterator[Shape]:
        """Below each lane, when its rank gathers parameters and reduces gradients, and of which stage."""
        for rank, collectives in enumerate(self.timeline.collectives):
            for collective, start, end in collectives.events:
                title = f"{collective}: {self.unit.text(start)} to {self.unit.text(end)}"
                x, width = self.x(start), (end - start) * self.scale
                fill, gap = COLLECTIVES[collective.kind], min(0.8, width / 4)
                y, stage = self.y(rank) + _BOX + 1, str(collective.stage)
                yield Rectangle(x, y, width - gap, _STRIP - 2, fill, min(2, width / 8), title=title)
                if width >= len(stage) * _DIGIT + 2:
                    yield Label(x + (width - gap) / 2, y + 10, stage, fill=ink(fill), anchor="middle")

    def memory(self) -> Iterator[Shape]:
        """Below each lane, how many activations its rank holds over time, and the most of them at the right."""
        peaks = self.timeline.peak_activations
        if max(peaks) == 0:
            return
        step = (_MEMORY - 2) / max(peaks)
        for rank, row in enumerate(self.timeline.events):
            base = self.y(rank) + _BOX + self.strip + _MEMORY
            changes = [(event.start, 1) for event in row if event.action.kind is Kind.F]
            changes += [(event.end, -1) for event in row if event.action.kind in (Kind.W, Kind.B)]
            activations, curve = 0, [(self.x(0), base)]
            for time, group in groupby(sorted(changes), key=lambda change: change[0]):
                activations += sum(change for _, change in group)
                curve += [(self.x(time), curve[-1][1]), (self.x(time), base - activations * step)]
            yield Line(curve, fill=_CURVE)
            yield Label(self.x(self.timeline.makespan) + 8, base - 2, str(peaks[rank]), fill=GREY)

    def arrows(self) -> Iterator[Shape]:
        """A line from each action to those on other ranks that use its result, if there are few enough to follow."""
        dependencies = self.schedule.dependencies
        ends: dict[tuple[bool, int, int], tuple[int, float]] = {}  # (backward, stage, microbatch) → (rank, time)
        events = [(rank, event) for rank, row in enumerate(self.timeline.events) for event in row]
        events = [(rank, event) for rank, event in events if event.action.kind is not Kind.W]
        for rank, event in events:
            ends[event.action.kind is not Kind.F, event.action.stage, event.action.microbatch] = rank, event.end
        lines = []
        for rank, event in events:
            backward = event.action.kind is not Kind.F
            sources = dependencies.gradient_consumers if backward else dependencies.producers
            for source in sources.get(event.action.stage, ()):
                source_rank, end = ends[backward, source, event.action.microbatch]
                if source_rank != rank:
                    lines.append(self.link(source_rank, end, rank, event.start, GREY, 0.6))
        if len(lines) <= _MOST_ARROWS:
            yield from lines

    def critical_path(self) -> Iterator[Shape]:
        """An outline around each stretch of it on one rank, and a line from each stretch to the next."""
        previous_end: tuple[int, float] | None = None
        path = self.timeline.critical_path
        for rank, group in groupby(path, key=lambda event: self.schedule.placement[event.action.stage]):
            stretch = list(group)
            start, end = stretch[0].start, stretch[-1].end
            if previous_end is not None:
                yield self.link(*previous_end, rank, start, _CRITICAL, 2)
            x = self.x(start)
            yield Rectangle(x, self.y(rank), self.x(end) - x, _BOX, "none", 2, _CRITICAL, 2)
            previous_end = rank, end

    def link(self, rank: int, end: float, other_rank: int, start: float, stroke: str, width: float) -> Line:
        """A line from one lane's edge to the facing edge of another."""
        down = other_rank > rank
        points = [(self.x(end), self.y(rank) + _BOX * down), (self.x(start), self.y(other_rank) + _BOX * (not down))]
        return Line(points, stroke, width)


def _explained(shapes: list[Shape], width: float, text: str) -> tuple[list[Shape], float]:
    return [*shapes, Label(width + 6, 12, text)], width + 6 + LETTER * len(text) + 16
