"""``pipegraph plan MODEL``: which schedule, how many stages and microbatches, and where to cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipegraph.cli.options import (
    AllowDerivativeOption,
    AttentionMaskOption,
    BatchDimOption,
    BatchOption,
    DebugOption,
    DeviceOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    SequenceOption,
    WideOption,
    check_measured,
    parse_names,
    parse_numbers,
    with_batch_dims,
)
from pipegraph.cli.output import check_target, print_drawing, print_json, print_text, write_target
from pipegraph.cli.progress_bar import hold_back_stderr, progress

if TYPE_CHECKING:
    from pipegraph.cost.model_output import LossOf
    from pipegraph.graph.captured import Captured
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.planner.plan_options import PlanOptions


def plan(
    model: ModelArgument,
    ranks: Annotated[
        int | None, typer.Option(metavar="N", min=1, show_default=False, help="Ranks that hold the stages.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="In place of --ranks: devices to divide into pp × dp_replicate × dp_shard × tp.",
        ),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option(metavar="ROWS", min=1, show_default=False, help="With --devices: rows of a step, of all devices."),
    ] = None,
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
    recompute: Annotated[
        list[str] | None,
        typer.Option(
            metavar="R",
            show_default=False,
            help="What a backward computes again, as for split; several to compare: none,block, or --recompute once "
            "more. [default: none,min-cut,block]",
        ),
    ] = None,
    balance: Annotated[str, typer.Option(metavar="time|measured|auto", help="Where times are from.")] = "time",
    device: DeviceOption = "cpu",
    hardware: HardwareOption = "cpu",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", show_default=False, help="Write the best plan, for split --plan."),
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    batch_dim: BatchDimOption = None,
    attention_mask: AttentionMaskOption = False,
    allow_derivative: AllowDerivativeOption = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace FILE even if it is not a plan.")] = False,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Compare plans by predicted time and memory.

    Schedules, numbers of stages and microbatches, recompute and cuts are compared for a number of ranks, and the best
    plan is explained. With --devices and --global-batch the mesh, the rows of a microbatch and the recompute of each
    stage are chosen too. Only -o writes a file.

    \b
    Example:
      pipegraph plan examples/transformer.py --ranks 2
    """
    _check_what_is_planned(ranks, devices, global_batch)
    if devices is not None:
        _check_not_chosen(
            {"--microbatches": microbatches, "--stages-per-rank": stages_per_rank, "--recompute": recompute}
        )
    if balance not in ("time", "measured", "auto"):
        raise typer.BadParameter(
            f"{balance!r} is not time, measured or auto.\nTry: one of them; split takes the others.",
            param_hint="--balance",
        )
    names = None if schedule is None else parse_names(schedule, "--schedule")
    counts = None if microbatches is None else parse_numbers(microbatches, "--microbatches")
    chunks = None if stages_per_rank is None else parse_numbers(stages_per_rank, "--stages-per-rank")
    check_measured(device, balance)
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

        check_target(out, overwrite, is_replaceable=is_plan)
        plans = (
            ()
            if ranks is None
            else candidates(ranks, names, counts, chunks, _choices(recompute or ["none,min-cut,block"]))
        )
        profile = Hardware.load(hardware)
        source = with_batch_dims(load(model, False, batch, seq, attention_mask=attention_mask), batch_dim)
        options = PlanOptions(
            balance,
            ranks=ranks,
            memory_bytes=memory,
            hardware=profile,
            loss=loss_and_target(source),
            setting=MeasureOptions(device),
        )
    if devices is not None and global_batch is not None:
        _plan_cluster(source, options, devices, global_batch, names, allow_derivative, out, json, wide, debug)
        return
    assert ranks is not None
    with progress(f"capturing {source.name}"), hold_back_stderr(unless=debug):
        captured = capture_source(source, allow_derivative)
    with progress("comparing plans"):
        comparison = compare_model(captured, options, ranks, plans)
        best = plan_of(comparison.best)
    if json:
        print_json(plan_comparison_dict(comparison, best))
    else:
        print_text(lambda width: f"{render_plan_comparison(comparison, width)}\n", wide)
        print_drawing(lambda width, coloured: render_plan(best, width, coloured), wide)
    write_target(out, PlanFile.from_plan(best).to_json())
    if out is not None and not json:
        print(f"wrote {out}")


