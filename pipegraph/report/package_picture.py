"""A package as one picture: its stages and boundaries, the memory of its ranks, and its schedule over time.

The stages are one below the other, with what crosses between them, and what each costs:

    ╭──────────────────────╮
  ╭─┤ stage 0       rank 0 │  ▇▇▇▇▇▒▒▒▒░░░  12 ms     F, I and W of one microbatch
  │ ╰───────────┬──────────╯
8 │             ↓ h float32[8, 128, 512]  2.0 MiB
M │ ╭───────────┴──────────╮
i ╰▸┤ stage 1       rank 1 │
B   ╰──────────────────────╯                          a value that skips stages goes around them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipegraph.package import CALLER, Manifest, Package, StageEntry, Value
from pipegraph.package.prediction import RankMemory
from pipegraph.planner.step_prediction import memory_by_kind, predict_step
from pipegraph.report.colours import MEANING, MEMORY, colour, ink, marks
from pipegraph.report.drawing import GREY, LETTER, LINE, Drawing, Label, Line, Rectangle, Shape
from pipegraph.report.text import clip, short_modules
from pipegraph.report.text.package_tables import bytes_of, explain_cuts, has_times, held_modules, package_title
from pipegraph.report.text.schedule_report import schedule_title
from pipegraph.report.timeline_picture import schedule_drawing
from pipegraph.schedule import Kind, Schedule, Times
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import TimeFormat, format_bytes, format_count

_MARGIN, _NARROWEST, _WIDEST = 36, 1080, 1500
_ROW, _MEMORY_BAR = 34, 22  # of the memory of a rank
_BETWEEN = 40  # two parts

_CARD, _HEIGHT, _GAP = 440, 62, 44  # width and height of a stage, and the way to the next one
_LANE = 24  # of a value that goes around stages
_BAR, _SPACE = 26, 36  # height of a bar, and its distance from the stage
_CARD_LETTERS, _ARROW_LETTERS = 66, 72  # that fit into a stage's line, and next to an arrow
_FILL, _EDGE, _ARROW = "#f8fafc", "#94a3b8", "#475569"
_FLOPS = "#7c8aa0"
_BADGE, _BADGE_EDGE, _BADGE_INK = "#e2e8f0", "#94a3b8", "#1e293b"  # of a rank: no colour that means a kind of work

SAME_RANK = "same rank, no transfer"
EQUAL_TIMES = "No times are known: this is drawn as if F, I and W took the same time on every stage."
_SMALLEST = 0.8  # of a timeline, relative to its full size; a smaller one gets a separate picture


@dataclass(frozen=True)
class PackagePicture:
    """The texts of SVG files: the package, and its timeline if that is too wide for the same picture."""

    package: str
    timeline: str | None


def simulated_package(manifest: Manifest, schedule: Schedule) -> SimulatedSchedule:
    """Return the schedule with the package's times; with equal ones, that are no seconds, if none are known."""
    times = predict_step(manifest, schedule).times
    return SimulatedSchedule(schedule, times or Times.equal(schedule.stages), in_seconds=times is not None)


def package_picture(package: Package, schedule: Schedule) -> PackagePicture:
    """Draw a package and its schedule over time."""
    manifest = package.manifest
    simulated = simulated_package(manifest, schedule)
    timeline = schedule_drawing(simulated)
    width = min(max(timeline.width, _NARROWEST), _WIDEST)
    scale = min(1.0, width / timeline.width)
    parts = [
        (_head(package, width), 1.0),
        (_stages_drawing(manifest, schedule, width), 1.0),
        (_memory(memory_by_kind(manifest, schedule), width), 1.0),
    ]
    if scale >= _SMALLEST:
        parts.append((timeline, scale))
    shapes: list[Shape] = []
    y = float(_MARGIN)
    for drawing, factor in parts:
        shapes += drawing.moved(_MARGIN, y, factor)
        y += drawing.height * factor + _BETWEEN
    if scale < _SMALLEST:
        shapes.append(Label(_MARGIN, y - _BETWEEN / 2, "The schedule over time is in a separate picture.", fill=GREY))
        y += _BETWEEN / 2
    elif not simulated.in_seconds:
        shapes.append(Label(_MARGIN + 80, y - _BETWEEN, EQUAL_TIMES, fill=GREY))
    package_svg = Drawing(width + 2 * _MARGIN, y - _BETWEEN / 2, shapes).to_svg(package_title(manifest))
    return PackagePicture(package_svg, timeline.to_svg(schedule_title(schedule)) if scale < _SMALLEST else None)


