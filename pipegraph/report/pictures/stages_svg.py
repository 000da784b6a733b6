"""The stages of a package one below the other, what crosses between them, and what each costs.

    ╭──────────────────────╮
  ╭─┤ stage 0       rank 0 │  ▇▇▇▇▇▒▒▒▒░░░  12 ms     F, I and W of one microbatch
  │ ╰───────────┬──────────╯
8 │             ↓ h float32[8, 128, 512]  2.0 MiB
M │ ╭───────────┴──────────╮
i ╰▸┤ stage 1       rank 1 │
B   ╰──────────────────────╯                          a value that skips stages goes around them
"""

from __future__ import annotations

from collections.abc import Iterator

from pipegraph.package import CALLER, Manifest, StageEntry, Value
from pipegraph.report.colours import MEANING, colour, ink
from pipegraph.report.pictures.svg import DARK, GREY, LETTER, LINE, px, text
from pipegraph.report.text.package_tables import bytes_of, holds, knows_times
from pipegraph.report.text.tables import clip
from pipegraph.schedule import Kind, Schedule
from pipegraph.units import TimeFormat, format_bytes, format_count

_CARD, _HEIGHT, _GAP = 440, 62, 44  # width and height of a stage, and the way to the next one
_LANE = 24  # of a value that goes around stages
_BAR, _SPACE = 26, 36  # height of a bar, and its distance from the stage
_LETTERS, _SAID = 66, 72  # letters that fit into a stage's line, and beside an arrow
_FILL, _EDGE, _ARROW = "#f8fafc", "#94a3b8", "#475569"
_FLOPS = "#7c8aa0"
_RANKS = ("#1d4ed8", "#b45309", "#047857", "#7e22ce", "#be123c", "#0e7490", "#4d7c0f", "#475569")
_TIMES = {Kind.F: "forward", Kind.I: "input_grad", Kind.W: "weight_grad"}


def stages_drawing(manifest: Manifest, schedule: Schedule, width: float) -> tuple[float, list[str]]:
    """(height, elements), from 0, 0 on and so wide."""
    lanes = _lanes(manifest)
    left = _LANE * (1 + max(lanes.values(), default=-1)) + (10 if lanes else 0)
    stages = manifest.stages
    height = _GAP + len(stages) * (_HEIGHT + _GAP)
    drawing = [_given(manifest, left), *_skips(manifest, lanes, left)]
    for stage in stages:
        drawing += _card(manifest, stage, schedule.placement[stage.index], left)
        drawing.append(_crossing(manifest, schedule, stage.index, left))
    bars = left + _CARD + _SPACE
    return height, [*drawing, *(_times if knows_times(manifest) else _flops)(manifest, bars, width - bars)]


def rank_colour(rank: int) -> str:
    """Of a rank's mark: eight of them, in turn."""
    return _RANKS[rank % len(_RANKS)]


def _top(stage: int) -> int:
    return _GAP + stage * (_HEIGHT + _GAP)


def _card(manifest: Manifest, stage: StageEntry, rank: int, left: float) -> Iterator[str]:
    y = _top(stage.index)
    held = holds(manifest, stage.index) or stage.class_name
    yield f'<g><title>{text(held)}</title><rect x="{px(left)}" y="{y}" width="{_CARD}" height="{_HEIGHT}" rx="7" '
    yield f'fill="{_FILL}" stroke="{_EDGE}"/>'
    yield f'<rect x="{px(left)}" y="{y}" width="6" height="{_HEIGHT}" rx="3" fill="{rank_colour(rank)}"/>'
    x, end = left + 18, left + _CARD - 14
    yield f'<text x="{px(x)}" y="{y + 20}" font-size="13" font-weight="600">stage {stage.index}</text>'
    mark = f"rank {rank}"
    mark_width = LETTER * len(mark) + 14
    yield f'<rect x="{px(end - mark_width)}" y="{y + 8}" width="{px(mark_width)}" height="17" rx="8.5" '
    yield f'fill="{rank_colour(rank)}"/><text x="{px(end - mark_width / 2)}" y="{y + 20}" text-anchor="middle" '
    yield f'font-size="10.5" font-weight="600" fill="#ffffff">{mark}</text>'
    yield f'<text x="{px(x)}" y="{y + 37}" font-size="11.5">{text(clip(held, _LETTERS))}</text>'
    yield f'<text x="{px(x)}" y="{y + 53}" font-size="10.5" fill="{GREY}">{text(_sizes(stage))}</text></g>'


