"""``pipegraph show OUT``: what a package holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import (
    CheckWeightsOption,
    DebugOption,
    JsonOption,
    MicrobatchesOption,
    PackageArgument,
    PlannedScheduleOption,
)
from pipegraph.cli.output import print_grid, print_json, write_files
from pipegraph.cli.progress_bar import progress


def show(
    out: PackageArgument,
    schedule: PlannedScheduleOption = None,
    microbatches: MicrobatchesOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write a page: the picture, and tables.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Write a picture of it.")] = None,
    check_weights: CheckWeightsOption = True,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a package: its stages, boundaries and costs, and the schedule's grid."""
    from pipegraph.package import Package
    from pipegraph.report.text.package_tables import package_dict, render_package
    from pipegraph.workflows.schedules import choose_schedule

    package = Package.open(out)
    chosen = choose_schedule(package, schedule, microbatches)
    with progress("checking weights"):
        damaged = package.damaged() if check_weights else ()
    if html is not None or svg is not None:
        from pipegraph.report.html_pages import package_page
        from pipegraph.report.package_picture import package_svg

        drawn = ((html, package_page), (svg, package_svg))
        write_files([(file, draw(package, chosen)) for file, draw in drawn if file is not None])
    if json:
        print_json(package_dict(package, chosen, damaged))
    else:
        print_grid(lambda width, coloured: render_package(package, chosen, width, coloured, damaged))
