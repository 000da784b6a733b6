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
    WideOption,
)
from pipegraph.cli.output import print_drawing, print_json, write_drawings
from pipegraph.cli.progress_bar import print_warning, progress


def show(
    out: PackageArgument,
    schedule: PlannedScheduleOption = None,
    microbatches: MicrobatchesOption = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write a page, for any browser.")
    ] = None,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Write a picture of it.")] = None,
    check_weights: CheckWeightsOption = True,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a package, its costs and its schedule.

    The stages, the values that cross between them, the reasons for the cuts, and the schedule over time. A package that
    has lost files, or whose weights have changed since they were written, is shown too, and ends in an error.

    \b
    Example:
      pipegraph show build/transformer --html page.html
    """
    from pipegraph.errors import PackageError
    from pipegraph.package import Package
    from pipegraph.report.text.package_tables import package_dict, render_package
    from pipegraph.workflows.schedules import choose_schedule

    package = Package.open(out)
    for file in (html, svg):
        if file is not None and file.resolve().is_relative_to(package.path):
            raise PackageError(
                f"{file} lies in the package, where a later split would refuse to replace it.", "another folder."
            )
    chosen = choose_schedule(package, schedule, microbatches)
    with progress("checking weights"):
        damaged = package.damaged() if check_weights else ()
    if html is not None or svg is not None:
        from pipegraph.report.package_page import package_page
        from pipegraph.report.package_picture import package_picture

        files = [] if html is None else [(html, ".html", package_page(package, chosen))]
        if svg is not None:
            picture = package_picture(package, chosen)
            files.append((svg, ".svg", picture.package))
            if picture.timeline is not None:
                timeline_svg = svg.with_name(f"{svg.stem}_timeline{svg.suffix}")
                files.append((timeline_svg, ".svg", picture.timeline))
                print_warning(f"note: the schedule is too wide for {svg}, and has a separate picture: {timeline_svg}")
        write_drawings(files)
    if json:
        print_json(package_dict(package, chosen, damaged))
    else:
        print_drawing(lambda width, coloured: render_package(package, chosen, width, coloured, damaged), wide)
    package.check_whole(damaged)