def _head(package: Package, width: float) -> Drawing:
    """The package's name, and what a step is expected to take."""
    lines = explain_cuts(package.manifest.prediction)[:2]
    shapes: list[Shape] = [Label(0, 10, clip(package_title(package.manifest), int(width / 13.5)), 21, bold=True)]
    for number, line in enumerate(lines):
        shapes.append(Label(0, 32 + 17 * number, clip(line, int(width / LETTER)), 12, GREY))
    return Drawing(width, 17 * len(lines) - 12, shapes)


def _memory(ranks: Sequence[RankMemory], width: float) -> Drawing:
    """A bar for each rank, by kind of memory, all in one scale."""
    shapes: list[Shape] = [Label(0, 10, "memory of each rank", 13, bold=True)]
    if not ranks:
        hint = "not known: this package has no sizes. pipegraph split writes it again, with them."
        return Drawing(width, 36, [*shapes, Label(0, 30, hint, fill=GREY)])
    x = 170.0
    kinds = [kind for kind in ranks[0].by_kind() if any(rank.by_kind().get(kind) for rank in ranks)]
    for kind in kinds:
        shapes += [Rectangle(x, -1, 14, 13, MEMORY[kind], 2), Label(x + 19, 10, kind)]
        x += 34 + LETTER * len(kind)
    if ranks[0].activations is None:
        shapes.append(Label(x, 10, "activations are not known: --balance time predicts them", fill=GREY))
    left_edge, most = 76.0, max(rank.total for rank in ranks)
    scale = (width - left_edge - 90) / most if most else 0.0
    for number, rank in enumerate(ranks):
        y = 26 + number * _ROW
        sizes = rank.by_kind()
        parts = [(kind, MEMORY[kind], sizes[kind] * scale, format_bytes(sizes[kind])) for kind in kinds]
        shapes += [*_rank_mark(number, 0, y + 2), *_bars(parts, left_edge, y, _MEMORY_BAR)]
        shapes.append(Label(left_edge + rank.total * scale + 8, y + 15, format_bytes(rank.total), bold=True))
    return Drawing(width, 26 + len(ranks) * _ROW, shapes)


def _stages_drawing(manifest: Manifest, schedule: Schedule, width: float) -> Drawing:
    """Draw the stages and what crosses between them at the left, and a bar for what each costs at the right."""
    manifest = manifest.at_capture()
    lanes = _lanes(manifest)
    left_edge = _LANE * (1 + max(lanes.values(), default=-1)) + (10 if lanes else 0)
    shapes = [*_arrow(left_edge, 0, manifest.caller_tensors(0), ""), *_skips(manifest, lanes, left_edge)]
    for stage in manifest.stages:
        shapes += _card(manifest, stage, schedule.placement[stage.index], left_edge)
        shapes += _crossing(manifest, schedule, stage.index, left_edge)
    _bars = left_edge + _CARD + _SPACE
    shapes += (_times if has_times(manifest) else _flops)(manifest, _bars, width - _bars)
    return Drawing(width, _GAP + len(manifest.stages) * (_HEIGHT + _GAP), shapes)


def _rank_mark(rank: int, x: float, y: float, size: float = 10.5) -> Iterator[Shape]:
    """Draw a rank's name on a badge, from x to the right."""
    width, height = size * (0.56 * len(f"rank {rank}") + 1.3), 1.62 * size
    yield Rectangle(x, y, width, height, _BADGE, height / 2, _BADGE_EDGE)
    yield Label(x + width / 2, y + 1.15 * size, f"rank {rank}", size, _BADGE_INK, "middle", bold=True)


