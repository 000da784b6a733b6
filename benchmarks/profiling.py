"""The cost of recording: training steps with and without a profile, one process with one thread per rank.

python benchmarks/profiling.py [--rows 2] [--microbatches 4] [--rounds 24] [--kernels inductor] [--json]

The model is that of examples/transformer.py, cut in two, with `--rows` sequences in a microbatch. Every round has a
step outside a profile, one that a profile leaves alone, one that warms it up, and one that it records. Ratios are
taken within a round; the table shows their medians, and ratios of the fastest steps of all rounds, which say more on
a busy machine. A step ends when the last rank has finished its optimizer's step. A step in a profile includes the
profiler's own `step` without the writing, which happens between steps and is shown separately. The CPU seconds of a
rank's main thread are shown as well, because they do not count waits for other work on the machine.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

import pipegraph

RANKS = 2
STEPS = "outside a profile", "left alone by a profile", "recorded"
EXAMPLE = Path(__file__).parents[1] / "examples/transformer.py"


@dataclass(frozen=True)
class ProfilingSetting:
    """Options that every process gets."""

    rows: int
    microbatches: int
    rounds: int
    kernels: str
    folder: str


def measure(rank: int, setting: ProfilingSetting) -> None:
    """Run one process. Rank 0 writes the largest seconds and CPU seconds (main thread) of all ranks, step by step."""
    from pipegraph.graph.sources import load

    torch.set_num_threads(1)
    store = dist.FileStore(f"{setting.folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    source, count = load(str(EXAMPLE), weights=False), setting.microbatches
    tokens, target = (tensor[: setting.rows].repeat(count, 1) for tensor in (source.args[0], source.example_target))
    pipe = pipegraph.Pipeline(f"{setting.folder}/package", "1f1b", count, source.loss_fn, kernels=setting.kernels)
    optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=0.0)

    def step() -> Any:
        result = pipe.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()
        return result

    measured: dict[str, list[list[float]]] = {name: [] for name in (*STEPS, "writing")}
    for _ in range(3):
        step()
    for _ in range(setting.rounds):
        measured[STEPS[0]].append(timed(pipe, step))
        with pipegraph.profile(pipe, f"{setting.folder}/runs", wait=1, warmup=1, active=2) as profiler:
            measured[STEPS[1]].append(timed(pipe, lambda: profiler.step(step())))
            profiler.step(step())
            measured[STEPS[2]].append(timed(pipe, lambda: profiler.step(step())))
            step()
            measured["writing"].append(timed(pipe, profiler.step))
    if rank == 0:
        file = next(profiler.folder.glob("rank_00*"))
        actions = len(pipe._runner.executors.training_executors[0].actions)
        result = {"steps": measured, "bytes": file.stat().st_size, "actions": actions}
        Path(setting.folder, "measured.json").write_text(json.dumps(result))
    dist.barrier()
    os._exit(0)


def timed(pipe: pipegraph.Pipeline, do: Callable[[], Any]) -> list[float]:
    """Run `do`; return seconds until the last rank is done, and the largest CPU seconds of a rank's main thread."""
    pipe.gather([0.0])
    wall, cpu_seconds = time.perf_counter(), time.thread_time()
    do()
    cpu_seconds = time.thread_time() - cpu_seconds
    pipe.gather([0.0])
    return [time.perf_counter() - wall, max(row[0] for row in pipe.gather([cpu_seconds]))]


def seconds_without_observer() -> float:
    """Seconds that an action takes longer because it checks twice for an observer that is not there."""
    number = 1_000_000
    check = min(timeit.repeat("observer is not None", "observer = None", number=number))
    return 2 * check / number


def write_package(rows: int, folder: str) -> None:
    from pipegraph.graph.sources import load

    source = load(str(EXAMPLE), weights=False)
    captured = pipegraph.capture(source.model, args=(source.args[0][:rows],))
    pipegraph.write_package(pipegraph.plan(captured, points=["layers.4"]), folder, weights=False)


def main(
    rows: int = 2,
    microbatches: int = 4,
    rounds: int = 24,
    kernels: str = "inductor",
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compare steps that are recorded with steps that are not."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with tempfile.TemporaryDirectory(prefix="pipegraph-profiling-") as folder:
        setting = ProfilingSetting(rows, microbatches, rounds, kernels, folder)
        write_package(rows, f"{folder}/package")
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, setting), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        result = json.loads(Path(folder, "measured.json").read_text())
    document = figures(result)
    if as_json:
        options = {"rows": rows, "microbatches": microbatches, "rounds": rounds, "kernels": kernels}
        print(json.dumps({"schema_version": 1, **options, **document}, indent=2))
    else:
        show(document)


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """Return medians of seconds, of ratios to the step outside a profile, and ratios of the fastest steps."""
    steps = result["steps"]
    rows = {}
    for name in STEPS:
        rows[name] = {}
        for index, figure in enumerate(("seconds", "computing")):
            times, base = ([step[index] for step in steps[step_name]] for step_name in (name, STEPS[0]))
            rows[name][figure] = median(times)
            rows[name][f"{figure}_ratio"] = median(
                inside / outside for inside, outside in zip(times, base, strict=True)
            )
            rows[name][f"fastest_{figure}_ratio"] = min(times) / min(base)
    check = seconds_without_observer() * result["actions"]
    return {
        "steps": rows,
        "observer_check": check / rows[STEPS[0]]["seconds"],
        "writing": median(row[0] for row in steps["writing"]),
        "bytes": result["bytes"],
    }


def show(document: dict[str, Any]) -> None:
    columns = "step", "seconds", "ratio", "of the fastest", "CPU seconds of a rank", "ratio", "of the fastest"
    table = Table(*columns, title="medians; ratios within a round")
    for name, row in document["steps"].items():
        cells = []
        for figure in ("seconds", "computing"):
            cells += [f"{row[figure]:.3f}", f"{row[f'{figure}_ratio']:.4f}", f"{row[f'fastest_{figure}_ratio']:.4f}"]
        table.add_row(name, *cells)
    console = Console(width=100)
    console.print(table)
    console.print(f"checking for an observer: {document['observer_check']:.1e} of a step")
    console.print(f"writing two steps: {document['writing']:.2f} s, {document['bytes'] / 2**20:.2f} MiB of rank 0")


if __name__ == "__main__":
    typer.run(main)
