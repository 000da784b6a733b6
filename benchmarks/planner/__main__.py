"""The command: `python -m benchmarks.planner`."""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

BALANCES = "auto", "measured", "time"
CORES_HELP = "for the two processes, such as 2,3; by default the first two that may be used"


def main(
    hardware: Annotated[Path, typer.Option(help="what `pipegraph calibrate -o FILE --threads 1` wrote")],
    models: str = "tutorial,llama,u-net",
    schedule: str = "1f1b",
    microbatches: int = 8,
    rounds: int = 7,
    cores: Annotated[str, typer.Option(help=CORES_HELP)] = "",
    as_json: Annotated[Path | None, typer.Option("--json", help="Write everything that was measured here.")] = None,
) -> None:
    """Predict stages and steps, run every cut between layers and the planner's own, and compare."""
    os.environ["OMP_NUM_THREADS"] = "1"
    core_numbers = tuple(map(int, cores.split(","))) if cores else tuple(sorted(os.sched_getaffinity(0)))[:2]
    results = {}
    for name in models.split(","):
        results[name] = _measure_cuts(name, hardware, schedule, microbatches, rounds, core_numbers)
        _show(name, results[name])
        if as_json:
            as_json.write_text(json.dumps({"schema_version": 1, "models": results}, indent=1) + "\n")


@dataclass(frozen=True)
class _PredictedCut:
    """Split points of a model, with the prediction of each balance."""

    points: tuple[str, ...]
    predicted: dict[str, Any]
    chosen_by: tuple[str, ...]


