"""What recording costs: a training step that is recorded, and one that is not, on a process per rank with one thread.

python benchmarks/profiling.py [--rows 2] [--microbatches 4] [--rounds 24] [--kernels inductor] [--json]

The model is the one of examples/transformer.py, cut in two, with `--rows` sequences in a microbatch. In every round
there is a step outside of any profile, one that a profile leaves alone, one that warms it up, and one that it records.
Ratios are taken within a round, and their medians told; beside them those of the least of all rounds, which on a busy
machine say more. A step takes until the last rank has done its optimizer's; that of a profile includes its own `step`,
but for the writing, which lies between steps and is told apart. The seconds that a rank's main thread computes are told
as well, as they do not count what waits for other work on the machine.
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
STEPS = "outside of a profile", "left alone by one", "recorded"
EXAMPLE = Path(__file__).parents[1] / "examples/transformer.py"


@dataclass(frozen=True)
class Setting:
    """What every process is told."""

    rows: int
    microbatches: int
    rounds: int
    kernels: str
    folder: str


def measure(rank: int, setting: Setting) -> None:
    """One process. Rank 0 writes what steps took: (seconds, seconds of a main thread), the most of all ranks."""
    from pipegraph.graph.sources.load import load

    torch.set_num_threads(1)
    store = dist.FileStore(f"{setting.folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    source, count = load(str(EXAMPLE), weights=False), setting.microbatches
    tokens, target = (each[: setting.rows].repeat(count, 1) for each in (source.args[0], source.example_target))
    pipe = pipegraph.Pipeline(f"{setting.folder}/package", "1f1b", count, source.loss_fn, kernels=setting.kernels)
    optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=0.0)

    def step() -> Any:
        result = pipe.step(tokens, target=target)
        optimizer.step()
        optimizer.zero_grad()
        return result

    taken: dict[str, list[list[float]]] = {name: [] for name in (*STEPS, "writing")}
    for _ in range(3):
        step()
    for _ in range(setting.rounds):
        taken[STEPS[0]].append(timed(pipe, step))
        with pipegraph.profile(pipe, f"{setting.folder}/runs", wait=1, warmup=1, active=2) as profiler:
            taken[STEPS[1]].append(timed(pipe, lambda: profiler.step(step())))
            profiler.step(step())
            taken[STEPS[2]].append(timed(pipe, lambda: profiler.step(step())))
            step()
            taken["writing"].append(timed(pipe, profiler.step))
    if rank == 0:
        file = next(profiler.folder.glob("rank_00*"))
        actions = len(pipe._training[0].actions)
        found = {"taken": taken, "bytes": file.stat().st_size, "actions": actions}
        Path(setting.folder, "measured.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def timed(pipe: pipegraph.Pipeline, do: Callable[[], Any]) -> list[float]:
    """Seconds until the last rank is done, and the most that a rank's main thread computed."""
    pipe.gather([0.0])
    wall, own = time.perf_counter(), time.thread_time()
    do()
    own = time.thread_time() - own
    pipe.gather([0.0])
    return [time.perf_counter() - wall, max(row[0] for row in pipe.gather([own]))]


def of_no_observer() -> float:
    """Seconds that an action takes longer as it asks, twice, whether there is an observer, which there is not."""
    number = 1_000_000
    asked = min(timeit.repeat("observer is not None", "observer = None", number=number))
    return 2 * asked / number


def write_package(rows: int, folder: str) -> None:
    from pipegraph.graph.sources.load import load

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
        setting = Setting(rows, microbatches, rounds, kernels, folder)
        write_package(rows, f"{folder}/package")
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=measure, args=(rank, setting), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        found = json.loads(Path(folder, "measured.json").read_text())
    document = figures(found)
    if as_json:
        given = {"rows": rows, "microbatches": microbatches, "rounds": rounds, "kernels": kernels}
        print(json.dumps({"schema_version": 1, **given, **document}, indent=2))
    else:
        show(document)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Medians: seconds, and the ratio to the round's step outside of a profile; and that of the least of all rounds."""
    taken = found["taken"]
    rows = {}
    for name in STEPS:
        rows[name] = {}
        for place, what in enumerate(("seconds", "computing")):
            own, other = ([step[place] for step in taken[each]] for each in (name, STEPS[0]))
            rows[name][what] = median(own)
            rows[name][f"{what}_ratio"] = median(mine / theirs for mine, theirs in zip(own, other, strict=True))
            rows[name][f"least_{what}_ratio"] = min(own) / min(other)
    asking = of_no_observer() * found["actions"]
    return {
        "steps": rows,
        "asking_for_an_observer": asking / rows[STEPS[0]]["seconds"],
        "writing": median(own[0] for own in taken["writing"]),
        "bytes": found["bytes"],
    }


def show(document: dict[str, Any]) -> None:
    columns = "a step", "seconds", "ratio", "of the least", "a rank computes", "ratio", "of the least"
    table = Table(*columns, title="medians; ratios within a round")
    for name, row in document["steps"].items():
        cells = []
        for what in ("seconds", "computing"):
            cells += [f"{row[what]:.3f}", f"{row[f'{what}_ratio']:.4f}", f"{row[f'least_{what}_ratio']:.4f}"]
        table.add_row(name, *cells)
    console = Console(width=100)
    console.print(table)
    console.print(f"asking for an observer that is not there: {document['asking_for_an_observer']:.1e} of a step")
    console.print(f"writing two steps: {document['writing']:.2f} s, {document['bytes'] / 2**20:.2f} MiB of rank 0")


if __name__ == "__main__":
    typer.run(main)
