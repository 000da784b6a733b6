"""``pipegraph run OUT``: training steps on a package, in one process per rank or all in one."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from msgspec import structs

from pipegraph.cli.options import (
    BatchOption,
    CheckpointOption,
    CheckWeightsOption,
    DebugOption,
    ExampleOption,
    JsonOption,
    KernelsOption,
    LearningRateOption,
    LinksOption,
    MeshOrderOption,
    MicrobatchesOption,
    PackageArgument,
    PlannedScheduleOption,
    ProcessesOption,
    ProfileOption,
    RecalibrateOption,
    ReplicateOption,
    RunDeviceOption,
    SequenceOption,
    ShardOption,
    StepsOption,
    StrictOption,
    TensorOption,
    TimeoutOption,
    check_device,
)
from pipegraph.cli.output import check_target, json_text, write_target
from pipegraph.cli.progress_bar import progress

if TYPE_CHECKING:
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.package import Package
    from pipegraph.runtime.processes.progress_relay import PrintLine
    from pipegraph.runtime.processes.rank_grid import RankGrid
    from pipegraph.schedule import Schedule
    from pipegraph.workflows.train import Training

_STEPS = 1
_PROFILED_STEPS = 4


def run(
    context: typer.Context,
    out: PackageArgument,
    nproc: ProcessesOption = None,
    dp_replicate: ReplicateOption = 1,
    dp_shard: ShardOption = 1,
    tp: TensorOption = 1,
    mesh_order: MeshOrderOption = "pp,dp_replicate,dp_shard,tp",
    schedule: PlannedScheduleOption = None,
    microbatches: MicrobatchesOption = None,
    steps: StepsOption = None,
    profile: ProfileOption = None,
    model: ExampleOption = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    weights: CheckpointOption = None,
    check_weights: CheckWeightsOption = True,
    learning_rate: LearningRateOption = 1e-3,
    kernels: KernelsOption = "inductor",
    strict: StrictOption = False,
    device: RunDeviceOption = "cpu",
    timeout: TimeoutOption = None,
    hardware: LinksOption = None,
    recalibrate: RecalibrateOption = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train on one batch with AdamW; print each step's loss and time, and predicted and measured figures.

    A package that was planned runs its plan: its schedule, microbatches and ranks, unless options say otherwise.
    It starts its own processes, unless torchrun has: torchrun --nproc-per-node N -m pipegraph run OUT
    """
    if steps is None:
        steps = _STEPS if profile is None else _PROFILED_STEPS
    if model is None and (batch is not None or seq is not None):
        raise typer.BadParameter(
            "they belong to --model; without it the package's own sizes are used.", param_hint="--batch / --seq"
        )
    lengths = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    if recalibrate is not None:
        _check_recalibrate(steps, kernels)
    if profile is not None:
        _check_profile(steps)
    from pipegraph.runtime.processes.launch import exit_with_parent, is_launched, record_failure

    if timeout is not None:
        from pipegraph.runtime.processes.group import check_timeout

        check_timeout(timeout)
    try:
        exit_with_parent()
        if profile is not None:
            _prepare_profile(profile)
        package, chosen, grid = _choose(
            out, nproc, schedule, microbatches, weights, device, lengths, mesh_order.split(",")
        )
        processes = grid.size
        links = _links(package, hardware, recalibrate)
        if processes > 1 and not is_launched():
            _launch(context, processes, debug)
            return
        # The rank that knows the loss prints, and shows progress.
        quiet = is_launched() and int(os.environ["RANK"]) != grid.first(chosen.placement[-1])
        source = _source(model, batch, seq)
        with progress("loading", quiet) as say:
            from pipegraph.workflows.train import Training

            training = Training(
                package, chosen, source, device, learning_rate, kernels, timeout, weights, check_weights, strict, grid
            )
            _train(training, package, chosen, steps, links, recalibrate, profile, json, say)
    except (Exception, KeyboardInterrupt) as error:
        record_failure(error)
        raise


