"""``pipegraph show OUT``: what a package holds."""

from __future__ import annotations

from pipegraph.cli.options import DebugOption, JsonOption, MicrobatchesOption, PackageArgument, PlannedScheduleOption
from pipegraph.cli.output import print_grid, print_json


def show(
    out: PackageArgument,
    schedule: PlannedScheduleOption = None,
    microbatches: MicrobatchesOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Show a package: its stages, boundaries and costs, and the schedule's grid."""
    from pipegraph.package import Package
    from pipegraph.report.overview import overview, overview_dict
    from pipegraph.report.schedules import choose_schedule

    package = Package.open(out)
    chosen = choose_schedule(package, schedule, microbatches)
    if json:
        print_json(overview_dict(package, chosen))
    else:
        print_grid(lambda width, coloured: overview(package, chosen, width, coloured))