def _cuts(name: str, hardware: Path, schedule: str, microbatches: int, folder: Path) -> list[_PredictedCut]:
    """Return every cut between two layers and the cuts that the planner chooses; write their packages."""
    import torch

    import pipegraph
    from benchmarks.planner.models import SUBJECTS
    from benchmarks.planner.rank import RANKS
    from pipegraph.cost.block_times import Cache, MeasureOptions
    from pipegraph.cost.hardware import Hardware
    from pipegraph.planner.cut_choice import CutChoice, choose_cuts, refine_cuts
    from pipegraph.planner.plan_options import PlanOptions

    torch.set_num_threads(1)
    subject = SUBJECTS[name]()
    captured = pipegraph.capture(subject.model, subject.inputs)
    layers = [segment.start for segment in captured.segments][1:]
    stages = pipegraph.schedule.build(schedule, RANKS, microbatches).stages
    if stages != RANKS:
        raise typer.BadParameter("every cut is tried with one stage on a rank only.", param_hint="--schedule")
    options = PlanOptions(
        "time",
        schedule,
        microbatches,
        RANKS,
        hardware=Hardware.load(str(hardware)),
        loss=(subject.loss, subject.target),
        setting=MeasureOptions(threads=1),
    ).on_ranks(RANKS)
    costs, chosen = {}, {}
    for balance in BALANCES:
        balance_options = replace(options, balance=balance, cache=Cache(folder / f"cache-{balance}"))
        begun = time.perf_counter()
        costs[balance] = balance_options.price(captured, layers), balance_options
        print(f"{name} priced by {balance} in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        best = refine_cuts(choose_cuts(*costs[balance], stages))
        segments = best.costs.priced.chain.segments
        chosen[balance] = tuple(segments[cut].start for cut in best.cuts)
    cuts: list[_PredictedCut] = []
    for starts in dict.fromkeys([*((start,) for start in layers), *chosen.values()]):
        predicted: dict[str, Any] = {}
        for balance, (priced, balance_options) in costs.items():
            begins = [segment.start for segment in priced.priced.chain.segments]
            if set(starts) <= set(begins):
                choice = CutChoice(
                    priced, balance_options, tuple(map(begins.index, starts)), balance_options.schedule_of(stages)
                )
                predicted[balance] = msgspec.to_builtins(choice.predict())
                points = choice.points
        plan = pipegraph.plan(captured, points=points)
        pipegraph.write_package(plan, folder / str(len(cuts)))
        by = tuple(balance for balance, chosen_starts in chosen.items() if chosen_starts == starts)
        cuts.append(_PredictedCut(tuple(map(str, points)), predicted, by))
    return cuts


def _measure_cuts(
    name: str, hardware: Path, schedule: str, microbatches: int, rounds: int, cores: Sequence[int]
) -> list[dict[str, Any]]:
    """Return for every cut: its points, the balances that chose it, predictions and measurements."""
    from torch import multiprocessing

    from benchmarks.planner.rank import Options
    from benchmarks.planner.rank import main as run_rank

    with tempfile.TemporaryDirectory(prefix="pipegraph-planner-") as folder:
        cuts = _cuts(name, hardware, schedule, microbatches, Path(folder))
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        packages = tuple(Path(folder, str(index)) for index in range(len(cuts)))
        options = Options(name, packages, schedule, microbatches, rounds, tuple(cores))
        results = multiprocessing.get_context("spawn").SimpleQueue()
        processes = multiprocessing.start_processes(run_rank, (options, port, results), nprocs=2, join=False)
        while results.empty():
            processes.join(timeout=1)
        measured = results.get()
        while not processes.join():
            pass
    return [
        {
            "points": cut.points,
            "chosen_by": cut.chosen_by,
            "predicted": cut.predicted,
            "steps": times.steps,
            "stages": {f"{kind} {stage}": seconds for (stage, kind), seconds in sorted(times.actions.items())},
        }
        for cut, times in zip(cuts, measured, strict=True)
    ]


def _show(name: str, cuts: Sequence[dict[str, Any]]) -> None:
    console = Console(width=120)
    headers = (f"{balance} predicts" for balance in BALANCES)
    table = Table("cut at", "step, ms", "÷ best", *headers, "chosen by", title=name)
    best = min(cuts, key=lambda cut: median(cut["steps"]))
    for cut in cuts:
        over = median(step / best_step for step, best_step in zip(cut["steps"], best["steps"], strict=True))
        row = [", ".join(cut["points"]), f"{median(cut['steps']) * 1e3:.1f}", f"{over:.3f}"]
        table.add_row(*row, *(_predicted_step(cut, balance) for balance in BALANCES), ", ".join(cut["chosen_by"]))
    console.print(table)
    for balance in BALANCES:
        single, stages, steps = _errors(cuts, balance)
        console.print(
            f"{balance}: median error of F, I, W and B {median(single):.1%}, of stages {median(stages):.1%}, of steps "
            f"{median(steps):.1%}, at most {max(steps):.1%}"
        )


def _predicted_step(cut: dict[str, Any], balance: str) -> str:
    if balance not in cut["predicted"]:
        return "—"
    step = cut["predicted"][balance]["value"]
    return f"{step * 1e3:.1f} ({step / median(cut['steps']) - 1:+.1%})"


def _errors(cuts: Sequence[dict[str, Any]], balance: str) -> tuple[list[float], list[float], list[float]]:
    """Return |predicted ÷ measured − 1| of each stage's kernels, of each stage's microbatch, and of steps."""
    single, stages, steps = [], [], []
    for cut in cuts:
        if balance not in cut["predicted"]:
            continue
        predicted, measured = cut["predicted"][balance], cut["stages"]
        steps.append(_error(predicted["value"], median(cut["steps"])))
        for index, stage in enumerate(predicted["costs"]):
            input_grad, weight_grad = stage["input_grad"], stage["weight_grad"]
            predictions = {"F": stage["forward"], "B": input_grad + weight_grad, "I": input_grad, "W": weight_grad}
            pairs = [
                (figure, measured[f"{kind} {index}"])
                for kind, figure in predictions.items()
                if f"{kind} {index}" in measured
            ]
            single += [_error(figure, seconds) for figure, seconds in pairs if figure]
            stages.append(_error(*map(sum, zip(*pairs, strict=True))))
    return single, stages, steps


def _error(predicted: float, measured: float) -> float:
    return abs(predicted / measured - 1)


if __name__ == "__main__":
    typer.run(main)
