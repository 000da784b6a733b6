"""``pipegraph split MODEL``: split a model into a package of stages."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipegraph.arguments import require_path
from pipegraph.cli.options import (
    AllowDerivativeOption,
    AttentionMaskOption,
    BalanceOption,
    BatchDimOption,
    BatchOption,
    CheckOption,
    DebugOption,
    DeviceOption,
    DryRunOption,
    HardwareOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    NoWeightsOption,
    OverwriteOption,
    PackageOption,
    PlanFileOption,
    PointsOption,
    RanksOption,
    RecomputeOption,
    RelayOption,
    ScheduleOption,
    SequenceOption,
    StagesOption,
    WrittenCheckpointOption,
    check_measured,
    with_batch_dims,
)
from pipegraph.cli.output import print_json, print_text
from pipegraph.cli.progress_bar import hold_back_stderr, progress

if TYPE_CHECKING:
    from pipegraph.codegen.proof import Proof
    from pipegraph.graph.captured import Captured
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.package import Manifest
    from pipegraph.planner.plan import Plan
    from pipegraph.planner.plan_file import PlanFile


def split(
    context: typer.Context,
    model: ModelArgument,
    points: PointsOption = None,
    stages: StagesOption = None,
    plan_file: PlanFileOption = None,
    balance: BalanceOption = None,
    schedule: ScheduleOption = "1f1b",
    microbatches: Annotated[int, typer.Option(metavar="M", min=1, help="Microbatches of a step.")] = 8,
    ranks: RanksOption = None,
    memory: MemoryOption = None,
    hardware: HardwareOption = "cpu",
    device: DeviceOption = "cpu",
    recompute: RecomputeOption = "min-cut",
    out: PackageOption = None,
    checkpoint: WrittenCheckpointOption = None,
    no_weights: NoWeightsOption = False,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    batch_dim: BatchDimOption = None,
    attention_mask: AttentionMaskOption = False,
    allow_derivative: AllowDerivativeOption = False,
    relay_skips: RelayOption = False,
    dry_run: DryRunOption = False,
    check: CheckOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Split a model into stages of Python source.

    It is cut at the given points, or into N stages at the best places. With --stages, the time of a step is predicted;
    with --points, only if --balance, --schedule, --microbatches, --memory, --hardware or --recompute is given. With
    --plan, --memory checks that the plan fits.

    \b
    Example:
      pipegraph split examples/transformer.py --stages 2
    """
    search = {"balance": balance, "schedule": schedule, "microbatches": microbatches, "ranks": ranks}
    search |= {"hardware": hardware, "recompute": recompute, "device": device}
    options = {name: value for name, value in search.items() if _is_given(context, name)}
    _check_cuts(points, stages, plan_file, options)
    if check and (dry_run or overwrite):
        raise typer.BadParameter("it writes nothing.\nTry: leave out --dry-run and --overwrite.", param_hint="--check")
    if checkpoint is not None and no_weights:
        raise typer.BadParameter(
            "--weights writes weights.\nTry: one of the two", param_hint="--weights / --no-weights"
        )
    check_measured(device, balance)
    folder = None if dry_run else require_path(out or Path("build", _default_name(model)), "--out is a folder")
    with progress(f"loading {model}"):
        from pipegraph.codegen.package_writer import require_package, require_writable
        from pipegraph.graph.sources import load
        from pipegraph.package import checkpoint_folder
        from pipegraph.planner.plan_file import PlanFile
        from pipegraph.report.text.package_tables import manifest_dict

        settings = _settings(options)
        file = None if plan_file is None else PlanFile.read(plan_file)
        if file is not None and file.inputs:  # the plan may be for other numbers of rows and tokens than the example's
            rows, *tokens = file.inputs[0].shape or (batch,)
            batch = rows if batch is None else batch
            seq = tokens[0] if seq is None and tokens and model.startswith("hf:") else seq
        if folder is not None:
            require_package(folder) if check else require_writable(folder, overwrite)
        weights = not no_weights if checkpoint is None else checkpoint_folder(checkpoint)
        has_values = weights is True and not (dry_run or check)
        source = load(model, has_values, batch, seq, attention_mask=attention_mask)
        source = with_batch_dims(source, batch_dim)
    begin = perf_counter()
    captured = _captured(source, allow_derivative, debug)
    capture_seconds = perf_counter() - begin
    planned = _planned(captured, source, points, stages, file, memory, settings)
    planned = planned.with_relays() if relay_skips else planned
    if check and folder is not None:
        raise typer.Exit(_check(planned, folder, bool(weights), source, json))
    initial_values = source.initial_values if weights is True else ""
    manifest, proof = _write(planned, folder, weights, overwrite, source)
    if debug:
        _print_plainer(proof)
    if json:
        validation = _validation(proof, capture_seconds)
        written = {"out": None if folder is None else str(folder), "initial_values": initial_values}
        print_json({**written, "validation": validation, **manifest_dict(manifest)})
    else:
        _print(planned, folder, manifest, initial_values)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _check_cuts(points: str | None, stages: int | None, plan_file: Path | None, flags: Mapping[str, Any]) -> None:
    """Raise typer.BadParameter unless just one option says where to cut, and no other contradicts it."""
    if sum(choice is not None for choice in (points, stages, plan_file)) != 1 or points == "":
        raise typer.BadParameter(
            "say where to cut: --points layers.4 (modules that start a stage), or --stages 2, and not both; or --plan "
            "plan.json, which `pipegraph plan` wrote.",
            param_hint="--points / --stages / --plan",
        )
    if plan_file is not None and flags:
        options = ", ".join(f"--{name}" for name in flags)
        raise typer.BadParameter(
            f"a plan is used as it was made.\nTry: leave out {options}; or leave out --plan.", param_hint="--plan"
        )
    if points is not None and flags.get("balance") not in (None, "time", "measured", "auto"):
        raise typer.BadParameter(
            f"{flags['balance']} chooses points, and they were given.\nTry: --stages instead, or --balance time, which "
            "predicts what a step takes with these points.",
            param_hint="--balance",
        )


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a search as arguments of `plan`, checked before anything is loaded."""
    from pipegraph.cost.balance import parse_balance
    from pipegraph.cost.block_times import MeasureOptions
    from pipegraph.cost.hardware import Hardware
    from pipegraph.recompute import AUTO, check_text
    from pipegraph.workflows.schedules import named_schedule

    settings = {name: value for name, value in options.items() if name != "device"}
    readers = {"schedule": named_schedule, "hardware": Hardware.load}
    settings |= {name: read(settings[name]) for name, read in readers.items() if name in options}
    parse_balance(settings.get("balance", "time"))
    check_text(settings.get("recompute", AUTO))
    return {**settings, "setting": MeasureOptions(options.get("device", "cpu"))}


def _captured(source: ModelSource, allow_derivative: bool, debug: bool) -> Captured:
    from pipegraph.graph.capture import capture_source

    with progress(f"capturing {source.name}"), hold_back_stderr(unless=debug):
        return capture_source(source, allow_derivative)


def _planned(
    captured: Captured,
    source: ModelSource,
    points: str | None,
    stages: int | None,
    file: PlanFile | None,
    memory: int | None,
    settings: Mapping[str, Any],
) -> Plan:
    """Cut a captured model."""
    from pipegraph.planner.plan import plan
    from pipegraph.workflows.batch import loss_and_target

    with progress("looking for the best cuts"):
        if file is not None:
            return file.apply(captured, memory)
        return plan(
            captured,
            points=points if points is None or "|" in points else points.split(","),
            stages=stages,
            memory_bytes=memory,
            loss=loss_and_target(source),
            **settings,
        )


def _check(planned: Plan, folder: Path, weights: bool, source: ModelSource, json: bool) -> int:
    """Print what would change in a package, and return the exit code: 1 if anything would."""
    from pipegraph.codegen.package_files import generate
    from pipegraph.codegen.package_writer import compare_package

    generated = generate(planned, weights, source)
    changes = compare_package(folder, generated.files, generated.manifest)
    if json:
        print_json({"out": str(folder), "changes": changes})
    elif changes:
        print("".join(changes.values()), end="")
    else:
        print(f"{folder} is as it would be written")
    return 1 if changes else 0


def _write(
    planned: Plan, folder: Path | None, weights: bool | Path, overwrite: bool, source: ModelSource
) -> tuple[Manifest, Proof]:
    """Write the package, unless it is a dry run, and return its manifest and its proof."""
    from pipegraph.codegen.package_files import generate
    from pipegraph.codegen.package_writer import write_proved_package

    if folder is None:
        generated = generate(planned, bool(weights), source)
        return generated.manifest, generated.proof
    with progress(f"writing {folder}"):
        package, proof = write_proved_package(planned, folder, weights, overwrite, source)
        return package.manifest, proof


def _print_plainer(proof: Proof) -> None:
    """Print the classes that are written in a plainer form, and what their usual form computed otherwise."""
    for reason in proof.reasons:
        print(f"written again: {reason}", file=sys.stderr)
    for name, form in proof.plainer.items():
        print(f"{name} is written {form}", file=sys.stderr)


def _validation(proof: Proof, capture_seconds: float) -> dict[str, Any]:
    """What ``--json`` says of the comparison with the captured graph; times in seconds."""
    return {
        "seconds": round(proof.seconds, 3),
        "capture_seconds": round(capture_seconds, 3),
        "writing_seconds": round(proof.writing_seconds, 3),
        "plainer": proof.plainer,
        "reasons": proof.reasons,
    }


def _print(planned: Plan, folder: Path | None, manifest: Manifest, initial_values: str) -> None:
    from pipegraph.errors import one_line
    from pipegraph.report.text.package_tables import batch_lines
    from pipegraph.report.text.plan_tables import (
        layout_lines,
        ranks_lines,
        render_prediction_summary,
        stage_lines,
    )

    varying = {place for size in planned.captured.other_sizes if size.name in manifest.sizes for place in size.places}
    fixed = [one_line(str(size)) for size in planned.captured.sizes.fixed if size.place not in varying]
    lines = [*stage_lines(planned.describe()), *fixed]
    if planned.captured.device_branch:
        lines.append(one_line(f"The model {planned.captured.device_branch}. The stages do what it does here."))
    lines += batch_lines(manifest)
    lines += layout_lines(planned.layout)
    if planned.prediction is not None:
        lines += [*ranks_lines(planned.prediction), render_prediction_summary(planned.prediction)]
    if initial_values:
        lines.append(one_line(f"initial values: {initial_values}"))
    if folder is not None:
        lines.append(f"wrote {folder}")
    print_text(lambda width: "\n".join(lines))


def _default_name(model: str) -> str:
    """Return ``transformer`` for ``examples/transformer.py``, ``llama`` for ``hf:examples/llama/config.json``."""
    path = Path(model.removeprefix("hf:").rpartition(":")[0] if ".py:" in model else model.removeprefix("hf:"))
    return path.parent.name if path.name == "config.json" else path.stem
