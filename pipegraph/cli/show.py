"""``pipegraph show OUT``: what a package holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipegraph.cli.options import Command
from pipegraph.cli.output import print_drawing, print_json, write_drawings
from pipegraph.cli.progress_bar import print_warning, progress


@dataclass(frozen=True, kw_only=True)
class ShowCommand(Command):
    """Show a package, its costs and its schedule.

    The stages, the values that cross between them, the reasons for the cuts, and the schedule over time. A package that
    has lost files, or whose weights have changed since they were written, is shown too, and ends in an error.

    \b
    Example:
      pipegraph show build/transformer --html page.html
    """

    out: Path
    schedule: str | None = None
    microbatches: int | None = None
    html: Path | None = None
    svg: Path | None = None
    check_weights: bool = True
    verbose: bool = False
    wide: bool = False

    def run(self) -> None:
        from pipegraph.errors import PackageError
        from pipegraph.package import Package
        from pipegraph.report.text.package_tables import package_dict, render_package
        from pipegraph.workflows.schedules import choose_schedule

        package = Package.open(self.out)
        for file in (self.html, self.svg):
            if file is not None and file.resolve().is_relative_to(package.path):
                raise PackageError(
                    f"{file} lies in the package, where a later split would refuse to replace it.", "another folder."
                )
        schedule = choose_schedule(package, self.schedule, self.microbatches)
        with progress("checking weights"):
            damaged = package.damaged() if self.check_weights else ()
        if self.html is not None or self.svg is not None:
            from pipegraph.report.html_pages import package_page
            from pipegraph.report.package_picture import package_picture

            files = [] if self.html is None else [(self.html, ".html", package_page(package, schedule))]
            if self.svg is not None:
                picture = package_picture(package, schedule)
                files.append((self.svg, ".svg", picture.package))
                if picture.timeline is not None:
                    timeline = self.svg.with_name(f"{self.svg.stem}_timeline{self.svg.suffix}")
                    files.append((timeline, ".svg", picture.timeline))
                    print_warning(
                        f"note: the schedule is too wide for {self.svg}, and has a separate picture: {timeline}"
                    )
            write_drawings(files)
        if self.json:
            print_json(package_dict(package, schedule, damaged))
        else:
            print_drawing(
                lambda width, coloured: render_package(package, schedule, width, coloured, damaged, self.verbose),
                self.wide,
            )
        package.check_whole(damaged)
