"""``pipegraph run OUT``: training steps on a package, in one process per rank or all in one."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from msgspec import structs

from pipegraph.cli.options import Command, check_device, opened_weights
from pipegraph.cli.output import check_target, json_text, terminal_width, write_target
from pipegraph.cli.progress_bar import progress

if TYPE_CHECKING:
    from pipegraph.cost.hardware import Hardware
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.package import Package
    from pipegraph.runtime.processes.launch import PrintLine
    from pipegraph.runtime.processes.rank_grid import RankGrid
    from pipegraph.schedule import Schedule
    from pipegraph.workflows.train import Training

_STEPS: Final = 1
_PROFILED_STEPS: Final = 4
"""Steps without --steps and without data: of a plain run, and of one with --profile."""
_LARGEST_RATE: Final = 3.4e38  # of a float32, in which an optimizer computes
_SAVE_SECONDS: Final = 600.0  # for a run to end a step and save it when a signal ends it


@dataclass(frozen=True, kw_only=True)
class RunCommand(Command):
    """Train a package, and measure the steps.

    It trains on the data of a model file, or on one batch. Each step is printed with its loss and time, then predicted
    next to measured figures. A package that was planned runs its plan, unless options say otherwise: its schedule,
    microbatches, rows, ranks and mesh. It starts its own processes, unless torchrun has.

    \b
    Example:
      pipegraph run build/transformer --schedule zb-h1 --steps 5
      torchrun --nproc-per-node 2 -m pipegraph run build/transformer
    """

    usual = (
        "model",
        "schedule",
        "microbatches",
        "nproc",
        "steps",
        "checkpoint",
        "profile",
        "precision",
        "kernels",
        "device",
    )

    out: Path
    nproc: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    mesh_order: str = "pp,dp_replicate,dp_shard,tp"
    schedule: str | None = None
    microbatches: int | None = None
    steps: int | None = None
    profile: Path | None = None
    model: str | None = None
    batch: int | None = None
    seq: int | None = None
    weights: Path | None = None
    rename: list[str] | None = None
    rows: list[str] | None = None
    check_weights: bool = True
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    keep: int | None = None
    learning_rate: float | None = None
    kernels: str = "inductor"
    precision: str | None = None
    seed: int | None = None
    strict: bool = False
    cuda_graphs: bool = False
    dynamic: str = "auto"
    device: str = "cpu"
    timeout: float | None = None
    hardware: str | None = None
    recalibrate: Path | None = None
    wide: bool = False

    def run(self) -> None:
        self._check()
        from pipegraph.runtime.processes import launched_rank

        try:
            launched_rank.exit_with_parent()
            if self.profile is not None:
                _prepare_profile(self.profile)
            package, schedule, grid = self._choose()
            hardware = self._links(package)
            if grid.size > 1 and not launched_rank.is_launched():
                self._launch(grid.size)
                return
            # The rank that knows the loss prints, and shows progress.
            quiet = launched_rank.is_launched() and launched_rank.environment_ranks()[0] != grid.first(
                schedule.placement[-1]
            )
            source = self._source(package)
            with progress("loading", quiet) as say:
                launched_rank.use_scratch_folder()
                from pipegraph.workflows.run_checkpoints import Termination

                training = self._training(package, schedule, source, grid)
                self._train(training, package, schedule, hardware, say)
            if training.was_terminated:
                sys.exit(Termination.exit_code)
        except (Exception, KeyboardInterrupt) as error:
            launched_rank.record_failure(error)
            launched_rank.stop_own_children()
            raise

    def _check(self) -> None:
        """Raise typer.BadParameter or PipegraphError for what no package could be trained with."""
        if self.model is None and (self.batch is not None or self.seq is not None):
            raise typer.BadParameter(
                "they belong to --model; without it the package's own sizes are used.\nTry: --model too",
                param_hint="--batch / --seq",
            )
        from pipegraph.graph.sources import find_source
        from pipegraph.kernels.registry import check_name, named_dynamic
        from pipegraph.runtime.kernel_makers import check_has_graphs
        from pipegraph.runtime.precision import named_precision

        check_name(self.kernels)
        named_dynamic(self.dynamic)
        named_precision(self.precision)
        if self.cuda_graphs and self.device == "cpu":  # another name is checked with the package
            check_has_graphs(self.device)
        if self.model is not None:
            find_source(self.model)
        if self.learning_rate is not None and not self.learning_rate <= _LARGEST_RATE:
            raise typer.BadParameter(
                f"{self.learning_rate} is not a learning rate.\nTry: 0.001", param_hint="--learning-rate"
            )
        if self.recalibrate is not None:
            self._check_recalibrate()
        if self.profile is not None and self.steps is not None and self.steps < 2:
            raise typer.BadParameter(
                f"{self.steps} step is too few: the first one warms up and is not recorded.\n"
                f"Try: --steps {_PROFILED_STEPS}",
                param_hint="--profile",
            )
        if self.checkpoint is None and (self.checkpoint_every is not None or self.keep is not None):
            raise typer.BadParameter(
                "they belong to --checkpoint.\nTry: --checkpoint DIR too", param_hint="--checkpoint-every / --keep"
            )
        if self.timeout is not None:
            from pipegraph.runtime.processes.group import check_timeout

            check_timeout(self.timeout)

    def _check_recalibrate(self) -> None:
        """Raise typer.BadParameter if a run with these steps and kernels cannot correct a profile."""
        if self.kernels != "inductor":
            raise typer.BadParameter(
                f"a profile predicts compiled kernels, and {self.kernels} kernels cannot correct it.\n"
                "Try: leave --kernels out.",
                param_hint="--recalibrate",
            )
        steps = _STEPS if self.steps is None and self.model is None else self.steps
        if steps is not None and steps < 2:
            raise typer.BadParameter(
                "times are measured from the second step on, because the first one compiles.\nTry: --steps 5",
                param_hint="--recalibrate",
            )

    def _choose(self) -> tuple[Package, Schedule, RankGrid]:
        """Return the package, its schedule, and its processes. Raises PipegraphError if these do not fit."""
        from pipegraph.package import Package
        from pipegraph.runtime.processes.launch import check_processes, pipeline_ranks
        from pipegraph.runtime.processes.launched_rank import environment_ranks, is_launched
        from pipegraph.runtime.processes.rank_grid import TENSOR, grid_of
        from pipegraph.runtime.tensor_parallel import require_plan
        from pipegraph.workflows.schedules import choose_schedule

        package = Package.open(self.out)
        plan = package.manifest.prediction
        planned = {} if plan is None else plan.mesh
        dimensions = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        lengths = {**planned, **{name: length for name, length in dimensions.items() if length is not None}}
        opened_weights(self.weights, self.rename, self.rows)
        launched = is_launched()
        processes = environment_ranks()[1] if launched else self.nproc

        def usual_ranks() -> int:
            return choose_schedule(package, self.schedule, self.microbatches).ranks

        rank_count = pipeline_ranks(processes, lengths, usual_ranks, launched, planned)
        schedule = choose_schedule(
            package, self.schedule, self.microbatches, ranks=rank_count if launched or rank_count != 1 else None
        )
        ranks = rank_count or schedule.ranks
        grid = grid_of(ranks, lengths, self.mesh_order.split(","))
        require_plan(package.manifest.tp_plan, grid.length(TENSOR))
        check_processes(schedule, ranks, launched, grid.size // ranks)
        check_device(self.device, int(os.environ.get("LOCAL_WORLD_SIZE", grid.size)), "processes")
        return package, schedule, grid

    def _links(self, package: Package) -> Hardware | None:
        """Return the profile that a step is predicted with, if it is not the plan's own."""
        from pipegraph.cost.hardware import Hardware
        from pipegraph.workflows.recalibrate import profile_for

        links = None if self.hardware is None else Hardware.load(self.hardware)
        if self.recalibrate is None:
            return links
        check_target(self.recalibrate, overwrite=True, option="--recalibrate")
        return profile_for(package, self.recalibrate, links, self.precision)

    def _launch(self, processes: int) -> None:
        """Run the same command in a process for each rank."""
        from pipegraph.runtime.processes.group import TIMEOUT
        from pipegraph.runtime.processes.launch import launch, relay_progress

        with progress(f"starting {processes} processes") as say, relay_progress(say) as environment:
            # -P: without the working folder on sys.path, as for the command that started this process.
            arguments = ["-P", "-m", "pipegraph", "run", str(self.out), *self._flags()]
            folders = [str(Path(file).parent) for file in environment.values()]
            grace = 0.0 if self.checkpoint is None else _SAVE_SECONDS
            timeout = TIMEOUT if self.timeout is None else self.timeout
            launch(arguments, processes, self.debug, environment, folders, grace, timeout)

    def _flags(self) -> list[str]:
        """Return the options that the user wrote, without the number of processes."""
        flags = []
        for name in sorted(self.explicit - {"out", "nproc"}):
            value, flag = getattr(self, name), name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{'' if value else 'no-'}{flag}")
            else:
                flags.append(f"--{flag}={value}")
        return flags

    def _source(self, package: Package) -> ModelSource | None:
        if self.model is None:
            return None
        from pipegraph.graph.sources import load
        from pipegraph.workflows.batch import planned_rows

        has_mask = "attention_mask" in package.manifest.kwargs
        rows = self.batch or planned_rows(package.manifest)
        return load(self.model, False, rows, self.seq, attention_mask=has_mask)

    def _training(self, package: Package, schedule: Schedule, source: ModelSource | None, grid: RankGrid) -> Training:
        from pipegraph.kernels.registry import named_dynamic
        from pipegraph.workflows.run_checkpoints import CheckpointOptions
        from pipegraph.workflows.train import Training

        checkpoints = None
        if self.checkpoint is not None:
            checkpoints = CheckpointOptions(self.checkpoint, self.checkpoint_every or 100, self.keep or 3)
        return Training(
            package,
            schedule,
            source,
            device=self.device,
            learning_rate=self.learning_rate,
            kernels=self.kernels,
            timeout=self.timeout,
            weights=opened_weights(self.weights, self.rename, self.rows),
            check_weights=self.check_weights,
            strict=self.strict,
            cuda_graphs=self.cuda_graphs,
            dynamic=named_dynamic(self.dynamic),
            grid=grid,
            checkpoints=checkpoints,
            seed=self.seed,
            precision=self.precision,
        )

    def _train(
        self, training: Training, package: Package, schedule: Schedule, hardware: Hardware | None, say: PrintLine
    ) -> None:
        """Run this process's stages; the process that holds the last one prints."""
        from pipegraph.planner.run_comparison import compare_run
        from pipegraph.report.text import wrap
        from pipegraph.report.text.run_report import render_run_comparison, run_comparison_dict
        from pipegraph.tracing.run_figures import RunFigures
        from pipegraph.workflows.recalibrate import find_uneven_ratios, format_ratios, recalibrate_hardware

        steps = self.steps  # of the whole run
        if steps is None and not training.has_data:
            steps = _STEPS if self.profile is None else _PROFILED_STEPS
        begun, records = training.done, []
        shows = training.knows_loss and not self.json
        if training.resumed_from is not None and shows:
            say(f"continues from {training.resumed_from}")
        count = None if steps is None else max(steps - begun, 0)
        profile = None if count == 0 else self.profile
        with nullcontext() if profile is None else training.profiled(profile, count, hardware) as recorded:
            for step in training.steps(count):
                records.append(dataclasses.asdict(step))
                if shows:
                    say(str(step))
        if training.was_terminated and shows:
            say(f"SIGTERM came: saved after {training.done} steps. The same command continues.")
        if training.done == begun:
            if training.knows_loss:
                text = json_text({"steps": records}) if self.json else f"{begun} steps are done, and no more are to do."
                say(text)
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
        width = terminal_width(sys.stdout, self.wide)
        if shows:
            say(f"\n{wrap(render_run_comparison(compared, width), width)}")
            if self.model is not None and not training.has_loss:
                say(wrap(f"\nThe loss is the mean square of the outputs. Try: a loss_fn in {self.model}", width))
            if not is_compiled:
                say(wrap("\n".join(["\nNot all is compiled:", *(f"  {line}" for line in kernels)]), width))
        if self.recalibrate is not None and hardware is not None:
            corrected = recalibrate_hardware(hardware, package.manifest, compared)
            write_target(self.recalibrate, corrected.to_json())
            uneven = list(find_uneven_ratios(compared))
            result["recalibrated"] = {
                "file": str(self.recalibrate),
                "measured_ratio": structs.asdict(corrected.measured_ratio),
                "uneven": uneven,
            }
            if shows:
                say("\n".join([f"wrote {self.recalibrate}: {format_ratios(corrected)}", *uneven]))
        if recorded is not None:
            figures = RunFigures.of_run(records, compared.memory, compared.allocated, training.peak_flops())
            figures.write(recorded)
            result["profile"] = str(recorded)
            if shows:
                say(f"\n{_profile_hint(recorded)}")
        if self.json:
            say(json_text(result))


def _prepare_profile(folder: Path) -> None:
    """Raise PipegraphError, before anything takes time, if nothing could be recorded in the folder."""
    from pipegraph.tracing.recording.run_folder import check_run_parent

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # silences what the profiler prints on stderr
    check_run_parent(folder)


def _profile_hint(recorded: Path) -> str:
    """Return where the run was recorded, and the commands that show it."""
    folder = shlex.quote(str(recorded.parent))
    return (
        f"wrote {recorded}\na trace for each rank; to see it:\n"
        f"  tensorboard --logdir {folder}\n"
        f"  pipegraph trace report {folder}"
    )