def _sizes(stage: StageEntry) -> str:
    cost = stage.cost
    unknown = f"{len(stage.parameters)} parameter tensors"
    said = [unknown if cost.parameters is None else f"{format_count(cost.parameters)} parameters"]
    if cost.flops is not None:
        said.append(f"{format_count(cost.flops, 'FLOP')} forward")
    if cost.saved_bytes is not None:
        said.append(f"keeps {format_bytes(cost.saved_bytes)} for its backward")
    return "  ·  ".join(said)


def _given(manifest: Manifest, left: float) -> str:
    """The arrow into the first stage, with what the caller gives it."""
    first = [manifest.values[name] for name in manifest.stages[0].inputs]
    given = [value for value in first if value.producer == CALLER and not value.is_constant]
    return _arrow(left, 0, given, "", "")


def _crossing(manifest: Manifest, schedule: Schedule, stage: int, left: float) -> str:
    """The arrow from a stage to the next one, or out of the last one."""
    if stage == len(manifest.stages) - 1:
        last = [manifest.values[name] for name in manifest.stages[stage].outputs]
        return _arrow(left, stage + 1, last, "", "the model's output")
    following = manifest.stages[stage + 1]
    values = [manifest.values[name] for name in following.inputs]
    crossing = [value for value in values if value.producer == stage and not value.is_constant]
    given = [clip(value.name, 20) for value in values if value.producer == CALLER and not value.is_constant]
    notes = [f"on rank {schedule.placement[stage]}"] if _stays(schedule, stage, stage + 1) and crossing else []
    notes += [f"and {', '.join(given[:3])}{' …' if len(given) > 3 else ''} of the caller"] if given else []
    dash = ' stroke-dasharray="3 3"' if _stays(schedule, stage, stage + 1) else ""
    return _arrow(left, stage + 1, crossing, dash, ", ".join(notes))


def _stays(schedule: Schedule, producer: int, consumer: int) -> bool:
    return schedule.placement[producer] == schedule.placement[consumer]


def _arrow(left: float, to: int, values: list[Value], dash: str, note: str) -> str:
    """Downwards to where stage ``to`` is, or would be; without values only the note is written."""
    x, end = left + 40, _top(to) - 4
    start = end - _GAP + 8
    drawn = ""
    if values:
        drawn = (
            f'<path d="M{px(x)} {start}V{end - 6}" stroke="{_ARROW}" stroke-width="1.6"{dash}/>'
            f'<path d="M{px(x - 5)} {end - 8}h10l-5 9z" fill="{_ARROW}"/>'
        )
    return f'{drawn}<text x="{px(x + 14)}" y="{start + 21}" fill="{_ARROW}">{_said(values, note)}</text>'


def _said(values: list[Value], note: str) -> str:
    """The names, shapes and bytes of values; all of them in the title."""
    if not values:
        return text(note)
    first, more = values[0], f" and {len(values) - 1} more" if len(values) > 1 else ""
    total, back = sum(map(bytes_of, values)), sum(bytes_of(value) for value in values if value.requires_grad)
    name = clip(first.name, 20)
    bold = f'<tspan font-weight="600" fill="{DARK}">{text(name)}</tspan>'
    shape = clip(f"{first.dtype}{list(first.shape)}", 30)
    both = first.producer != CALLER and back and values[0].consumers
    amount = (
        f"{format_bytes(total)}, {'as much' if back == total else format_bytes(back)} back"
        if both
        else format_bytes(total)
    )
    every = f"<title>{text('; '.join(map(str, values)))}</title>"
    said = "  ·  ".join([f"  {shape}{more}", amount]) + (f", {note}" if note else "")
    return f"{every}{bold}{text(clip(said, _SAID - len(name)))}"


def _lanes(manifest: Manifest) -> dict[tuple[int, int], int]:
    """Of each edge that skips stages, its lane at the left, from 0: those that lie beside each other have different
    ones, and short ones are nearer."""
    skipping = sorted((edge for edge in manifest.edges() if edge[1] - edge[0] > 1), key=lambda edge: edge[1] - edge[0])
    found: dict[tuple[int, int], int] = {}
    for start, stop in skipping:
        taken = {lane for (first, last), lane in found.items() if first < stop and start < last}
        found[start, stop] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
    return found


