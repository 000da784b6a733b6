"""Time from the launch of a process to the end of its first step as layers are added, compared with torch.compile.

python -m benchmarks.compile [--layers 4 --layers 16 --layers 32] [--schedule zb-h1] [--repeats 1] [--json FILE]

A small Llama is cut in two. Both contenders run the stages that pipegraph wrote, and the loss, in one process with one
thread: forward and backward of two microbatches. Each measurement is a fresh process with an empty Inductor cache (the
headers that Inductor compiles once on a machine are there), from its launch to its end: torch is imported in it. The
second figure is that of the next process, which finds the cache filled. Capture and writing the package are not part of
it. Beside the time is what processors worked in it, compiler processes included: on a machine that others use, compare
that.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import pipegraph
from benchmarks.step.models import LlamaCase

CASE = LlamaCase(microbatches=2, rows=1, vocabulary=4096)
CONTENDERS = "pipegraph", "torch.compile"


def write_package(layers: int, folder: Path) -> None:
    """Write the package of a Llama with `layers` layers, split in two."""
    case = replace(CASE, layers=layers)
    tokens, _ = case.batch()
    captured = pipegraph.capture(case.unsplit(case.build()), (tokens[: case.rows],))
    pipegraph.write_package(pipegraph.plan(captured, points=list(case.even(2))), folder)


def first_step(contender: str, schedule: str, kernels: str, package: Path) -> None:
    """Run a step: what the process that is measured does after its imports."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*(runs? uncompiled|left to autograd)")
    tokens, targets = CASE.batch()
    if contender == "pipegraph":
        pipe = pipegraph.Pipeline(package, schedule, CASE.microbatches, CASE.loss, kernels=kernels)
        pipe.step(tokens, target=targets)
        return
    sys.path.insert(0, str(package.parent))
    stages = importlib.import_module(package.name)
    first, last = stages.load_stage(0), stages.load_stage(1)
    begin = torch.compile(first, dynamic=False)
    end = torch.compile(lambda h, target: CASE.loss(last(h), target), dynamic=False)
    for microbatch, target in zip(tokens.split(1), targets.split(1), strict=True):
        (end(begin(microbatch), target) / CASE.microbatches).backward()


def main(
    layers: Annotated[list[int] | None, typer.Option(help="may be given several times")] = None,
    schedule: Annotated[str, typer.Option(help="zb-h1 compiles F, I and W, 1f1b F and B")] = "zb-h1",
    kernels: str = "inductor",
    repeats: int = 1,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure first steps in fresh processes."""
    rows: list[dict[str, Any]] = []
    for count in layers or [4, 16, 32]:
        with tempfile.TemporaryDirectory(prefix="pipegraph-compile-") as folder:
            package = Path(folder) / "package"
            write_package(count, package)
            for contender in CONTENDERS:
                seconds = []
                for repeat in range(repeats):
                    cache = Path(folder) / f"{contender}-{repeat}"
                    seconds.append([measure(contender, schedule, kernels, package, cache) for _ in range(2)])
                clock, processors = (
                    [median(run[figure] for run in column) for column in zip(*seconds, strict=True)]
                    for figure in (0, 1)
                )
                figures = {"cold": clock[0], "warm": clock[1], "cold_cpu": processors[0], "warm_cpu": processors[1]}
                rows.append({"contender": contender, "layers": count, **figures})
                print(f"{contender}, {count} layers: {clock[0]:.1f} s, then {clock[1]:.1f} s", file=sys.stderr)
    if as_json:
        document = {"schema_version": 1, "schedule": schedule, "kernels": kernels, "rows": rows}
        as_json.write_text(json.dumps(document, indent=2) + "\n")
    table = Table(
        "contender", "layers", "first step", "÷ fewest layers", "filled cache", "÷ fewest layers", "CPU", "CPU"
    )
    for row in rows:
        fewest = next(candidate for candidate in rows if candidate["contender"] == row["contender"])
        figures = [(row[key], row[key] / fewest[key]) for key in ("cold", "warm")]
        cells = (text for seconds, ratio in figures for text in (f"{seconds:.1f} s", f"{ratio:.2f}"))
        processors = (f"{row[key]:.1f} s" for key in ("cold_cpu", "warm_cpu"))
        table.add_row(row["contender"], str(row["layers"]), *cells, *processors)
    Console(width=110).print(table)


def measure(contender: str, schedule: str, kernels: str, package: Path, cache: Path) -> tuple[float, float]:
    """Return the seconds that a process with its first step takes, and those of processors in it and its children."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    call = f"first_step({contender!r}, {schedule!r}, {kernels!r}, Path({str(package)!r}))"
    code = f"from pathlib import Path\nfrom benchmarks.compile import first_step\n{call}"
    processor_start, start = processor_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - start, processor_seconds() - processor_start


def processor_seconds() -> float:
    """Of this process's children that have ended, and of theirs."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    typer.run(main)