def _choose(
    out: Path,
    nproc: int | None,
    schedule: str | None,
    microbatches: int | None,
    weights: Path | None,
    device: str,
    lengths: Mapping[str, int],
    order: Sequence[str],
) -> tuple[Package, Schedule, RankGrid]:
    """Return the package, its schedule, and the processes that run it. Raises PipegraphError if these do not fit."""
    from pipegraph.package import Package, checkpoint_folder
    from pipegraph.runtime.processes.launch import check_processes, is_launched, pipeline_ranks
    from pipegraph.runtime.processes.rank_grid import grid_of
    from pipegraph.workflows.schedules import choose_schedule

    package = Package.open(out)
    if weights is not None:
        checkpoint_folder(weights)
    launched = is_launched()
    asked = pipeline_ranks(int(os.environ["WORLD_SIZE"]) if launched else nproc, lengths, launched)
    chosen = choose_schedule(package, schedule, microbatches, ranks=asked if launched or asked != 1 else None)
    ranks = asked or chosen.ranks
    grid = grid_of(ranks, lengths, order)
    check_processes(chosen, ranks, launched, grid.size // ranks)
    check_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", grid.size)), "processes")
    return package, chosen, grid


def _links(package: Package, hardware: str | None, recalibrate: Path | None) -> Hardware | None:
    """Return the profile that a step is predicted with, if it is not the plan's own."""
    from pipegraph.cost.hardware import Hardware
    from pipegraph.workflows.recalibrate import profile_for

    links = None if hardware is None else Hardware.load(hardware)
    if recalibrate is None:
        return links
    check_target(recalibrate, overwrite=True)
    return profile_for(package, recalibrate, links)


def _launch(context: typer.Context, processes: int, debug: bool) -> None:
    """Run the same command in a process for each rank."""
    from pipegraph.runtime.processes.launch import launch
    from pipegraph.runtime.processes.progress_relay import relay_progress

    options = {name: value for name, value in context.params.items() if name not in ("out", "nproc")}
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    given = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        for name, value in options.items()
        if isinstance(value, bool) and value != defaults[name]
    ]
    given += [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None and not isinstance(value, bool)
    ]
    with progress(f"starting {processes} processes") as say, relay_progress(say) as environment:
        # -P: without the working folder on sys.path, as for the command that started this process.
        arguments = ["-P", "-m", "pipegraph", "run", str(context.params["out"]), *given]
        launch(arguments, processes, debug, environment, [str(Path(file).parent) for file in environment.values()])


def _source(model: str | None, batch: int | None, seq: int | None) -> ModelSource | None:
    if model is None:
        return None
    from pipegraph.graph.sources import load

    return load(model, weights=False, batch=batch, seq=seq)


def _check_recalibrate(steps: int, kernels: str) -> None:
    if kernels != "inductor":
        raise typer.BadParameter(
            f"a profile predicts compiled kernels, and {kernels} kernels cannot correct it. Leave --kernels out.",
            param_hint="--recalibrate",
        )
    if steps < 2:
        raise typer.BadParameter(
            "times are measured from the second step on, because the first one compiles. Try --steps 5.",
            param_hint="--recalibrate",
        )


def _check_profile(steps: int) -> None:
    if steps < 2:
        raise typer.BadParameter(
            f"{steps} step is too few: the first one warms up and is not recorded. Try --steps {_PROFILED_STEPS}.",
            param_hint="--profile",
        )


def _prepare_profile(folder: Path) -> None:
    """Raise PipegraphError, before anything takes time, if nothing could be recorded in the folder."""
    from pipegraph.tracing.recording.run_folder import check_run_parent

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences what the profiler prints on stderr
    check_run_parent(folder)


def _train(
    training: Training,
    package: Package,
    schedule: Schedule,
    steps: int,
    hardware: Hardware | None,
    recalibrate: Path | None,
    profile: Path | None,
    json: bool,
    say: PrintLine,
) -> None:
    """Run this process's stages; the process that holds the last one prints."""
    from pipegraph.planner.run_comparison import compare_run
    from pipegraph.report.text.predicted_vs_measured import render_run_comparison, run_comparison_dict
    from pipegraph.workflows.recalibrate import find_uneven_ratios, format_ratios, recalibrate_hardware

    taken = []
    with training.profiled(profile, steps, hardware) if profile is not None else nullcontext() as recorded:
        for step in training.steps(steps):
            taken.append(dataclasses.asdict(step))
            if not json:
                say(str(step))
    measured = training.measured()
    kernels, is_compiled = training.kernels()
    if not training.knows_loss:
        return
    compared = compare_run(package.manifest, schedule, measured, hardware)
    result: dict[str, Any] = {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "steps": taken,
        "predicted_and_measured": run_comparison_dict(compared),
        "kernels": kernels,
    }
    if not json:
        say(f"\n{render_run_comparison(compared)}")
        if not is_compiled:
            say("\n".join(["\nNot all is compiled:", *(f"  {line}" for line in kernels)]))
    if recalibrate is not None and hardware is not None:
        corrected = recalibrate_hardware(hardware, package.manifest, compared)
        write_target(recalibrate, corrected.to_json())
        result["recalibrated"] = {
            "file": str(recalibrate),
            "measured_ratio": structs.asdict(corrected.measured_ratio),
            "uneven": list(find_uneven_ratios(compared)),
        }
        if not json:
            say("\n".join([f"wrote {recalibrate}: {format_ratios(corrected)}", *find_uneven_ratios(compared)]))
    if recorded is not None:
        result["profile"] = str(recorded)
        if not json:
            say(f"\n{_profile_hint(recorded)}")
    if json:
        say(json_text(result))


def _profile_hint(recorded: Path) -> str:
    """Return where the run was recorded, and the commands that show it."""
    folder = shlex.quote(str(recorded.parent))
    return (
        f"wrote {recorded}: a trace for each rank. To see it:\n"
        f"  tensorboard --logdir {folder}\n"
        f"  pipegraph trace report {folder}"
    )
