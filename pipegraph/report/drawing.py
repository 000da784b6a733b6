"""Pictures as data: rectangles, labels and lines, written as SVG or painted as an image.

Lengths are pixels; an SVG has two decimals at most, so that equal pictures are equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

LIGHT, GREY, DARK, LINE = "#f1f3f5", "#6b7280", "#111827", "#d1d5db"
LETTER = 5.9
"""About the width of a letter of 11 pixels."""

_FONT = "'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"
_SIZE = 11  # of a label
_HATCH, _HATCH_OPACITY = 6, 0.28  # distance of slanting lines
_FOOT, _FOOT_OPACITY = 3, 0.6  # height of a bar at the foot of a box
_SHARPNESS, _SMOOTHNESS = 2, 2  # pixels of an image to a pixel of the drawing; and how much larger it is painted


@dataclass(frozen=True)
class Rectangle:
    """A box. A browser shows ``title`` if the mouse points at it.

    ``hatch`` and ``foot`` are the colours of thin slanting lines over it and of a bar at its foot; empty for none.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    radius: float = 0.0
    stroke: str = "none"
    stroke_width: float = 1.0
    title: str = ""
    hatch: str = ""
    foot: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text with the start, middle or end of its baseline at (x, y). ``lead`` is bold text before it."""

    x: float
    y: float
    text: str
    size: float = _SIZE
    fill: str = DARK
    anchor: str = "start"
    bold: bool = False
    lead: str = ""
    upwards: bool = False
    title: str = ""


@dataclass(frozen=True)
class Line:
    """Points joined by lines, or the area between them."""

    points: Sequence[tuple[float, float]]
    stroke: str = "none"
    width: float = 1.0
    dashed: bool = False
    fill: str = "none"
    title: str = ""


Shape = Rectangle | Label | Line


@dataclass(frozen=True)
class Drawing:
    """Shapes between (0, 0) and (width, height). Later ones cover earlier ones."""

    width: float
    height: float
    shapes: Sequence[Shape]

    def moved(self, x: float, y: float, scale: float = 1.0) -> Iterator[Shape]:
        """Yield the shapes, scaled and then moved by (x, y)."""
        for shape in self.shapes:
            if isinstance(shape, Line):
                points = [(x + scale * at, y + scale * top) for at, top in shape.points]
                yield replace(shape, points=points, width=scale * shape.width)
            elif isinstance(shape, Label):
                yield replace(shape, x=x + scale * shape.x, y=y + scale * shape.y, size=scale * shape.size)
            else:
                yield replace(
                    shape,
                    x=x + scale * shape.x,
                    y=y + scale * shape.y,
                    width=scale * shape.width,
                    height=scale * shape.height,
                    radius=scale * shape.radius,
                    stroke_width=scale * shape.stroke_width,
                )

    def to_svg(self, name: str) -> str:
        """Return the text of an SVG file with a white background; screen readers read ``name``."""
        width, height = px(self.width), px(self.height)
        size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        font = f'font-family="{_FONT}" font-size="{_SIZE}" fill="{DARK}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>',
            f"<title>{_escaped(name)}</title>",
            *map(
                _pattern, sorted({shape.hatch for shape in self.shapes if isinstance(shape, Rectangle) and shape.hatch})
            ),
            '<rect width="100%" height="100%" fill="#ffffff"/>',
            *(element for shape in self.shapes for element in _elements(shape)),
            "</svg>\n",
        ]
        return "\n".join(lines)

    def to_image(self) -> Image:
        """Paint it with Pillow, enlarged and then reduced to smooth edges. Titles are left out."""
        from PIL.Image import Resampling, new
        from PIL.ImageDraw import Draw

        scale = _SHARPNESS * _SMOOTHNESS
        image = new("RGB", (round(scale * self.width), round(scale * self.height)), "#ffffff")
        draw = Draw(image)
        for shape in self.moved(0, 0, scale):
            _paint(draw, shape)
        return image.resize((image.width // _SMOOTHNESS, image.height // _SMOOTHNESS), Resampling.LANCZOS)


def px(number: float) -> str:
    """Format pixels with two decimals at most.

    >>> px(1.0), px(0.128)
    ('1', '0.13')
    """
    return f"{number:.2f}".rstrip("0").rstrip(".")


def _escaped(text: str) -> str:
    """Escape text for XML, and replace control characters: a model's name may hold anything."""
    return escape("".join(character if character.isprintable() else "\ufffd" for character in text))


def _pattern(colour: str) -> str:
    """The definition of slanting lines of a colour, from the lower left to the upper right."""
    lines = f'<path d="M-1 1L1 -1M0 {_HATCH}L{_HATCH} 0M{_HATCH - 1} {_HATCH + 1}L{_HATCH + 1} {_HATCH - 1}"'
    pen = f'stroke="{colour}" stroke-opacity="{_HATCH_OPACITY}"/>'
    box = f'id="hatch-{colour[1:]}" width="{_HATCH}" height="{_HATCH}" patternUnits="userSpaceOnUse"'
    return f"<defs><pattern {box}>{lines} {pen}</pattern></defs>"