def _plan_cluster(
    source: ModelSource,
    options: PlanOptions,
    devices: int,
    global_batch: int,
    schedules: list[str] | None,
    allow_derivative: bool,
    out: Path | None,
    json: bool,
    wide: bool,
    debug: bool,
) -> None:
    """Choose the mesh as well, and print the plans worth a choice."""
    from torch import Tensor

    from pipegraph.graph.capture import capture_rows
    from pipegraph.graph.sources.huggingface import tp_plan_of
    from pipegraph.planner.joint_plan.search import joint_plan
    from pipegraph.planner.plan_file import PlanFile
    from pipegraph.report.text.plan_tables import joint_comparison_dict, render_joint_comparison, render_plan
    from pipegraph.schedule.recipes import compared_names
    from pipegraph.torch_private.pytrees import pytree
    from pipegraph.workflows.batch import loss_and_target

    inputs = [leaf for leaf in pytree.tree_leaves((source.args, source.kwargs)) if isinstance(leaf, Tensor)]
    shape = inputs[0].shape if inputs and inputs[0].dim() else (1,)
    tokens = shape[1] if len(shape) == 2 and not inputs[0].is_floating_point() else None

    def captured_rows(rows: int) -> tuple[Captured, tuple[LossOf, Any] | None]:
        return capture_rows(source, rows, allow_derivative), loss_and_target(replace(source, batch=rows))

    with progress("comparing plans"), hold_back_stderr(unless=debug):
        comparison, best = joint_plan(
            captured_rows,
            source.batch or shape[0],
            options,
            devices,
            global_batch,
            schedules or compared_names(),
            source.tp_plan or tp_plan_of(source.model),
        )
    if json:
        print_json({"plan": PlanFile.from_plan(best).to_dict(), **joint_comparison_dict(comparison)})
    else:
        of_row = source.seq or tokens
        print_text(lambda width: f"{render_joint_comparison(comparison, global_batch, devices, of_row, width)}\n", wide)
        print_drawing(lambda width, coloured: render_plan(best, width, coloured), wide)
    write_target(out, PlanFile.from_plan(best).to_json())
    if out is not None and not json:
        print(f"wrote {out}")


def _check_not_chosen(options: Mapping[str, object]) -> None:
    """Raise typer.BadParameter if something was given that a plan for a cluster chooses itself."""
    for option, value in options.items():
        if value is not None:
            raise typer.BadParameter(
                "a plan for --devices chooses this itself.\nTry: without it; or --ranks, for plans of one pipeline",
                param_hint=option,
            )


def _check_what_is_planned(ranks: int | None, devices: int | None, global_batch: int | None) -> None:
    """Raise typer.BadParameter unless either ranks are given, or devices and the rows of a step."""
    if ranks is not None and (devices is not None or global_batch is not None):
        flag = "--devices" if devices is not None else "--global-batch"
        raise typer.BadParameter(
            f"--ranks plans one pipeline, and {flag} a cluster.\nTry: --ranks alone, or --devices with --global-batch",
            param_hint=f"--ranks / {flag}",
        )
    if devices is not None and global_batch is None:
        raise typer.BadParameter(
            f"the rows of a step are missing: what {devices} devices do best depends on how many rows they share.\n"
            f"Try: --devices {devices} --global-batch {devices * 8}",
            param_hint="--global-batch",
        )
    if global_batch is not None and devices is None:
        raise typer.BadParameter(
            f"the devices that share these rows are missing.\nTry: --devices 8 --global-batch {global_batch}",
            param_hint="--devices",
        )
    if ranks is None and devices is None:
        raise typer.BadParameter(
            "say what to plan for.\nTry: --ranks 4, or --devices 8 --global-batch 64", param_hint="--ranks / --devices"
        )


def _choices(texts: Iterable[str]) -> list[str]:
    """Return what is compared. Commas part choices of one word each; in a text with rules, or with a choice for each
    stage, they are its own."""
    return [
        choice for text in texts for choice in ([text] if set("=;|") & set(text) else parse_names(text, "--recompute"))
    ]
