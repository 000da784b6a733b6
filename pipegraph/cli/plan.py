"""``pipegraph plan MODEL``: which schedule, how many stages and microbatches, and where to cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from pipegraph.cli.options import Command, check_measured, parse_names, with_batch_dims
from pipegraph.cli.output import check_target, print_drawing, print_json, print_text, write_target
from pipegraph.cli.progress_bar import hold_back_stderr, progress

if TYPE_CHECKING:
    from pipegraph.cost.model_output import LossOf
    from pipegraph.graph.captured import Captured
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.planner.comparison import PlanCandidate
    from pipegraph.planner.plan_file import PlanFile
    from pipegraph.planner.plan_options import PlanOptions


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Command):
    """Compare plans by predicted time and memory.

    Schedules, numbers of stages and microbatches, recompute and cuts are compared for a number of ranks, and the best
    plan is explained. With --devices and --global-batch the mesh, the rows of a microbatch and the recompute of each
    stage are chosen too. Only -o writes a file.

    \b
    Example:
      pipegraph plan examples/transformer.py --ranks 2
    """

    usual = (
        "ranks",
        "devices",
        "global_batch",
        "memory",
        "hardware",
        "precision",
        "schedule",
        "microbatches",
        "recompute",
        "out",
    )

    model: str
    ranks: int | None = None
    devices: int | None = None
    global_batch: int | None = None
    memory: int | tuple[int, ...] | None = None
    schedule: list[str] | None = None
    microbatches: list[int] | None = None
    stages_per_rank: list[int] | None = None
    recompute: list[str] | None = None
    balance: str = "time"
    device: str = "cpu"
    hardware: str = "cpu"
    precision: str | None = None
    optimizer: str = "adamw"
    optimizer_bytes: float | None = None
    zero1: bool = False
    out: Path | None = None
    batch: int | None = None
    seq: int | None = None
    batch_dim: list[str] | None = None
    attention_mask: bool = False
    overwrite: bool = False
    verbose: bool = False
    wide: bool = False

    def run(self) -> None:
        self._check_options()
        with progress(f"loading {self.model}"):
            from pipegraph.cost.block_times import MeasureOptions
            from pipegraph.cost.rank_profiles import RankProfiles, load_profiles
            from pipegraph.cost.training_state import TrainingState
            from pipegraph.graph.sources import load
            from pipegraph.planner.comparison import candidates
            from pipegraph.planner.plan_file import is_plan
            from pipegraph.planner.plan_options import PlanOptions
            from pipegraph.workflows.batch import loss_and_target

            check_target(self.out, self.overwrite, is_replaceable=is_plan)
            plans: Sequence[PlanCandidate] = ()
            if self.ranks is not None:
                compared = self.schedule, self.microbatches, self.stages_per_rank, self._recompute_choices()
                plans = candidates(self.ranks, *compared)
            training = TrainingState(self.precision, self.optimizer, self.optimizer_bytes)
            devices = load_profiles(self.hardware)
            profiles = devices if isinstance(devices, RankProfiles) else None
            if self.devices is not None and (profiles is not None or isinstance(self.memory, tuple)):
                raise typer.BadParameter(
                    "the devices of --devices are equal.\nTry: --ranks, for a pipeline of unequal devices",
                    param_hint="--hardware" if profiles is not None else "--memory",
                )
            source = load(self.model, False, self.batch, self.seq, attention_mask=self.attention_mask)
            source = with_batch_dims(source, self.batch_dim)
            options = PlanOptions(
                self.balance,
                ranks=self.ranks,
                memory_bytes=self.memory,
                hardware=devices.profiles[0] if isinstance(devices, RankProfiles) else devices,
                loss=loss_and_target(source),
                training=training,
                setting=MeasureOptions(self.device),
                rank_profiles=profiles,
            )
        if self.devices is not None and self.global_batch is not None:
            self._plan_cluster(source, options, self.devices, self.global_batch)
        elif self.ranks is not None:
            self._plan_pipeline(source, options, self.ranks, plans)

    def _check_options(self) -> None:
        """Raise typer.BadParameter unless either ranks are given, or devices and the rows of a step."""
        devices, global_batch = self.devices, self.global_batch
        if self.ranks is not None and (devices is not None or global_batch is not None):
            flag = "--devices" if devices is not None else "--global-batch"
            raise typer.BadParameter(
                f"--ranks plans one pipeline, and {flag} a cluster.\n"
                "Try: --ranks alone, or --devices with --global-batch",
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
        if self.ranks is None and devices is None:
            raise typer.BadParameter(
                "say what to plan for.\nTry: --ranks 4, or --devices 8 --global-batch 64",
                param_hint="--ranks / --devices",
            )
        for name in ("microbatches", "stages_per_rank", "recompute"):
            if devices is not None and name in self.explicit:
                raise typer.BadParameter(
                    "a plan for --devices chooses this itself.\nTry: without it; or --ranks, for plans of one pipeline",
                    param_hint=f"--{name.replace('_', '-')}",
                )
        if self.zero1 and devices is None:
            raise typer.BadParameter(
                "ranks of one pipeline share no state.\nTry: --devices and --global-batch",
                param_hint="--zero1",
            )
        if self.balance not in ("time", "measured", "auto"):
            raise typer.BadParameter(
                f"{self.balance!r} is not time, measured or auto.\nTry: one of them; split takes the others.",
                param_hint="--balance",
            )
        check_measured(self.device, self.balance)

    def _recompute_choices(self) -> list[str]:
        """Return what is compared. Commas part choices of one word each; in a text with rules, or with a choice for
        each stage, they are its own."""
        return [
            choice
            for text in self.recompute or ["none,min-cut,block"]
            for choice in ([text] if set("=;|") & set(text) else parse_names(text, "--recompute"))
        ]

    def _plan_pipeline(
        self, source: ModelSource, options: PlanOptions, ranks: int, plans: Sequence[PlanCandidate]
    ) -> None:
        """Compare the plans of one pipeline, and print them."""
        from pipegraph.graph.capture import capture_source
        from pipegraph.planner.comparison import compare_model
        from pipegraph.planner.plan import plan_of
        from pipegraph.planner.plan_file import PlanFile
        from pipegraph.report.text.package_tables import plan_comparison_dict, render_plan, render_plan_comparison

        with progress(f"capturing {source.name}"), hold_back_stderr(unless=self.debug):
            captured = capture_source(source)
        with progress("comparing plans"):
            comparison = compare_model(captured, options, ranks, plans, searches=not self.schedule)
            best = plan_of(captured, comparison.best)
        if self.json:
            print_json(plan_comparison_dict(comparison, best))
        else:
            print_text(lambda width: f"{render_plan_comparison(comparison, width)}\n", self.wide)
            print_drawing(lambda width, coloured: render_plan(best, width, coloured, self.verbose), self.wide)
        self._write(PlanFile.from_plan(best))

    def _plan_cluster(self, source: ModelSource, options: PlanOptions, devices: int, global_batch: int) -> None:
        """Choose the mesh as well, and print the plans worth a choice."""
        from torch import Tensor

        from pipegraph.graph.capture import capture_rows
        from pipegraph.graph.sources.huggingface import tp_plan_of
        from pipegraph.planner.joint_plan.search import joint_plan
        from pipegraph.planner.plan_file import PlanFile
        from pipegraph.report.text.package_tables import joint_comparison_dict, render_joint_comparison, render_plan
        from pipegraph.schedule.recipes import compared_names
        from pipegraph.torch_private.pytrees import pytree
        from pipegraph.workflows.batch import loss_and_target

        inputs = [leaf for leaf in pytree.tree_leaves((source.args, source.kwargs)) if isinstance(leaf, Tensor)]
        shape = inputs[0].shape if inputs and inputs[0].dim() else (1,)
        tokens = shape[1] if len(shape) == 2 and not inputs[0].is_floating_point() else None

        def captured_rows(rows: int) -> tuple[Captured, tuple[LossOf, Any] | None]:
            captured = capture_rows(source, rows, has_dtypes=self.precision is not None)
            return captured, loss_and_target(replace(source, batch=rows))

        with progress("comparing plans"), hold_back_stderr(unless=self.debug):
            comparison, best = joint_plan(
                captured_rows,
                source.batch or shape[0],
                options,
                devices,
                global_batch,
                self.schedule or compared_names(),
                source.tp_plan or tp_plan_of(source.model),
                zero1=self.zero1,
                searches=not self.schedule,
            )
        plan_file = PlanFile.from_plan(best)
        if self.json:
            print_json({"plan": plan_file.to_dict(), **joint_comparison_dict(comparison)})
        else:
            of_row = source.seq or tokens
            print_text(
                lambda width: f"{render_joint_comparison(comparison, global_batch, devices, of_row, width)}\n",
                self.wide,
            )
            print_drawing(lambda width, coloured: render_plan(best, width, coloured, self.verbose), self.wide)
        self._write(plan_file)

    def _write(self, plan_file: PlanFile) -> None:
        write_target(self.out, plan_file.to_json())
        if self.out is not None and not self.json:
            print(f"wrote {self.out}")
