"""``pipegraph schedule NAME``: a schedule alone: drawn, checked, simulated, and written to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from pipegraph.cli.options import Command
from pipegraph.cli.output import print_drawing, print_json, write_drawings
from pipegraph.cli.progress_bar import progress


@dataclass(frozen=True, kw_only=True)
class ScheduleCommand(Command):
    """Draw, check and simulate a schedule.

    It is drawn over time, with its bubble, its memory, and how far it is from the best possible.

    \b
    Example:
      pipegraph schedule zb-v --ranks 4 --microbatches 8
    """

    name: str
    ranks: int | None = None
    microbatches: int | None = None
    chunks: int | None = None
    times: Path | None = None
    memory_limit: int | None = None
    placement: str | None = None
    effort: float | None = None
    join: bool = False
    sharded: bool = False
    resident: int | None = None
    svg: Path | None = None
    csv: Path | None = None
    wide: bool = False

    def run(self) -> None:
        from pipegraph.schedule import PLACEMENTS, read_times, to_csv
        from pipegraph.schedule.lower_bound import SimulatedSchedule

        if self.placement is not None and self.placement not in PLACEMENTS:
            raise typer.BadParameter(
                f"{self.placement!r} is neither {' nor '.join(PLACEMENTS)}.", param_hint="--placement"
            )
        is_search = self.name.casefold() == "search"
        if self.effort is not None and not is_search:
            raise typer.BadParameter(
                f"it belongs to search, and {self.name} needs none.\nTry: leave it out.", param_hint="--effort"
            )
        with progress("searching" if is_search else f"making {self.name}"):
            from pipegraph.report.text.schedule_report import render_schedule, simulated_schedule_dict
            from pipegraph.report.timeline_picture import schedule_svg
            from pipegraph.workflows.schedules import ScheduleRequest, unit_times

            times = None if self.times is None else read_times(self.times)
            schedule = ScheduleRequest(
                name=self.name,
                ranks=self.ranks,
                microbatches=self.microbatches,
                chunks=self.chunks,
                placement=self.placement,
                times=times,
                memory_limit=self.memory_limit,
                effort=1.0 if self.effort is None else self.effort,
                join=self.join and not is_search,
                sharded=self.sharded,
                resident=self.resident,
            ).schedule()
            simulated = SimulatedSchedule(
                schedule, times or unit_times(schedule.stages), self.memory_limit, in_seconds=times is not None
            )
            files = [] if self.svg is None else [(self.svg, ".svg", schedule_svg(simulated))]
            files += [] if self.csv is None else [(self.csv, ".csv", to_csv(schedule))]
            write_drawings(files)
        if self.json:
            print_json(simulated_schedule_dict(simulated))
            return
        print_drawing(lambda width, coloured: render_schedule(simulated, width, coloured), self.wide)
