"""``pipegraph run OUT``: training steps on a package, in one process per rank or all in one."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
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
    JsonOption,
    MicrobatchesOption,
    PackageArgument,
    PlannedScheduleOption,
    SequenceOption,
    WideOption,
    check_device,
)
from pipegraph.cli.output import check_target, json_text, terminal_width, write_target
from pipegraph.cli.progress_bar import progress
from pipegraph.cli.run_options import (
    PROFILED_STEPS,
    STEPS,
    CheckpointEveryOption,
    CudaGraphsOption,
    ExampleOption,
    KeepOption,
    KernelsOption,
    LearningRateOption,
    LinksOption,
    MeshOrderOption,
    PrecisionOption,
    ProcessesOption,
    ProfileOption,
    RecalibrateOption,
    ReplicateOption,
    RunDeviceOption,
    RunFolderOption,
    SeedOption,
    ShardOption,
    StepsOption,
    StrictOption,
    TensorOption,
    TimeoutOption,
    check_checkpoint,
    check_profile,
    check_recalibrate,
    check_training,
)

if TYPE_CHECKING:
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.package import Package
    from pipegraph.runtime.processes.launch import PrintLine
    from pipegraph.runtime.processes.rank_grid import RankGrid
    from pipegraph.schedule import Schedule
    from pipegraph.workflows.train import Training

# ---- run again -------------------------------------------------------------------------------------------------------
# The processes of ``pipegraph run``: the same command again, once for each rank.


def launch_again(context: typer.Context, processes: int, debug: bool, grace: float, timeout: float | None) -> None:
    """Run the same command in a process for each rank."""
    from pipegraph.runtime.processes.group import TIMEOUT
    from pipegraph.runtime.processes.launch import launch, relay_progress

    options = {name: value for name, value in context.params.items() if name not in ("out", "nproc")}
    defaults = {parameter.name: parameter.default for parameter in context.command.params}
    flags = [
        f"--{'' if value else 'no-'}{name.replace('_', '-')}"
        for name, value in options.items()
        if isinstance(value, bool) and value != defaults[name]
    ]
    flags += [
        f"--{name.replace('_', '-')}={value}"
        for name, value in options.items()
        if value is not None and not isinstance(value, bool)
    ]
    with progress(f"starting {processes} processes") as say, relay_progress(say) as environment:
        # -P: without the working folder on sys.path, as for the command that started this process.
        arguments = ["-P", "-m", "pipegraph", "run", str(context.params["out"]), *flags]
        folders = [str(Path(file).parent) for file in environment.values()]
        launch(arguments, processes, debug, environment, folders, grace, TIMEOUT if timeout is None else timeout)


# ---- run -------------------------------------------------------------------------------------------------------------


_SAVE_SECONDS = 600.0  # for a run to end a step and save it when a signal ends it


def run(
    context: typer.Context,
    out: PackageArgument,
    nproc: ProcessesOption = None,
    dp_replicate: ReplicateOption = None,
    dp_shard: ShardOption = None,
    tp: TensorOption = None,
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
    checkpoint: RunFolderOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep: KeepOption = None,
    learning_rate: LearningRateOption = None,
    kernels: KernelsOption = "inductor",
    precision: PrecisionOption = None,
    seed: SeedOption = None,
    strict: StrictOption = False,
    cuda_graphs: CudaGraphsOption = False,
    device: RunDeviceOption = "cpu",
    timeout: TimeoutOption = None,
    hardware: LinksOption = None,
    recalibrate: RecalibrateOption = None,
    wide: WideOption = False,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train a package, and measure the steps.

    It trains on the data of a model file, or on one batch. Each step is printed with its loss and time, then predicted
    next to measured figures. A package that was planned runs its plan, unless options say otherwise: its schedule,
    microbatches, rows, ranks and mesh. It starts its own processes, unless torchrun has.

    \b
    Example:
      pipegraph run build/transformer --schedule zb-h1 --steps 5
      torchrun --nproc-per-node 2 -m pipegraph run build/transformer
    """
    if model is None and (batch is not None or seq is not None):
        raise typer.BadParameter(
            "they belong to --model; without it the package's own sizes are used.\nTry: --model too",
            param_hint="--batch / --seq",
        )
    dimensions = {"dp_replicate": dp_replicate, "dp_shard": dp_shard, "tp": tp}
    lengths = {name: length for name, length in dimensions.items() if length is not None}
    check_training(learning_rate, kernels, precision, model, cuda_graphs, device)
    if recalibrate is not None:
        check_recalibrate(STEPS if steps is None and model is None else steps, kernels)
    if profile is not None:
        check_profile(steps)
    check_checkpoint(checkpoint, checkpoint_every, keep)
    from pipegraph.runtime.processes import launched_rank

    if timeout is not None:
        from pipegraph.runtime.processes.group import check_timeout

        check_timeout(timeout)
    try:
        launched_rank.exit_with_parent()
        if profile is not None:
            _prepare_profile(profile)
        package, chosen, grid = _choose(
            out, nproc, schedule, microbatches, weights, device, lengths, mesh_order.split(",")
        )
        links = _links(package, hardware, recalibrate, precision)
        if grid.size > 1 and not launched_rank.is_launched():
            launch_again(context, grid.size, debug, 0.0 if checkpoint is None else _SAVE_SECONDS, timeout)
            return
        # The rank that knows the loss prints, and shows progress.
        quiet = launched_rank.is_launched() and launched_rank.environment_ranks()[0] != grid.first(chosen.placement[-1])
        source = _source(model, batch, seq, package)
        with progress("loading", quiet) as say:
            launched_rank.use_scratch_folder()
            from pipegraph.workflows.run_checkpoints import CheckpointOptions, Termination
            from pipegraph.workflows.train import Training

            saves = None if checkpoint is None else CheckpointOptions(checkpoint, checkpoint_every or 100, keep or 3)
            training = Training(
                package,
                chosen,
                source,
                device=device,
                learning_rate=learning_rate,
                kernels=kernels,
                timeout=timeout,
                weights=weights,
                check_weights=check_weights,
                strict=strict,
                cuda_graphs=cuda_graphs,
                grid=grid,
                checkpoints=saves,
                seed=seed,
                precision=precision,
            )
            if steps is None and not training.has_data:
                steps = STEPS if profile is None else PROFILED_STEPS
            width = terminal_width(sys.stdout, wide)
            _train(training, package, chosen, steps, links, recalibrate, profile, json, say, width)
        if training.was_terminated:
            sys.exit(Termination.exit_code)
    except (Exception, KeyboardInterrupt) as error:
        launched_rank.record_failure(error)
        launched_rank.stop_own_children()
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
    from pipegraph.runtime.processes.launch import check_processes, pipeline_ranks
    from pipegraph.runtime.processes.launched_rank import environment_ranks, is_launched
    from pipegraph.runtime.processes.rank_grid import TENSOR, grid_of
    from pipegraph.runtime.tensor_parallel import require_plan
    from pipegraph.workflows.schedules import choose_schedule

    package = Package.open(out)
    plan = package.manifest.prediction
    planned = {} if plan is None else plan.mesh
    lengths = {**planned, **lengths}
    if weights is not None:
        checkpoint_folder(weights)
    launched = is_launched()
    processes = environment_ranks()[1] if launched else nproc

    def usual_ranks() -> int:
        return choose_schedule(package, schedule, microbatches).ranks

    rank_count = pipeline_ranks(processes, lengths, usual_ranks, launched, planned)
    chosen = choose_schedule(package, schedule, microbatches, ranks=rank_count if launched or rank_count != 1 else None)
    ranks = rank_count or chosen.ranks
    grid = grid_of(ranks, lengths, order)
    require_plan(package.manifest.tp_plan, grid.length(TENSOR))
    check_processes(chosen, ranks, launched, grid.size // ranks)
    check_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", grid.size)), "processes")
    return package, chosen, grid


def _links(package: Package, hardware: str | None, recalibrate: Path | None, precision: str | None) -> Hardware | None:
    """Return the profile that a step is predicted with, if it is not the plan's own."""
    from pipegraph.cost.hardware import Hardware
    from pipegraph.workflows.recalibrate import profile_for

    links = None if hardware is None else Hardware.load(hardware)
    if recalibrate is None:
        return links
    check_target(recalibrate, overwrite=True, option="--recalibrate")
    return profile_for(package, recalibrate, links, precision)


def _source(model: str | None, batch: int | None, seq: int | None, package: Package) -> ModelSource | None:
    if model is None:
        return None
    from pipegraph.graph.sources import load
    from pipegraph.workflows.batch import planned_rows

    has_mask = "attention_mask" in package.manifest.kwargs
    return load(model, False, batch or planned_rows(package.manifest), seq, attention_mask=has_mask)


def _prepare_profile(folder: Path) -> None:
    """Raise PipegraphError, before anything takes time, if nothing could be recorded in the folder."""
    from pipegraph.tracing.recording.run_folder import check_run_parent

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences what the profiler prints on stderr
    check_run_parent(folder)


def _train(
    training: Training,
    package: Package,
    schedule: Schedule,
    steps: int | None,
    hardware: Hardware | None,
    recalibrate: Path | None,
    profile: Path | None,
    json: bool,
    say: PrintLine,
    width: int | None,
) -> None:
    """Run this process's stages; the process that holds the last one prints. ``steps`` are those of the whole run."""
    from pipegraph.planner.run_comparison import compare_run
    from pipegraph.report.text import wrap
    from pipegraph.report.text.predicted_vs_measured import render_run_comparison, run_comparison_dict
    from pipegraph.workflows.recalibrate import find_uneven_ratios, format_ratios, recalibrate_hardware

    begun, records = training.done, []
    shows = training.knows_loss and not json
    if training.resumed_from is not None and shows:
        say(f"continues from {training.resumed_from}")
    count = None if steps is None else max(steps - begun, 0)
    profiled = nullcontext() if profile is None or count == 0 else training.profiled(profile, count, hardware)
    with profiled as recorded:
        for step in training.steps(count):
            records.append(dataclasses.asdict(step))
            if shows:
                say(str(step))
    if training.was_terminated and shows:
        say(f"SIGTERM came: saved after {training.done} steps. The same command continues.")
    if training.done == begun:
        if training.knows_loss:
            say(json_text({"steps": records}) if json else f"{begun} steps are done, and no more are to do.")
        return
    measured = training.measured()
    kernels, is_compiled = training.kernels()
    if not training.knows_loss:
        return
    compared = compare_run(package.manifest, training.schedule, measured, hardware, training.mesh)
    result: dict[str, Any] = {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "steps": records,
        "predicted_and_measured": run_comparison_dict(compared),
        "kernels": kernels,
    }
    if not json:
        say(f"\n{wrap(render_run_comparison(compared, width), width)}")
        if not is_compiled:
            say(wrap("\n".join(["\nNot all is compiled:", *(f"  {line}" for line in kernels)]), width))
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
        f"wrote {recorded}\na trace for each rank; to see it:\n"
        f"  tensorboard --logdir {folder}\n"
        f"  pipegraph trace report {folder}"
    )
