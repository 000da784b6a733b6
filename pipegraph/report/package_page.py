"""A package as an HTML page that loads nothing: a card for each stage, what crosses, memory, the schedule over time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipegraph.errors import one_line
from pipegraph.package import CALLER, Manifest, Package, StageEntry, Value
from pipegraph.planner.step_prediction import memory_by_kind
from pipegraph.report.colours import MEMORY, colour, ink
from pipegraph.report.html_pages import critical_places, schedule_data, templates, timeline_data, timeline_parts
from pipegraph.report.package_picture import EQUAL_TIMES, SAME_RANK, simulated_package, stage_sizes
from pipegraph.report.text import Table, short_modules
from pipegraph.report.text.package_tables import (
    boundary_table,
    bytes_of,
    explain_cuts,
    has_times,
    held_modules,
    package_title,
    stage_table,
    tied_groups,
)
from pipegraph.report.text.schedule_report import schedule_title
from pipegraph.schedule import Kind, Schedule, to_csv
from pipegraph.schedule.lower_bound import SimulatedSchedule
from pipegraph.units import TimeFormat, format_bytes, format_number_of, format_percent

_MOST = 60_000  # actions on a page; a longer schedule is left out
_MOST_OPEN = 16  # stages and sentences of a list that is open at first


def package_page(package: Package, schedule: Schedule) -> str:
    """Return the text of an HTML file."""
    manifest, simulated = package.manifest, simulated_package(package.manifest, schedule)
    return templates().get_template("package.html.jinja").render(
        title=package_title(manifest),
        subtitle=schedule_title(schedule),
        figures=_figures(manifest, simulated),
        cards=list(_cards(manifest.at_capture(), schedule)),
        kinds=[
            {"name": kind.value, "colour": colour(kind), "ink": ink(colour(kind))} for kind in (Kind.F, Kind.I, Kind.W)
        ],
        most_open=_MOST_OPEN,
        memory=_memory(manifest, schedule),
        memory_kinds=[{"name": name, "colour": fill} for name, fill in MEMORY.items()],
        drawn=sum(map(len, schedule.actions)) <= _MOST,
        note="" if simulated.in_seconds else EQUAL_TIMES,
        alternative=f"Timeline of {schedule_title(schedule)}, simulated. Arrow keys go from action to action.",
        tables={
            "Stages": stage_table(package),
            "What crosses between them": boundary_table(manifest),
            "Memory of each rank": _memory_table(manifest, schedule),
        },
        reasons=explain_cuts(manifest),
        tied=tied_groups(manifest),
        edited=[one_line(name) for name in package.edited()],
        orders=to_csv(schedule).splitlines(),
        generator=one_line(manifest.generator),
        **timeline_parts(_data(simulated)),
    )  # fmt: skip


def _figures(manifest: Manifest, simulated: SimulatedSchedule) -> list[dict[str, str]]:
    timeline, unit = simulated.timeline, simulated.time_format
    in_seconds = simulated.in_seconds
    figures = [
        ("stages", str(len(manifest.stages)), f"on {format_number_of('rank', simulated.schedule.ranks)}"),
        ("a step, simulated", unit.text(timeline.makespan), "predicted" if in_seconds else "F, I and W take 1 each"),
        ("bubble", format_percent(timeline.bubble), "idle, the mean over ranks"),
        ("saved activations", str(max(timeline.peak_activations)), "on the rank with the most"),
    ]
    return [dict(zip(("name", "value", "aside"), figure, strict=True)) for figure in figures]


def _cards(manifest: Manifest, schedule: Schedule) -> Iterator[dict[str, Any]]:
    """Yield the stages, each with what the caller gives it and what it sends."""
    is_timed = has_times(manifest)
    totals = [sum(stage.cost.times or (0.0, 0.0, 0.0)) for stage in manifest.stages]
    unit, longest = TimeFormat.of_column(totals), max(totals, default=0.0) or 1.0
    for stage, total in zip(manifest.stages, totals, strict=True):
        times = zip((Kind.F, Kind.I, Kind.W), stage.cost.times or (0.0, 0.0, 0.0), strict=True)
        yield {
            "index": stage.index,
            "rank": schedule.placement[stage.index],
            "holds": one_line(short_modules(held_modules(manifest, stage.index)) or stage.class_name),
            "sizes": stage_sizes(stage),
            "total": unit.text(total) if is_timed else "",
            "bars": [
                {
                    "kind": kind.value,
                    "width": round(100 * seconds / longest, 2),
                    "colour": colour(kind),
                    "ink": ink(colour(kind)),
                    "title": f"{kind.value}: {unit.text(seconds)}",
                }
                for kind, seconds in times
                if is_timed and seconds
            ],
            "takes": [_described(value) for value in _of_caller(manifest, stage)],
            "sends": list(_sends(manifest, schedule, stage)),
        }


def _of_caller(manifest: Manifest, stage: StageEntry) -> list[Value]:
    values = [manifest.values[name] for name in stage.inputs]
    return [value for value in values if value.producer == CALLER and not value.is_constant]


def _sends(manifest: Manifest, schedule: Schedule, stage: StageEntry) -> Iterator[dict[str, str]]:
    """Yield a line for each stage that reads something of this one."""
    for producer, consumer in sorted(manifest.edges()):
        if producer != stage.index:
            continue
        values = [manifest.values[name] for name in manifest.edge_values(producer, consumer)]
        back = sum(bytes_of(value) for value in values if value.requires_grad)
        place, consumer_rank = schedule.placement[producer], schedule.placement[consumer]
        yield {
            "to": f"stage {consumer}",
            "way": SAME_RANK if place == consumer_rank else f"rank {place} to rank {consumer_rank}",
            "what": "; ".join(map(_described, values)),
            "amount": format_bytes(sum(map(bytes_of, values))) + (f", {format_bytes(back)} back" if back else ""),
        }
    if stage.index == len(manifest.stages) - 1:
        outputs = "; ".join(_described(manifest.values[name]) for name in stage.outputs)
        yield {"to": "the caller", "way": "the model's output", "what": outputs, "amount": ""}


def _described(value: Value) -> str:
    return one_line(str(value))


def _memory(manifest: Manifest, schedule: Schedule) -> list[dict[str, Any]]:
    ranks = memory_by_kind(manifest, schedule)
    most = max((rank.total for rank in ranks), default=0) or 1
    return [
        {
            "rank": rank.rank,
            "total": format_bytes(rank.total),
            "parts": [
                {
                    "width": round(100 * (size or 0) / most, 2),
                    "colour": MEMORY[kind],
                    "title": f"{kind}: {format_bytes(size)}",
                }
                for kind, size in rank.by_kind().items()
            ],
        }
        for rank in ranks
    ]


def _memory_table(manifest: Manifest, schedule: Schedule) -> Table:
    ranks = memory_by_kind(manifest, schedule)
    rows = [[str(rank.rank), *map(format_bytes, rank.by_kind().values()), format_bytes(rank.total)] for rank in ranks]
    return ["rank", *(ranks[0].by_kind() if ranks else ()), "together"], rows


def _data(simulated: SimulatedSchedule) -> dict[str, Any]:
    """Return the data of ``timeline_view.js``: one step, which is simulated."""
    timeline = simulated.timeline
    step = {"number": 0, "complete": True, "messages": [], "critical": critical_places(timeline.events, timeline)}
    return {
        **schedule_data(simulated.schedule),
        "simulated": True,
        "unitless": not simulated.in_seconds,
        "shown": 0,
        "steps": [{**step, **timeline_data(timeline)}],
        "below": [],
    }
