"""``pipegraph split MODEL``: split a model into a package of stages."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import typer

from pipegraph.arguments import require_path
from pipegraph.cli.options import Command, check_measured, opened_weights, with_batch_dims
from pipegraph.cli.output import print_json, print_text
from pipegraph.cli.progress_bar import hold_back_stderr, progress

if TYPE_CHECKING:
    from pipegraph.codegen.proof import Proof
    from pipegraph.graph.captured import Captured
    from pipegraph.graph.sources.model_source import ModelSource
    from pipegraph.package import Manifest
    from pipegraph.package.folder import WeightSource
    from pipegraph.planner.plan import Plan
    from pipegraph.planner.plan_file import PlanFile

_SEARCH: Final = (
    "balance",
    "schedule",
    "microbatches",
    "ranks",
    "hardware",
    "recompute",
    "precision",
    "optimizer",
    "optimizer_bytes",
    "device",
)
"""The options that say how cuts are searched and priced."""


@dataclass(frozen=True, kw_only=True)
class SplitCommand(Command):
    """Split a model into stages of Python source.

    It is cut at the given points, or into N stages at the best places. With --stages, the time of a step is predicted;
    with --points, only if --balance, --schedule, --microbatches, --memory, --hardware, --recompute, --precision or
    --optimizer is given. With --plan, --memory checks that the plan fits.

    \b
    Example:
      pipegraph split examples/transformer.py --stages 2
    """

    usual = (
        "points",
        "stages",
        "plan_file",
        "schedule",
        "microbatches",
        "memory",
        "hardware",
        "precision",
        "out",
        "overwrite",
    )

    model: str
    points: str | None = None
    stages: int | None = None
    plan_file: Path | None = None
    balance: str | None = None
    schedule: str = "1f1b"
    microbatches: int = 8
    ranks: int | None = None
    memory: int | tuple[int, ...] | None = None
    hardware: str = "cpu"
    device: str = "cpu"
    recompute: str = "min-cut"
    precision: str | None = None
    optimizer: str = "adamw"
    optimizer_bytes: float | None = None
    out: Path | None = None
    weights: Path | None = None
    rename: list[str] | None = None
    rows: list[str] | None = None
    no_weights: bool = False
    batch: int | None = None
    seq: int | None = None
    batch_dim: list[str] | None = None
    attention_mask: bool = False
    relay_skips: bool = False
    dry_run: bool = False
    check: bool = False
    overwrite: bool = False
    verbose: bool = False

    def run(self) -> None:
        self._check_options()
        out = None if self.dry_run else require_path(self.out or _usual_folder(self.model), "--out is a folder")
        with progress(f"loading {self.model}"):
            from pipegraph.codegen.package_writer import require_package, require_writable
            from pipegraph.planner.plan_file import PlanFile
            from pipegraph.report.text.package_tables import manifest_dict

            settings = self._settings()
            plan_file = None if self.plan_file is None else PlanFile.read(self.plan_file)
            if out is not None:
                require_package(out) if self.check else require_writable(out, self.overwrite)
            checkpoint = opened_weights(self.weights, self.rename, self.rows)
            weights: WeightSource = not self.no_weights if checkpoint is None else checkpoint
            source = self._source(plan_file, weights is True and not (self.dry_run or self.check))
        begin = perf_counter()
        captured = self._captured(source)
        capture_seconds = perf_counter() - begin
        plan = self._plan(captured, source, plan_file, settings)
        if self.check and out is not None:
            raise typer.Exit(self._compare(plan, out, bool(weights), source))
        initial_values = source.initial_values if weights is True else ""
        manifest, proof = self._write(plan, out, weights, source)
        if self.debug:
            _print_plainer(proof)
        if self.json:
            validation = _validation(proof, capture_seconds)
            written = {"out": None if out is None else str(out), "initial_values": initial_values}
            print_json({**written, "validation": validation, **manifest_dict(manifest)})
        else:
            _print(plan, out, manifest, initial_values, self.verbose)

    def _check_options(self) -> None:
        """Raise typer.BadParameter unless just one option says where to cut, and no other contradicts it."""
        cuts = self.points, self.stages, self.plan_file
        if sum(cut is not None for cut in cuts) != 1 or self.points == "":
            raise typer.BadParameter(
                "say where to cut: --points layers.4 (modules that start a stage), or --stages 2, and not both; or "
                "--plan plan.json, which `pipegraph plan` wrote.",
                param_hint="--points / --stages / --plan",
            )
        search = [name for name in _SEARCH if name in self.explicit]
        if self.plan_file is not None and search:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in search)
            raise typer.BadParameter(
                f"a plan is used as it was made.\nTry: leave out {options}; or leave out --plan.", param_hint="--plan"
            )
        if self.points is not None and self.balance not in (None, "time", "measured", "auto"):
            raise typer.BadParameter(
                f"{self.balance} chooses points, and they were given.\nTry: --stages instead, or --balance time, which "
                "predicts what a step takes with these points.",
                param_hint="--balance",
            )
        if self.check and (self.dry_run or self.overwrite):
            raise typer.BadParameter(
                "it writes nothing.\nTry: leave out --dry-run and --overwrite.", param_hint="--check"
            )
        if self.weights is not None and self.no_weights:
            raise typer.BadParameter(
                "--weights writes weights.\nTry: one of the two", param_hint="--weights / --no-weights"
            )
        check_measured(self.device, self.balance)

    def _settings(self) -> dict[str, Any]:
        """Return the options of a search as arguments of `plan`, checked before anything is loaded."""
        from pipegraph.cost.balance import parse_balance
        from pipegraph.cost.block_times import MeasureOptions
        from pipegraph.cost.rank_profiles import load_profiles
        from pipegraph.cost.training_state import TrainingState
        from pipegraph.recompute import check_text
        from pipegraph.workflows.schedules import named_schedule

        settings: dict[str, Any] = {
            name: getattr(self, name) for name in _SEARCH if name in self.explicit and name != "device"
        }
        readers = {"schedule": named_schedule, "hardware": load_profiles}
        settings |= {name: read(settings[name]) for name, read in readers.items() if name in settings}
        parse_balance("time" if self.balance is None else self.balance)
        check_text(self.recompute)
        TrainingState(self.precision, self.optimizer, self.optimizer_bytes)
        return {**settings, "setting": MeasureOptions(self.device)}

    def _source(self, plan_file: PlanFile | None, has_values: bool) -> ModelSource:
        from pipegraph.graph.sources import load

        batch, seq = self.batch, self.seq
        if plan_file is not None and plan_file.inputs:  # it may be for other rows and tokens than the example's
            rows, *tokens = plan_file.inputs[0].shape or (batch,)
            batch = rows if batch is None else batch
            seq = tokens[0] if seq is None and tokens and self.model.startswith("hf:") else seq
        source = load(self.model, has_values, batch, seq, attention_mask=self.attention_mask)
        return with_batch_dims(source, self.batch_dim)

    def _captured(self, source: ModelSource) -> Captured:
        from pipegraph.graph.capture import capture_source

        with progress(f"capturing {source.name}"), hold_back_stderr(unless=self.debug):
            return capture_source(source)

    def _plan(
        self, captured: Captured, source: ModelSource, plan_file: PlanFile | None, settings: dict[str, Any]
    ) -> Plan:
        """Cut a captured model."""
        from pipegraph.planner.plan import plan
        from pipegraph.workflows.batch import loss_and_target

        with progress("looking for the best cuts"):
            if plan_file is not None:
                planned = plan_file.apply(captured, self.memory)
            else:
                points = self.points if self.points is None or "|" in self.points else self.points.split(",")
                loss = loss_and_target(source)
                planned = plan(
                    captured, points=points, stages=self.stages, memory_bytes=self.memory, loss=loss, **settings
                )
        return planned.with_relays() if self.relay_skips else planned

    def _compare(self, plan: Plan, folder: Path, weights: bool, source: ModelSource) -> int:
        """Print what would change in a package, and return the exit code: 1 if anything would."""
        from pipegraph.codegen.package_files import generate
        from pipegraph.codegen.package_writer import compare_package

        generated = generate(plan, weights, source)
        changes = compare_package(folder, generated.files, generated.manifest)
        if self.json:
            print_json({"out": str(folder), "changes": changes})
        elif changes:
            print("".join(changes.values()), end="")
        else:
            print(f"{folder} is as it would be written")
        return 1 if changes else 0

    def _write(
        self, plan: Plan, folder: Path | None, weights: WeightSource, source: ModelSource
    ) -> tuple[Manifest, Proof]:
        """Write the package, unless it is a dry run, and return its manifest and its proof."""
        from pipegraph.codegen.package_files import generate
        from pipegraph.codegen.package_writer import write_proved_package

        if folder is None:
            generated = generate(plan, bool(weights), source)
            return generated.manifest, generated.proof
        with progress(f"writing {folder}"):
            package, proof = write_proved_package(plan, folder, weights, self.overwrite, source)
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


def _print(plan: Plan, folder: Path | None, manifest: Manifest, initial_values: str, verbose: bool) -> None:
    from pipegraph.errors import one_line
    from pipegraph.report.text.package_tables import (
        batch_lines,
        layout_lines,
        memory_table,
        ranks_lines,
        render_prediction_summary,
        stage_lines,
    )

    varying = {place for size in plan.captured.other_sizes if size.name in manifest.sizes for place in size.places}
    fixed = [one_line(str(size)) for size in plan.captured.sizes.fixed if size.place not in varying]
    lines = [*stage_lines(plan.describe()), *fixed]
    if plan.captured.device_branch:
        lines.append(one_line(f"The model {plan.captured.device_branch}. The stages do what it does here."))
    if not (plan.captured.modules[""].training or plan.captured.not_trained):
        lines.append(
            "The model is in evaluation mode, and so are its stages when they are loaded: pipe.train() before training."
        )
    lines += batch_lines(manifest)
    lines += layout_lines(plan.layout) if verbose else []
    if plan.prediction is not None:
        lines += [*ranks_lines(plan.prediction), render_prediction_summary(plan.prediction)]
    last_lines = [one_line(f"initial values: {initial_values}")] if initial_values else []
    if folder is not None:
        last_lines.append(f"wrote {folder}")

    def text(width: int | None) -> str:
        prediction = plan.prediction
        table = [] if prediction is None or not prediction.memory_parts else ["", memory_table(prediction, width), ""]
        return "\n".join([*lines, *table, *last_lines]).rstrip("\n")

    print_text(text)


def _usual_folder(model: str) -> Path:
    """Return ``build/transformer`` for ``examples/transformer.py``, ``build/llama`` for ``hf:…/llama/config.json``."""
    path = Path(model.removeprefix("hf:").rpartition(":")[0] if ".py:" in model else model.removeprefix("hf:"))
    return Path("build", path.parent.name if path.name == "config.json" else path.stem)
