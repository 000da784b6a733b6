"""A timeline, simulated or measured, as an image: a lane per rank, a box per action. What TensorBoard shows.

Drawn large and made smaller, so that edges are smooth. Pillow, which comes with tensorboard, draws it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipegraph.report.colours import MEANING, chunks_of, colour, ink, kinds_of, tones
from pipegraph.report.pictures.svg import DARK, GREY, LIGHT, LINE
from pipegraph.report.text.schedule_figures import title
from pipegraph.report.text.tables import clip
from pipegraph.schedule import Schedule, Timeline
from pipegraph.units import TimeFormat, format_percent, tick_marks

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont
    from PIL.ImageFont import ImageFont as BitmapFont

_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 24, 92, 34  # around the lanes, in points
_BOX, _BETWEEN = 34, 10
_NARROWEST, _WIDEST = 640, 1900  # of the lanes
_DIGIT = 6.5  # width of a digit in a box
_SCALE, _SMOOTH = 2, 2  # pixels of the image to a point; and how much larger it is drawn


def timeline_png(schedule: Schedule, timeline: Timeline, unit: TimeFormat, what: str) -> Image:
    """The image of a timeline whose times are shown in ``unit``; ``what`` it is, such as ``predicted``."""
    from PIL.Image import Resampling

    page = _Page(schedule, timeline)
    page.text(_LEFT, 14, clip(f"{title(schedule)} · {what}", 100), size=17)
    said = f"step {unit.text(timeline.makespan)} (bubble {format_percent(timeline.bubble)})"
    page.text(_LEFT, 38, said, size=12, fill=GREY)
    page.legend()
    page.lanes()
    page.axis(unit)
    page.boxes()
    return page.image.resize((page.image.width // _SMOOTH, page.image.height // _SMOOTH), Resampling.LANCZOS)


class _Page:
    """An image on its way, with everything in points."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        from PIL import Image, ImageDraw

        self._schedule, self._timeline = schedule, timeline
        self._length = self._lanes_width()
        self._scale = self._length / timeline.makespan if timeline.makespan > 0 else 0.0
        height = _TOP + schedule.ranks * (_BOX + _BETWEEN) + _BOTTOM
        size = (_pixels(_LEFT + self._length + _RIGHT), _pixels(height))
        self.image = Image.new("RGB", size, "#ffffff")
        self._draw = ImageDraw.Draw(self.image)
        self._fonts: dict[int, FreeTypeFont | BitmapFont] = {}

    def text(self, x: float, y: float, said: str, size: int = 11, fill: str = DARK, anchor: str = "la") -> float:
        """Write; the point is the text's as ``anchor`` says. Returns its width."""
        from PIL import ImageFont

        if size not in self._fonts:
            self._fonts[size] = ImageFont.load_default(size * _SCALE * _SMOOTH)
        font = self._fonts[size]
        self._draw.text((_pixels(x), _pixels(y)), said, fill=fill, font=font, anchor=anchor)
        return float(self._draw.textlength(said, font=font)) / (_SCALE * _SMOOTH)

    def rectangle(self, x: float, y: float, width: float, height: float, fill: str, radius: float = 0.0) -> None:
        corners = (_pixels(x), _pixels(y), max(_pixels(x), _pixels(x + width) - 1), _pixels(y + height) - 1)
        self._draw.rounded_rectangle(corners, _pixels(radius), fill)

    def legend(self) -> None:
        most, _ = chunks_of(self._schedule)
        x: float = _LEFT
        for kind in kinds_of(self._schedule):
            for chunk in tones(most):
                fill = colour(kind, chunk, most)
                self.rectangle(x, 60, 18, 16, fill, 2)
                self.text(x + 9, 68, kind.value, 11, ink(fill), "mm")
                x += 19
            x += 5 + self.text(x + 5, 68, MEANING[kind], anchor="lm") + 18

    def lanes(self) -> None:
        for rank in range(self._schedule.ranks):
            held = [str(stage) for stage, place in enumerate(self._schedule.placement) if place == rank]
            shown = held if len(held) <= 2 else [held[0], held[1], "…", held[-1]]
            y = self._lane(rank)
            self.text(_LEFT - 10, y + (12 if len(held) > 1 else _BOX / 2), f"rank {rank}", 12, DARK, "rm")
            if len(held) > 1:
                self.text(_LEFT - 10, y + 24, f"stages {', '.join(shown)}", 8, GREY, "rm")
            self.rectangle(_LEFT, y, self._length, _BOX, LIGHT)

    def axis(self, unit: TimeFormat) -> None:
        bottom = self._lane(self._schedule.ranks) - _BETWEEN
        for tick in tick_marks(self._timeline.makespan / unit.size, max(2, int(self._length / 90))):
            x = _LEFT + tick * unit.size * self._scale
            self._draw.line([(_pixels(x), _pixels(_TOP - 4)), (_pixels(x), _pixels(bottom + 6))], LINE, _SMOOTH)
            self.text(x, bottom + 10, unit.number(tick * unit.size), 11, GREY, "ma")
        self.text(_LEFT - 10, bottom + 10, f"time in {unit.unit}" if unit.unit else "time", 11, GREY, "ra")

    def boxes(self) -> None:
        most, chunks = chunks_of(self._schedule)
        for rank, row in enumerate(self._timeline.events):
            for event in row:
                fill = colour(event.action.kind, chunks[event.action.stage], most)
                x, width = _LEFT + event.start * self._scale, (event.end - event.start) * self._scale
                gap, number = min(0.8, width / 4), str(event.action.microbatch)
                self.rectangle(x, self._lane(rank), width - gap, _BOX, fill, min(2, width / 8))
                if width >= len(number) * _DIGIT + 3:
                    self.text(x + (width - gap) / 2, self._lane(rank) + _BOX / 2, number, 11, ink(fill), "mm")

    def _lanes_width(self) -> float:
        """In points: so that the number of a microbatch fits into most actions, if the image stays narrow enough."""
        lasting = sorted(each.end - each.start for row in self._timeline.events for each in row)
        typical = lasting[len(lasting) // 4] if lasting else 0.0
        if typical <= 0:
            return _NARROWEST
        digits = len(str(self._schedule.microbatches - 1))
        wanted = (digits * _DIGIT + 5) / typical * self._timeline.makespan
        return min(max(wanted, _NARROWEST), _WIDEST)

    @staticmethod
    def _lane(rank: int) -> int:
        return _TOP + rank * (_BOX + _BETWEEN)


def _pixels(points: float) -> int:
    return round(points * _SCALE * _SMOOTH)
