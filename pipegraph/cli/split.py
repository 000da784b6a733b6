"""``pipegraph split MODEL``: a model becomes a package of stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipegraph.cli.devices import check_device
from pipegraph.cli.options import (
    BatchOption,
    DebugOption,
    DeviceOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ScheduleOption,
    SequenceOption,
)
from pipegraph.cli.output import print_json
from pipegraph.cli.progress import held_back, progress

_OF_A_SEARCH = ("balance", "schedule", "microbatches", "ranks", "hardware", "recompute", "device")


def split(
    context: typer.Context,
    model: ModelArgument,
    points: Annotated[
        str | None,
        typer.Option(
            metavar="FQN,…",
            show_default=False,
            help="Modules that start a stage, in the model's order; layers.3:end starts one behind layers.3.",
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, show_default=False, help="Cut into N stages, where that is best."),
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", show_default=False, help="Cut where `pipegraph plan -o FILE` says."),
    ] = None,
    balance: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT",
            show_default=False,
            help="With --stages, what to balance: time, measured (here), flops, parameters, memory, uniform (equally "
            "many segments), type:REGEX (layers of a class). [default: time]",
        ),
    ] = None,
    schedule: ScheduleOption = "1f1b",
    microbatches: Annotated[int, typer.Option(metavar="M", min=1, help="Microbatches of a step.")] = 8,
    ranks: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Ranks, for schedules with any number of stages on a rank. [default: as the schedule has it]",
        ),
    ] = None,
    memory: MemoryOption = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            show_default=False,
            help="Profile that prices the model: h100, …, or what calibrate wrote. [default: cpu]",
        ),
    ] = None,
    device: DeviceOption = "cpu",
    recompute: Annotated[str, typer.Option(metavar="R", help="none, min-cut or block, as it will run.")] = "min-cut",
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="OUT", show_default=False, help="Folder to write. [default: build/NAME]"),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            "--weights",
            metavar="DIR",
            show_default=False,
            help="Write the weights of this Hugging Face checkpoint, one stage at a time. [default: the model's own]",
        ),
    ] = None,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="Write no weights: `pipegraph run --weights DIR` reads a checkpoint's.")
    ] = False,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the stages and write nothing.")] = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing; a diff and exit code 1 where OUT would change."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a package that pipegraph wrote.")] = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Split a model at the given points, or into so many stages, and write the stages as Python source.

    What a step takes is predicted with --stages; with --points, if --balance, --schedule, --microbatches, --memory,
    --hardware or --recompute is given. With --plan, --memory checks that the plan fits.
    """
    if sum(each is not None for each in (points, stages, plan_file)) != 1 or points == "":
        raise typer.BadParameter(
            "say where to cut: --points layers.4 (modules that start a stage), or --stages 2, and not both; or --plan "
            "plan.json, which `pipegraph plan` wrote.",
            param_hint="--points / --stages / --plan",
        )
    if check and (dry_run or overwrite):
        raise typer.BadParameter("it writes nothing: leave out --dry-run and --overwrite.", param_hint="--check")
    sources = {name: context.get_parameter_source(name) for name in _OF_A_SEARCH}
    given = [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if plan_file is not None and given:
        options = ", ".join(f"--{name}" for name in given)
        raise typer.BadParameter(
            f"a plan stays as it was made: leave out {options}; or leave out --plan.", param_hint="--plan"
        )
    if checkpoint is not None and no_weights:
        raise typer.BadParameter("say one of both: --weights writes weights.", param_hint="--weights / --no-weights")
    check_device(device)
    if points is not None and balance not in (None, "time", "measured"):
        raise typer.BadParameter(
            f"{balance} chooses points, and they were given: give --stages instead, or --balance time, which tells "
            "what a step takes with these points.",
            param_hint="--balance",
        )
    with progress(f"loading {model}"):
        from pipegraph.codegen.check import check_package
        from pipegraph.codegen.generate import generate
        from pipegraph.codegen.package_writer import write_package
        from pipegraph.cost.hardware import Hardware
        from pipegraph.cost.measure import Setting
        from pipegraph.graph.capture import capture
        from pipegraph.graph.source import load
        from pipegraph.package import checkpoint_folder
        from pipegraph.planner.arguments import check_balance, check_recompute
        from pipegraph.planner.plan import plan
        from pipegraph.planner.plan_file import PlanFile
        from pipegraph.report.overview import manifest_dict
        from pipegraph.report.plan import summary
        from pipegraph.report.schedules import named_schedule
        from pipegraph.report.steps import loss_and_target
        from pipegraph.report.tables import one_line

        check_balance(balance or "time")
        check_recompute(recompute)
        profile = None if hardware is None else Hardware.load(hardware)
        order, file = named_schedule(schedule), None if plan_file is None else PlanFile.read(plan_file)
        weights = not no_weights if checkpoint is None else checkpoint_folder(checkpoint)
        source = load(model, weights=weights is True and not (dry_run or check), batch=batch, seq=seq)
    with progress(f"capturing {source.name}"), held_back(unless=debug):
        captured = capture(source.model, source.args, source.kwargs)
    with progress("looking for the best cuts") as say:
        if file is not None:
            planned = file.apply(captured, memory)
        else:
            planned = plan(
                captured,
                points=None if points is None else points.split(","),
                stages=stages,
                balance=balance,
                schedule=order if "schedule" in given else None,
                microbatches=microbatches if "microbatches" in given else None,
                ranks=ranks,
                memory_bytes=memory,
                hardware=profile,
                recompute=recompute if "recompute" in given else None,
                loss=loss_and_target(source),
                setting=Setting(device),
                progress=say,
            )
    folder = None if dry_run else out or Path("build", _stem(model))
    if check and folder is not None:
        changes = check_package(folder, *generate(planned, bool(weights), source))
        if json:
            print_json({"out": str(folder), "changes": changes})
        elif changes:
            print("".join(changes.values()), end="")
        else:
            print(f"{folder} is as it would be written")
        raise typer.Exit(1 if changes else 0)
    if folder is None:
        _, manifest = generate(planned, bool(weights), source)
    else:
        with progress(f"writing {folder}"):
            manifest = write_package(planned, folder, weights, overwrite, source).manifest
    if json:
        print_json({"out": None if folder is None else str(folder), **manifest_dict(manifest)})
        return
    print("\n".join(map(one_line, planned.describe())))
    if planned.prediction is not None:
        print(summary(planned.prediction))
    if folder is not None:
        print(f"wrote {folder}")


def _stem(model: str) -> str:
    """``transformer`` for ``examples/transformer.py``, ``llama`` for ``hf:examples/llama/config.json``."""
    path = Path(model.removeprefix("hf:").rpartition(":")[0] if ".py:" in model else model.removeprefix("hf:"))
    return path.parent.name if path.name == "config.json" else path.stem
