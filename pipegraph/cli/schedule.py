"""``pipegraph schedule NAME``: a schedule alone: drawn, checked, simulated, and written to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import DebugOption, JsonOption, WideOption, complete_schedule
from pipegraph.cli.output import print_drawing, print_json, write_drawings
from pipegraph.cli.progress_bar import progress

NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=complete_schedule,
        show_default=False,
        help="1f1b, zb-v, …; a CSV file; or search, which looks for the fastest order.",
    ),
]


def schedule(
    name: NameArgument,
    ranks: Annotated[
        int | None, typer.Option(metavar="P", min=1, show_default=False, help="Ranks that hold the stages.")
    ] = None,
    microbatches: Annotated[
        int | None, typer.Option(metavar="M", min=1, show_default=False, help="Microbatches of a step.")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(metavar="V", min=1, show_default=False, help="Stages of a rank. [default: the schedule's own]"),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help='JSON with seconds per stage: {"forward": […], "input_grad": […], "weight_grad": […], "hop": 0.0}. '
            "[default: F, I and W take 1 each]",
        ),
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Saved activations that a rank may hold, each of one stage and microbatch.",
        ),
    ] = None,
    placement: Annotated[
        str | None,
        typer.Option(metavar="loop|v", show_default=False, help="Where search places the stages. [default: loop]"),
    ] = None,
    effort: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            show_default=False,
            help="Scales how long search looks: 1 is some ten seconds. [default: 1]",
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join-backwards", help="One B for I and W if nothing waits for that. search does so by itself."),
    ] = False,
    sharded: Annotated[
        bool, typer.Option("--sharded", help="All stages are sharded: draw where their parameters are gathered.")
    ] = False,
    resident: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="How many sharded stages of a rank may be whole at a time. [default: all]",
        ),
    ] = None,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write a picture of it over time.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", show_default=False, help="Write its actions, as torch reads them.")
    ] = None,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Draw, check and simulate a schedule.

    It is drawn over time, with its bubble, its memory, and how far it is from the best possible.

    \b
    Example:
      pipegraph schedule zb-v --ranks 4 --microbatches 8
    """
    from pipegraph.schedule import PLACEMENTS, read_times, to_csv
    from pipegraph.schedule.lower_bound import SimulatedSchedule

    if placement is not None and placement not in PLACEMENTS:
        raise typer.BadParameter(f"{placement!r} is neither {' nor '.join(PLACEMENTS)}.", param_hint="--placement")
    is_search = name.casefold() == "search"
    if effort is not None and not is_search:
        raise typer.BadParameter(
            f"it belongs to search, and {name} needs none.\nTry: leave it out.", param_hint="--effort"
        )
    with progress("searching" if is_search else f"making {name}"):
        from pipegraph.report.text.schedule_report import render_schedule, simulated_schedule_dict
        from pipegraph.report.timeline_picture import schedule_svg
        from pipegraph.workflows.schedules import make_schedule, unit_times

        stage_times = None if times is None else read_times(times)
        chosen = make_schedule(
            name,
            ranks,
            microbatches,
            chunks,
            placement,
            stage_times,
            memory_limit,
            1.0 if effort is None else effort,
            sharded,
            resident,
            join and not is_search,
        )
        simulated = SimulatedSchedule(
            chosen, stage_times or unit_times(chosen.stages), memory_limit, in_seconds=stage_times is not None
        )
        files = [] if svg is None else [(svg, ".svg", schedule_svg(simulated))]
        files += [] if csv is None else [(csv, ".csv", to_csv(chosen))]
        write_drawings(files)
    if json:
        print_json(simulated_schedule_dict(simulated))
        return
    print_drawing(lambda width, coloured: render_schedule(simulated, width, coloured), wide)