def _skips(manifest: Manifest, lanes: dict[tuple[int, int], int], left: float) -> Iterator[str]:
    """A line around the stages for each edge that skips some, with its bytes."""
    leaving: dict[int, int] = {}
    arriving: dict[int, int] = {}
    for (producer, consumer), lane in lanes.items():
        values = [manifest.values[name] for name in manifest.edge_values(producer, consumer)]
        x = left - 14 - lane * _LANE
        start = _top(producer) + _HEIGHT - 10 - 7 * leaving.get(producer, 0)
        end = _top(consumer) + 10 + 7 * arriving.get(consumer, 0)
        leaving[producer], arriving[consumer] = leaving.get(producer, 0) + 1, arriving.get(consumer, 0) + 1
        names = "; ".join(map(str, values))
        yield f"<g><title>{text(f'stage {producer} to stage {consumer}: {names}')}</title>"
        yield f'<path d="M{px(left)} {start}H{px(x + 8)}q-8 0 -8 8V{end - 8}q0 8 8 8H{px(left - 6)}" fill="none" '
        yield f'stroke="{_ARROW}" stroke-width="1.4"/><path d="M{px(left - 8)} {end - 5}v10l8 -5z" fill="{_ARROW}"/>'
        middle = px((start + end) / 2)
        yield f'<text transform="translate({px(x - 5)} {middle}) rotate(-90)" text-anchor="middle" font-size="10" '
        yield f'fill="{_ARROW}">{text(format_bytes(sum(map(bytes_of, values))))}</text></g>'


def _times(manifest: Manifest, left: float, width: float) -> Iterator[str]:
    """F, I and W of each stage as one bar, all in one scale."""
    times = [dict(zip(_TIMES, stage.cost.times or (0.0, 0.0, 0.0), strict=True)) for stage in manifest.stages]
    longest = max(sum(each.values()) for each in times)
    unit, scale = TimeFormat.of_column([longest]), (width - 80) / longest if longest > 0 else 0.0
    yield f'<text x="{px(left)}" y="18" font-size="13" font-weight="600">time of one microbatch, in {unit.unit}</text>'
    x = left + LETTER * 41
    for kind in _TIMES:
        fill = colour(kind, 0, 1)
        yield f'<rect x="{px(x)}" y="7" width="16" height="14" rx="2" fill="{fill}"/><text x="{px(x + 8)}" y="18" '
        yield f'text-anchor="middle" fill="{ink(fill)}">{kind.value}</text>'
        yield f'<text x="{px(x + 21)}" y="18" fill="{GREY}">{MEANING[kind]}</text>'
        x += 34 + LETTER * len(MEANING[kind])
    for stage, parts in enumerate(times):
        x, y = left, _top(stage) + (_HEIGHT - _BAR) / 2
        for kind, seconds in parts.items():
            fill, said = colour(kind, 0, 1), unit.number(seconds)
            yield f'<rect x="{px(x)}" y="{px(y)}" width="{px(seconds * scale)}" height="{_BAR}" fill="{fill}">'
            yield f"<title>{kind.value} {unit.text(seconds)}</title></rect>"
            if seconds * scale > LETTER * len(said) + 8:
                yield f'<text x="{px(x + seconds * scale / 2)}" y="{px(y + 17)}" text-anchor="middle" '
                yield f'fill="{ink(fill)}" pointer-events="none">{said}</text>'
            x += seconds * scale
        yield f'<text x="{px(x + 8)}" y="{px(y + 17)}" font-weight="600">{unit.text(sum(parts.values()))}</text>'
    end = _top(len(times) - 1) + _HEIGHT + 4
    yield f'<path d="M{px(left)} {_GAP - 8}V{end}" stroke="{LINE}"/>'


def _flops(manifest: Manifest, left: float, width: float) -> Iterator[str]:
    """Without times: the work of each stage's forward, and how to have times."""
    work = [stage.cost.flops or 0 for stage in manifest.stages]
    most = max(work)
    name = "work of one microbatch's forward" if most else "nothing is known of what stages take"
    yield f'<text x="{px(left)}" y="14" font-size="13" font-weight="600">{name}</text>'
    hint = "No times were predicted: pipegraph split … --balance time predicts them."
    yield f'<text x="{px(left)}" y="30" font-size="10.5" fill="{GREY}">{text(hint)}</text>'
    for stage, flops in enumerate(work if most else []):
        long, y = flops / most * (width - 80), _top(stage) + (_HEIGHT - _BAR) / 2
        yield f'<rect x="{px(left)}" y="{px(y)}" width="{px(long)}" height="{_BAR}" fill="{_FLOPS}"/>'
        said = text(format_count(flops, "FLOP"))
        yield f'<text x="{px(left + long + 8)}" y="{px(y + 17)}" font-weight="600">{said}</text>'
