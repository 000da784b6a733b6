"""A package as one picture: its stages and boundaries, the memory of its ranks, and its schedule over time."""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.package import Package
from pipegraph.planner.package_prediction import RankMemoryByKind, memory_by_kind, predict_step
from pipegraph.report.colours import MEMORY, ink
from pipegraph.report.pictures.stages_svg import rank_colour, stages_drawing
from pipegraph.report.pictures.svg import GREY, LETTER, picture, px, text
from pipegraph.report.pictures.timeline_svg import timeline_drawing
from pipegraph.report.text.package_tables import explanation, model_title
from pipegraph.report.text.schedule_figures import Simulation
from pipegraph.report.text.tables import clip
from pipegraph.schedule import Schedule, Times
from pipegraph.units import format_bytes

_MARGIN, _NARROWEST, _WIDEST = 36, 1080, 1500
_ROW, _BAR = 34, 22  # of the memory of a rank
_BETWEEN = 40  # two parts


def package_svg(package: Package, schedule: Schedule) -> str:
    """The whole picture as the text of an SVG file."""
    manifest = package.manifest
    simulation = simulated(package, schedule)
    timeline_width, timeline_height, timeline = timeline_drawing(simulation)
    width = min(max(timeline_width, _NARROWEST), _WIDEST)
    smaller = min(1.0, width / timeline_width)
    head = list(_head(package, width))
    note = [] if simulation.in_seconds else [_note(timeline_height * smaller)]
    parts = [
        (_head_height(package), head),
        stages_drawing(manifest, schedule, width),
        _memory(memory_by_kind(manifest, schedule), width),
        (timeline_height * smaller, [f'<g transform="scale({px(smaller)})">', *timeline, "</g>", *note]),
    ]
    y, drawing = float(_MARGIN), []
    for height, elements in parts:
        drawing += [f'<g transform="translate({_MARGIN} {px(y)})">', *elements, "</g>"]
        y += height + (0 if elements is head else _BETWEEN)
    return picture(width + 2 * _MARGIN, y - _BETWEEN / 2, model_title(manifest), drawing)


def simulated(package: Package, schedule: Schedule) -> Simulation:
    """The schedule with the package's predicted times; where it has none, as if every action took as long."""
    times = predict_step(package.manifest, schedule).times
    return Simulation(schedule, times or Times.equal(schedule.stages), in_seconds=times is not None)


def _head(package: Package, width: float) -> Iterator[str]:
    name = clip(model_title(package.manifest), int(width / 13.5))
    yield f'<text x="0" y="10" font-size="21" font-weight="700">{text(name)}</text>'
    for number, line in enumerate(_lines(package)):
        said = clip(line, int(width / LETTER))
        yield f'<text x="0" y="{32 + 17 * number}" font-size="12" fill="{GREY}">{text(said)}</text>'


def _lines(package: Package) -> list[str]:
    """What a step is expected to take, without the reasons of the cuts."""
    return explanation(package.manifest)[:2]


def _head_height(package: Package) -> float:
    return 28 + 17 * len(_lines(package))


def _note(y: float) -> str:
    said = "No times are known: this is drawn as if F, I and W took the same time on every stage."
    return f'<text x="80" y="{px(y)}" font-size="11" fill="{GREY}">{text(said)}</text>'


def _memory(ranks: tuple[RankMemoryByKind, ...], width: float) -> tuple[float, list[str]]:
    """A bar for each rank, by kind of memory, all in one scale."""
    title = '<text x="0" y="10" font-size="13" font-weight="600">memory of each rank</text>'
    if not ranks:
        hint = "not known: this package has no sizes. pipegraph split writes it anew, with them."
        return 36.0, [title, f'<text x="0" y="30" fill="{GREY}">{text(hint)}</text>']
    drawing, x = [title], 170.0
    for kind in (kind for kind in MEMORY if kind in ranks[0].by_kind()):
        drawing.append(f'<rect x="{px(x)}" y="-1" width="14" height="13" rx="2" fill="{MEMORY[kind]}"/>')
        drawing.append(f'<text x="{px(x + 19)}" y="10">{kind}</text>')
        x += 34 + LETTER * len(kind)
    if "saved activations" not in ranks[0].by_kind():
        hint = "saved activations are not known: --balance time predicts them"
        drawing.append(f'<text x="{px(x)}" y="10" fill="{GREY}">{text(hint)}</text>')
    left, most = 76.0, max(rank.total for rank in ranks)
    scale = (width - left - 90) / most if most else 0.0
    for number, rank in enumerate(ranks):
        drawing += _bar(rank, 26 + number * _ROW, left, scale)
    return 26.0 + len(ranks) * _ROW, drawing


def _bar(rank: RankMemoryByKind, y: float, left: float, scale: float) -> Iterator[str]:
    yield f'<rect x="0" y="{px(y + 2)}" width="58" height="18" rx="9" fill="{rank_colour(rank.rank)}"/>'
    yield f'<text x="29" y="{px(y + 15)}" text-anchor="middle" font-weight="600" fill="#ffffff">rank {rank.rank}</text>'
    x = left
    for kind, held in rank.by_kind().items():
        wide, said = held * scale, format_bytes(held)
        yield f'<rect x="{px(x)}" y="{px(y)}" width="{px(wide)}" height="{_BAR}" fill="{MEMORY[kind]}">'
        yield f"<title>{kind}: {said}</title></rect>"
        if wide > LETTER * len(said) + 8:
            yield f'<text x="{px(x + wide / 2)}" y="{px(y + 15)}" text-anchor="middle" fill="{ink(MEMORY[kind])}" '
            yield f'pointer-events="none">{said}</text>'
        x += wide
    yield f'<text x="{px(x + 8)}" y="{px(y + 15)}" font-weight="600">{format_bytes(rank.total)}</text>'
