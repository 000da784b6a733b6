"""``pipegraph plan MODEL``: which schedule, how many stages and microbatches, and where to cut."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.options import (
    AllowDerivativeOption,
    BatchOption,
    DebugOption,
    DeviceOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    SequenceOption,
    check_device,
    parse_names,
    parse_numbers,
)
from pipegraph.cli.output import check_target, print_grid, print_json, write_target
from pipegraph.cli.progress_bar import hold_back_stderr, progress


def plan(
    model: ModelArgument,
    ranks: Annotated[int, typer.Option(metavar="N", min=1, show_default=False, help="Ranks that hold the stages.")],
    memory: MemoryOption = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", show_default=False, help="Schedules to compare. [default: all of them]"),
    ] = None,
    microbatches: Annotated[
        str | None,
        typer.Option(metavar="M,…", show_default=False, help="Microbatches of a step. [default: 2 and 4 a rank]"),
    ] = None,
    stages_per_rank: Annotated[
        str | None,
        typer.Option(metavar="V,…", show_default=False, help="Stages on a rank. [default: 1 or 2, 4 if these are few]"),
    ] = None,
    recompute: Annotated[str, typer.Option(metavar="R,…", help="What a backward computes again.")] = (
        "none,min-cut,block"
    ),
    balance: Annotated[str, typer.Option(metavar="time|measured", help="Where times are from.")] = "time",
    device: DeviceOption = "cpu",
    hardware: HardwareOption = "cpu",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", show_default=False, help="Write the best plan, for split --plan."),
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    allow_derivative: AllowDerivativeOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE even if it is no plan.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare plans for so many ranks by predicted time and memory, and explain the best. Nothing but -o is written."""
    if balance not in ("time", "measured"):
        raise typer.BadParameter(
            f"{balance!r} is neither time nor measured; split takes the others.", param_hint="--balance"
        )
    names = None if schedule is None else parse_names(schedule, "--schedule")
    counts = None if microbatches is None else parse_numbers(microbatches, "--microbatches")
    chunks = None if stages_per_rank is None else parse_numbers(stages_per_rank, "--stages-per-rank")
    check_device(device)
    with progress(f"loading {model}"):
        from pipegraph.cost.block_times import MeasureOptions
        from pipegraph.cost.hardware import Hardware
        from pipegraph.graph.capture import capture_source
        from pipegraph.graph.sources import load
        from pipegraph.planner.comparison import candidates, compare_model
        from pipegraph.planner.plan import plan_of
        from pipegraph.planner.plan_file import PlanFile, is_plan
        from pipegraph.planner.plan_options import PlanOptions
        from pipegraph.report.text.plan_tables import plan_comparison_dict, render_plan, render_plan_comparison
        from pipegraph.workflows.batch import loss_and_target

        check_target(out, overwrite, ours=is_plan)
        plans = candidates(ranks, names, counts, chunks, parse_names(recompute, "--recompute"))
        profile = Hardware.load(hardware)
        source = load(model, weights=False, batch=batch, seq=seq)
        options = PlanOptions(
            balance,
            ranks=ranks,
            memory_bytes=memory,
            hardware=profile,
            loss=loss_and_target(source),
            setting=MeasureOptions(device),
        )
    with progress(f"capturing {source.name}"), hold_back_stderr(unless=debug):
        captured = capture_source(source, allow_derivative)
    with progress("comparing plans"):
        comparison = compare_model(captured, options, ranks, plans)
        best = plan_of(comparison.best)
    if json:
        print_json(plan_comparison_dict(comparison, best))
    else:
        print(f"{render_plan_comparison(comparison)}\n")
        print_grid(lambda width, coloured: render_plan(best, coloured))
    write_target(out, PlanFile.of(best).to_json())
    if out is not None and not json:
        print(f"wrote {out}")
