"""A package as a page: the picture, and beside it every figure in tables. It loads nothing from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from pipegraph.errors import one_line
from pipegraph.package import Package
from pipegraph.planner.package_prediction import memory_by_kind
from pipegraph.report.pictures.package_svg import package_svg
from pipegraph.report.text.package_tables import boundary_cells, explanation, model_title, stage_cells
from pipegraph.report.text.tables import clip, is_number
from pipegraph.schedule import Schedule, to_csv
from pipegraph.units import format_bytes

Table = tuple[list[str], list[list[str]]]


def package_page(package: Package, schedule: Schedule) -> str:
    """The text of an HTML file."""
    manifest = package.manifest
    template = files("pipegraph.report.pages").joinpath("package.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["number"] = is_number
    drawn = package_svg(package, schedule)
    page: str = environment.from_string(template).render(
        title=one_line(model_title(manifest)),
        svg=drawn,
        tables={
            "Stages": stage_cells(package),
            "What crosses between them": boundary_cells(manifest),
            "Memory of each rank": _memory(package, schedule),
        },
        reasons=explanation(manifest),
        tied=[" = ".join(map(clip, group)) for group in manifest.tied],
        edited=package.edited(),
        orders=to_csv(schedule).splitlines(),
        generator=one_line(manifest.generator),
    )
    return page


def _memory(package: Package, schedule: Schedule) -> Table:
    ranks = memory_by_kind(package.manifest, schedule)
    rows = [[str(rank.rank), *map(format_bytes, rank.by_kind().values()), format_bytes(rank.total)] for rank in ranks]
    return ["rank", *(ranks[0].by_kind() if ranks else ()), "together"], rows
