"""A package as one HTML page that loads nothing: the picture, and every figure in tables."""

from __future__ import annotations

from pipegraph.errors import one_line
from pipegraph.package import Package
from pipegraph.planner.step_prediction import memory_by_kind
from pipegraph.report.pages import templates
from pipegraph.report.pictures.package_picture import package_svg
from pipegraph.report.text import Table
from pipegraph.report.text.package_tables import (
    boundary_table,
    explain_cuts,
    package_title,
    stage_table,
    tied_groups,
)
from pipegraph.schedule import Schedule, to_csv
from pipegraph.units import format_bytes


def package_page(package: Package, schedule: Schedule) -> str:
    """Return the text of an HTML file."""
    manifest = package.manifest
    return templates().get_template("package.html.jinja").render(
        title=package_title(manifest),
        svg=package_svg(package, schedule),
        tables={
            "Stages": stage_table(package),
            "What crosses between them": boundary_table(manifest),
            "Memory of each rank": _memory(package, schedule),
        },
        reasons=explain_cuts(manifest),
        tied=tied_groups(manifest),
        edited=package.edited(),
        orders=to_csv(schedule).splitlines(),
        generator=one_line(manifest.generator),
    )  # fmt: skip


def _memory(package: Package, schedule: Schedule) -> Table:
    ranks = memory_by_kind(package.manifest, schedule)
    rows = [[str(rank.rank), *map(format_bytes, rank.by_kind().values()), format_bytes(rank.total)] for rank in ranks]
    return ["rank", *(ranks[0].by_kind() if ranks else ()), "together"], rows