def _bars(parts: Sequence[tuple[str, str, float, str]], x: float, y: float, height: float) -> Iterator[Shape]:
    """Draw boxes side by side: (name, fill, width, figure), with the figure inside if it fits."""
    kinds = {kind.value: kind for kind in MEANING}
    for name, fill, width, figure in parts:
        mark = marks(kinds.get(name, Kind.F), fill)
        yield Rectangle(x, y, width, height, fill, title=f"{name} {figure}", **mark)
        if width > LETTER * len(figure) + 8:
            yield Label(x + width / 2, y + height / 2 + 4, figure, fill=ink(fill), anchor="middle")
        x += width


def _top(stage: int) -> int:
    return _GAP + stage * (_HEIGHT + _GAP)


def _card(manifest: Manifest, stage: StageEntry, rank: int, left_edge: float) -> Iterator[Shape]:
    y, modules = _top(stage.index), short_modules(held_modules(manifest, stage.index)) or stage.class_name
    yield Rectangle(left_edge, y, _CARD, _HEIGHT, _FILL, 7, _EDGE, title=modules)
    yield Label(left_edge + 18, y + 20, f"stage {stage.index}", 13, bold=True)
    yield from _rank_mark(rank, left_edge + _CARD - 66, y + 8)
    yield Label(left_edge + 18, y + 37, clip(modules, _CARD_LETTERS), 11.5)
    yield Label(left_edge + 18, y + 53, "  ·  ".join(stage_sizes(stage)), 10.5, GREY)


def stage_sizes(stage: StageEntry) -> list[str]:
    """Return what a stage holds and computes, as far as that is known."""
    cost, sizes = stage.cost, [f"{len(stage.parameters)} parameter tensors"]
    if cost.parameters is not None:
        sizes[0] = format_count(cost.parameters, "parameters")
    if cost.flops is not None:
        sizes.append(f"{format_count(cost.flops, 'FLOP')} forward")
    if cost.saved_bytes is not None:
        sizes.append(f"keeps {format_bytes(cost.saved_bytes)} for its backward")
    return sizes


def _crossing(manifest: Manifest, schedule: Schedule, stage: int, left_edge: float) -> Iterator[Shape]:
    """The arrow from a stage to the next one, or out of the last one."""
    if stage == len(manifest.stages) - 1:
        last = [manifest.values[name] for name in manifest.stages[stage].outputs]
        yield from _arrow(left_edge, stage + 1, last, "the model's output")
        return
    values = [manifest.values[name] for name in manifest.edge_values(stage, stage + 1)]
    names = [clip(value.name, 20) for value in manifest.caller_tensors(stage + 1)]
    stays = schedule.placement[stage] == schedule.placement[stage + 1]
    notes = [f"and {', '.join(names[:3])}{' …' if len(names) > 3 else ''} of the caller"] if names else []
    yield from _arrow(left_edge, stage + 1, values, ", ".join(notes), stays)


def _arrow(left_edge: float, to: int, values: Sequence[Value], note: str, stays: bool = False) -> Iterator[Shape]:
    """Draw an arrow down to the place of stage ``to``, dashed if values stay on a rank; without values the note."""
    x, end = left_edge + 40, _top(to) - 4
    start = end - _GAP + 8
    if not values:
        yield Label(x + 14, start + 21, note, fill=_ARROW)
        return
    yield Line([(x, start), (x, end - 6)], _ARROW, 1.6, stays)
    yield Line([(x - 5, end - 8), (x + 5, end - 8), (x, end + 1)], fill=_ARROW)
    first, remainder = values[0], f" and {len(values) - 1} more" if len(values) > 1 else ""
    total, back = sum(map(bytes_of, values)), sum(bytes_of(value) for value in values if value.requires_grad)
    amount = format_bytes(total)
    if first.producer != CALLER and back and first.consumers and not stays:
        amount += f", {'the same' if back == total else format_bytes(back)} back"
    name, shape = clip(first.name, 20), clip(first.type_text, 30)
    lead = f"{SAME_RANK}  ·  {name}" if stays else name
    text = f"{remainder if stays else f'  {shape}{remainder}'}  ·  {amount}{f', {note}' if note else ''}"
    every = "; ".join(map(str, values))
    yield Label(x + 14, start + 21, clip(text, _ARROW_LETTERS - len(lead)), fill=_ARROW, lead=lead, title=every)


