"""``pipegraph run OUT``: training steps on a package, in one process per rank or all in one."""

from __future__ import annotations

import dataclasses
import os
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipegraph.cli.devices import check_device
from pipegraph.cli.options import (
    BatchOption,
    CheckpointOption,
    DebugOption,
    JsonOption,
    MicrobatchesOption,
    PackageArgument,
    PlannedScheduleOption,
    SequenceOption,
)
from pipegraph.cli.output import check_target, json_text, write_target
from pipegraph.cli.progress import progress

if TYPE_CHECKING:
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.model_source import ModelSource
    from pipegraph.package import Package
    from pipegraph.report.training import Training
    from pipegraph.runtime.relay import Say
    from pipegraph.schedule import Schedule

_STEPS = 1
_PROFILED_STEPS = 4


def run(
    out: PackageArgument,
    nproc: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Processes to start; 1 runs every stage in this one. [default: the ranks of the schedule]",
        ),
    ] = None,
    schedule: PlannedScheduleOption = None,
    microbatches: MicrobatchesOption = None,
    steps: Annotated[
        int | None,
        typer.Option(
            metavar="K",
            min=1,
            show_default=False,
            help="Steps to run; times are measured from the second one on. [default: 1; with --profile 4]",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=False,
            help="Record every step but the first, which warms up, in a new folder in DIR: a trace for each rank.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            show_default=False,
            help="Take example_inputs, example_target and loss_fn from here. [default: seeded inputs, mean square]",
        ),
    ] = None,
    batch: BatchOption = None,
    seq: SequenceOption = None,
    weights: CheckpointOption = None,
    learning_rate: Annotated[
        float, typer.Option(metavar="LR", min=0.0, help="AdamW's learning rate; 0 leaves the weights as they are.")
    ] = 1e-3,
    kernels: Annotated[
        str, typer.Option(metavar="NAME", help="inductor (compiled), eager (divided, uncompiled) or autograd.")
    ] = "inductor",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to run; with cuda, a GPU per rank.")] = "cpu",
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            show_default=False,
            help="How long a rank waits for another one before the run fails; longer than a step. [default: 1800]",
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            show_default=False,
            help="Profile whose links a step is predicted with; stages keep the package's times. [default: the one "
            "that priced the package]",
        ),
    ] = None,
    recalibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Write here the profile that priced the package, corrected by what was measured: a new file, or that "
            "profile's own.",
        ),
    ] = None,
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Train on one batch with AdamW; print each step's loss and time, and what was predicted beside what it took.

    A package that was planned runs its plan: its schedule, microbatches and ranks, where options say nothing else.
    Starts its own processes, unless torchrun has: torchrun --nproc-per-node N -m pipegraph run OUT
    """
    if model is None and (batch is not None or seq is not None):
        raise typer.BadParameter(
            "they belong to --model hf:…; without it the package's own sizes hold.", param_hint="--batch / --seq"
        )
    if steps is None:
        steps = _STEPS if profile is None else _PROFILED_STEPS
    if recalibrate is not None:
        _check_recalibrate(steps, kernels)
    if profile is not None and steps < 2:
        raise typer.BadParameter(
            f"{steps} step is too few: the first one warms up and is not recorded. Try --steps {_PROFILED_STEPS}.",
            param_hint="--profile",
        )
    from pipegraph.cost.hardware import Hardware
    from pipegraph.package import Package, checkpoint_folder
    from pipegraph.report.recalibrate import profile_for
    from pipegraph.report.schedules import choose_schedule
    from pipegraph.runtime.launch import check_processes, exit_with_parent, is_launched, launch, record_failure
    from pipegraph.runtime.relay import relayed
    from pipegraph.tracing.run_folder import check_parent

    try:
        exit_with_parent()
        if profile is not None:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else the profiler says on stderr that it starts and stops
            check_parent(profile)
        package = Package.open(out)
        if weights is not None:
            checkpoint_folder(weights)
        launched = is_launched()
        asked = int(os.environ["WORLD_SIZE"]) if launched else nproc
        chosen = choose_schedule(package, schedule, microbatches, ranks=asked if launched or asked != 1 else None)
        processes = asked or chosen.ranks
        check_processes(chosen, processes, launched)
        check_device(device, int(os.environ.get("LOCAL_WORLD_SIZE", processes)), "processes")
        links = None if hardware is None else Hardware.load(hardware)
        if recalibrate is not None:
            check_target(recalibrate, overwrite=True)
            links = profile_for(package, recalibrate, links)
        if processes == 1 or launched:
            source = _source(model, batch, seq)
            # The rank that knows the loss prints, and tells how far it is.
            quiet = launched and int(os.environ["RANK"]) != chosen.placement[-1]
            with progress("loading", quiet) as say:
                from pipegraph.report.training import Training

                training = Training(package, chosen, source, device, learning_rate, kernels, timeout, weights)
                _run_here(training, package, chosen, steps, links, recalibrate, profile, json, say)
            return
        options: dict[str, object] = {
            "schedule": schedule,
            "microbatches": microbatches,
            "steps": steps,
            "device": device,
            "kernels": kernels,
            "timeout": timeout,
            "hardware": hardware,
            "recalibrate": recalibrate,
            "profile": profile,
        }
        options |= {"model": model, "batch": batch, "seq": seq, "learning-rate": learning_rate, "weights": weights}
        given = [f"--{name}={value}" for name, value in options.items() if value is not None]
        flags = [flag for flag, is_set in (("--json", json), ("--debug", debug)) if is_set]
        with progress(f"starting {processes} processes") as say, relayed(say):
            launch(["-m", "pipegraph", "run", str(out), *given, *flags], processes, debug)
    except Exception as error:
        record_failure(error)
        raise


def _source(model: str | None, batch: int | None, seq: int | None) -> ModelSource | None:
    if model is None:
        return None
    from pipegraph.graph.source import load

    return load(model, weights=False, batch=batch, seq=seq)


def _check_recalibrate(steps: int, kernels: str) -> None:
    if kernels != "inductor":
        raise typer.BadParameter(
            f"a profile predicts compiled kernels, which those of {kernels} do not correct. Leave --kernels out.",
            param_hint="--recalibrate",
        )
    if steps < 2:
        raise typer.BadParameter(
            "times are measured from the second step on, as the first one compiles. Try --steps 5.",
            param_hint="--recalibrate",
        )


def _run_here(
    training: Training,
    package: Package,
    schedule: Schedule,
    steps: int,
    hardware: Hardware | None,
    recalibrate: Path | None,
    profile: Path | None,
    json: bool,
    say: Say,
) -> None:
    """Run this process's stages; the process that holds the last one prints."""
    from pipegraph.report.beside import beside, beside_dict, told
    from pipegraph.report.recalibrate import ratios, recalibrated, uneven

    taken = []
    with training.profiled(profile, steps) if profile is not None else nullcontext() as recorded:
        for step in training.steps(steps):
            taken.append(dataclasses.asdict(step))
            if not json:
                say(str(step))
    measured = training.measured()
    if not training.tells:
        return
    compared = beside(package.manifest, schedule, measured, hardware)
    result: dict[str, Any] = {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "microbatches": schedule.microbatches,
        "steps": taken,
        "predicted_and_measured": beside_dict(compared),
    }
    if not json:
        say(f"\n{told(compared)}")
    if recalibrate is not None and hardware is not None:
        corrected = recalibrated(hardware, package.manifest, compared)
        write_target(recalibrate, corrected.to_json())
        result["recalibrated"] = {
            "file": str(recalibrate),
            "measured_ratio": dataclasses.asdict(corrected.measured_ratio),
            "uneven": list(uneven(compared)),
        }
        if not json:
            say("\n".join([f"wrote {recalibrate}: {ratios(corrected)}", *uneven(compared)]))
    if recorded is not None:
        result["profile"] = str(recorded)
        if not json:
            say(f"\n{_look(recorded)}")
    if json:
        say(json_text(result))


def _look(recorded: Path) -> str:
    """What was recorded, and what to type next."""
    folder = shlex.quote(str(recorded.parent))
    return (
        f"wrote {recorded}: a trace for each rank. Look at it:\n"
        f"  tensorboard --logdir {folder}\n"
        f"  pipegraph trace report {folder}"
    )
