"""Time of the first step as layers are added, compared with torch.compile of whole stages.

python -m benchmarks.compile [--layers 4 --layers 16 --layers 32] [--schedule zb-h1] [--repeats 1] [--json FILE]

A small Llama is cut in two; both stages and the loss run in one process with one thread. Each measurement is a fresh
process with an empty Inductor cache (the headers that Inductor compiles once on a machine are there). The clock
starts when model and package are loaded and stops at the end of the first step: forward and backward of two
microbatches. The second figure is that of the next process, which finds the cache filled. Capture and writing the
package are not part of it. Beside the time is what processors worked in it, compiler processes included: on a machine
that others use, compare that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

MICROBATCHES = 2
CONTENDERS = "pipegraph", "torch.compile"


def measure(contender: str, layers: int, schedule: str, kernels: str, package: Path) -> tuple[float, float]:
    """Seconds to the end of the first step in this process, and seconds of processors in them."""
    import torch

    import pipegraph
    from benchmarks.step.models import LlamaCase

    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*(runs? uncompiled|left to autograd)")
    case = LlamaCase(MICROBATCHES, rows=1, vocabulary=4096, layers=layers)
    tokens, targets = case.batch()
    if contender == "package":
        captured = pipegraph.capture(case.whole(case.build()), (tokens[: case.rows],))
        pipegraph.write_package(pipegraph.plan(captured, points=list(case.even(2))), package)
        return 0.0, 0.0
    if contender == "pipegraph":
        start = now()
        pipegraph.Pipeline(package, schedule, MICROBATCHES, case.loss, kernels=kernels).step(tokens, target=targets)
        return since(start)
    first, last = case.parts(case.build(), case.even(2))
    start = now()
    begin = torch.compile(first, dynamic=False)
    end = torch.compile(lambda h, wanted: case.loss(last(h), wanted), dynamic=False)
    for some, wanted in zip(tokens.split(case.rows), targets.split(case.rows), strict=True):
        (end(begin(some), wanted) / MICROBATCHES).backward()
    return since(start)


def now() -> tuple[float, float]:
    """Seconds of the clock, and of processors in this process and its children that have ended."""
    times = os.times()
    return time.perf_counter(), times.user + times.system + times.children_user + times.children_system


def since(start: tuple[float, float]) -> tuple[float, float]:
    """The seconds since a moment."""
    clock, processors = now()
    return clock - start[0], processors - start[1]


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
            measure_in_new_process("package", count, schedule, kernels, package, Path(folder) / "cache")
            for contender in CONTENDERS:
                seconds = []
                for repeat in range(repeats):
                    cache = Path(folder) / f"{contender}-{repeat}"
                    seconds.append(
                        [measure_in_new_process(contender, count, schedule, kernels, package, cache) for _ in range(2)]
                    )
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
        fewest = next(each for each in rows if each["contender"] == row["contender"])
        figures = [(row[key], row[key] / fewest[key]) for key in ("cold", "warm")]
        cells = (text for seconds, ratio in figures for text in (f"{seconds:.1f} s", f"{ratio:.2f}"))
        processors = (f"{row[key]:.1f} s" for key in ("cold_cpu", "warm_cpu"))
        table.add_row(row["contender"], str(row["layers"]), *cells, *processors)
    Console(width=110).print(table)


def measure_in_new_process(
    contender: str, layers: int, schedule: str, kernels: str, package: Path, cache: Path
) -> tuple[float, float]:
    """Run `measure` in a process of its own, with the cache in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    call = f"print(*measure({contender!r}, {layers}, {schedule!r}, {kernels!r}, Path({str(package)!r})))"
    code = f"from pathlib import Path\nfrom benchmarks.compile import measure\n{call}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    clock, processors = map(float, done.stdout.split()[-2:])
    return clock, processors


if __name__ == "__main__":
    typer.run(main)