def _lanes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Edge that skips stages → its lane at the left, from 0: neighbours have different ones, short ones are near."""
    skipping = sorted((edge for edge in manifest.edges() if edge[1] - edge[0] > 1), key=lambda edge: edge[1] - edge[0])
    lanes: dict[tuple[int, int], int] = {}
    for start, stop in skipping:
        used_lanes = {lane for (first, last), lane in lanes.items() if first < stop and start < last}
        lanes[start, stop] = next(lane for lane in range(len(used_lanes) + 1) if lane not in used_lanes)
    return lanes


def _skips(manifest: Manifest, lanes: dict[tuple[int, int], int], left_edge: float) -> Iterator[Shape]:
    """A line around the stages for each edge that skips some, with its bytes."""
    leaving: Counter[int] = Counter()
    arriving: Counter[int] = Counter()
    for (producer, consumer), lane in lanes.items():
        values = [manifest.values[name] for name in manifest.edge_values(producer, consumer)]
        x = left_edge - 14 - lane * _LANE
        start = _top(producer) + _HEIGHT - 10 - 7 * leaving[producer]
        end = _top(consumer) + 10 + 7 * arriving[consumer]
        leaving[producer], arriving[consumer] = leaving[producer] + 1, arriving[consumer] + 1
        title = f"stage {producer} to stage {consumer}: {'; '.join(map(str, values))}"
        yield Line([(left_edge, start), (x, start), (x, end), (left_edge - 6, end)], _ARROW, 1.4, title=title)
        yield Line([(left_edge - 8, end - 5), (left_edge - 8, end + 5), (left_edge, end)], fill=_ARROW)
        amount = format_bytes(sum(map(bytes_of, values)))
        yield Label(x - 5, (start + end) / 2, amount, fill=_ARROW, anchor="middle", upwards=True)


def _times(manifest: Manifest, left_edge: float, width: float) -> Iterator[Shape]:
    """F, I and W of each stage as one bar, all in one scale."""
    times = [stage.cost.times or (0.0, 0.0, 0.0) for stage in manifest.stages]
    longest = max(map(sum, times))
    unit, scale = TimeFormat.of_column([longest]), (width - 80) / longest if longest > 0 else 0.0
    yield Label(left_edge, 18, f"time of one microbatch, in {unit.unit}", 13, bold=True)
    x = left_edge + LETTER * 41
    for kind in (Kind.F, Kind.I, Kind.W):
        yield Rectangle(x, 7, 16, 14, colour(kind), 2, **marks(kind, colour(kind)))
        yield Label(x + 8, 18, kind.value, fill=ink(colour(kind)), anchor="middle")
        yield Label(x + 21, 18, MEANING[kind], fill=GREY)
        x += 34 + LETTER * len(MEANING[kind])
    for stage, seconds in enumerate(times):
        y = _top(stage) + (_HEIGHT - _BAR) / 2
        times_of = zip((Kind.F, Kind.I, Kind.W), seconds, strict=True)
        parts = [(kind.value, colour(kind), duration * scale, unit.text(duration)) for kind, duration in times_of]
        yield from _bars(parts, left_edge, y, _BAR)
        yield Label(left_edge + sum(seconds) * scale + 8, y + 17, unit.text(sum(seconds)), bold=True)
    yield Line([(left_edge, _GAP - 8), (left_edge, _top(len(times) - 1) + _HEIGHT + 4)], LINE)


def _flops(manifest: Manifest, left_edge: float, width: float) -> Iterator[Shape]:
    """Without times: the work of each stage's forward, and how to get times."""
    work = [float(stage.cost.flops or 0) for stage in manifest.stages]
    name = "work of one microbatch's forward" if any(work) else "the costs of the stages are not known"
    yield Label(left_edge, 14, name, 13, bold=True)
    yield Label(left_edge, 30, "No times were predicted: pipegraph split … --balance time predicts them.", 10.5, GREY)
    for stage, flops in enumerate(work if any(work) else []):
        length, y = flops / max(work) * (width - 80), _top(stage) + (_HEIGHT - _BAR) / 2
        yield Rectangle(left_edge, y, length, _BAR, _FLOPS)
        yield Label(left_edge + length + 8, y + 17, format_count(flops, "FLOP"), bold=True)