def _elements(shape: Shape) -> Iterator[str]:
    """The elements of a shape: the box, its hatch and its foot, of which the pointer sees the box."""
    yield _element(shape)
    if isinstance(shape, Rectangle):
        place, through = f'x="{px(shape.x)}" width="{px(shape.width)}"', 'pointer-events="none"'
        if shape.hatch:
            extent = f'y="{px(shape.y)}" height="{px(shape.height)}"'
            yield f'<rect {place} {extent} fill="url(#hatch-{shape.hatch[1:]})" {through}/>'
        if shape.foot:
            below = f'y="{px(shape.y + shape.height - _FOOT)}" height="{_FOOT}"'
            yield f'<rect {place} {below} fill="{shape.foot}" fill-opacity="{_FOOT_OPACITY}" {through}/>'


def _element(shape: Shape) -> str:
    content = _escaped(shape.title).join(("<title>", "</title>")) if shape.title else ""
    if isinstance(shape, Rectangle):
        place = f'x="{px(shape.x)}" y="{px(shape.y)}" width="{px(shape.width)}" height="{px(shape.height)}"'
        radius = f' rx="{px(shape.radius)}"' if shape.radius else ""
        outline = f' stroke="{shape.stroke}" stroke-width="{px(shape.stroke_width)}"' if shape.stroke != "none" else ""
        return _closed("rect", f'{place}{radius} fill="{shape.fill}"{outline}', content)
    if isinstance(shape, Line):
        path = "L".join(f"{px(x)} {px(y)}" for x, y in shape.points)
        outline = f' stroke="{shape.stroke}" stroke-width="{px(shape.width)}"' if shape.stroke != "none" else ""
        dashes = ' stroke-dasharray="3 3"' if shape.dashed else ""
        return _closed("path", f'd="M{path}" fill="{shape.fill}"{outline}{dashes}', content)
    place = f'x="{px(shape.x)}" y="{px(shape.y)}"'
    if shape.upwards:
        place = f'transform="translate({px(shape.x)} {px(shape.y)}) rotate(-90)"'
    style = f' font-size="{px(shape.size)}"' if shape.size != _SIZE else ""
    style += f' fill="{shape.fill}"' if shape.fill != DARK else ""
    style += f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    style += ' font-weight="600"' if shape.bold else ""
    style += "" if shape.title else ' pointer-events="none"'
    lead = f'<tspan font-weight="600" fill="{DARK}">{_escaped(shape.lead)}</tspan>' if shape.lead else ""
    return f"<text {place}{style}>{content}{lead}{_escaped(shape.text)}</text>"


def _closed(tag: str, attributes: str, content: str) -> str:
    return f"<{tag} {attributes}>{content}</{tag}>" if content else f"<{tag} {attributes}/>"


def _paint(draw: object, shape: Shape) -> None:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import load_default

    assert isinstance(draw, ImageDraw)
    if isinstance(shape, Label):
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        text = shape.lead + shape.text
        draw.text((shape.x, shape.y), text, fill=shape.fill, font=load_default(shape.size), anchor=anchor)
    elif isinstance(shape, Line):
        if shape.fill != "none":
            draw.polygon(list(shape.points), shape.fill)
        if shape.stroke != "none":
            draw.line(list(shape.points), shape.stroke, max(1, round(shape.width)))
    else:
        right, bottom = max(shape.x, shape.x + shape.width - 1), max(shape.y, shape.y + shape.height - 1)
        fill, outline = (None if colour == "none" else colour for colour in (shape.fill, shape.stroke))
        corners = (round(shape.x), round(shape.y), round(right), round(bottom))
        draw.rounded_rectangle(corners, shape.radius, fill, outline, max(1, round(shape.stroke_width)))
        scale = _SHARPNESS * _SMOOTHNESS
        if shape.hatch:
            mixed = _mixed(shape.hatch, shape.fill, _HATCH_OPACITY)
            for start, end in _slants(shape.x, shape.y, right, bottom, _HATCH * scale):
                draw.line([start, end], mixed, scale)
        if shape.foot:
            top = max(shape.y, bottom - _FOOT * scale)
            draw.rectangle((shape.x, top, right, bottom), _mixed(shape.foot, shape.fill, _FOOT_OPACITY))


def _slants(
    left: float, top: float, right: float, bottom: float, distance: float
) -> Iterator[tuple[tuple[float, float], tuple[float, float]]]:
    """Lines from the lower left to the upper right, inside a box."""
    at = left - (bottom - top)
    while at < right:
        start, end = max(at, left), min(at + bottom - top, right)
        yield (start, bottom - (start - at)), (end, bottom - (end - at))
        at += distance


def _mixed(colour: str, ground: str, opacity: float) -> str:
    """A colour as it looks on a ground that it lets shine through."""
    parts = ((int(colour[at : at + 2], 16), int(ground[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(over * opacity + under * (1 - opacity)):02x}" for over, under in parts)
