"""Time of the first step as layers are added, compared with torch.compile of whole stages.

python -m benchmarks.compile [--layers 4 --layers 16 --layers 32] [--schedule zb-h1] [--repeats 1] [--json FILE]

A small Llama is cut in two; both stages and the loss run in one process with one thread. Each measurement is a fresh
process with an empty Inductor cache (the headers that Inductor compiles once on a machine are there). The clock
starts when model and package are loaded and stops at the end of the first step: forward and backward of two
microbatches. The second figure is that of the next process, which finds the cache filled. Capture and writing the
package are not part of it.
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


def measure(contender: str, layers: int, schedule: str, kernels: str, package: Path) -> float:
    """Seconds to the end of the first step, in this process."""
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
        return 0.0
    if contender == "pipegraph":
        start = time.perf_counter()
        pipegraph.Pipeline(package, schedule, MICROBATCHES, case.loss, kernels=kernels).step(tokens, target=targets)
        return time.perf_counter() - start
    first, last = case.parts(case.build(), case.even(2))
    start = time.perf_counter()
    begin = torch.compile(first, dynamic=False)
    end = torch.compile(lambda h, wanted: case.loss(last(h), wanted), dynamic=False)
    for some, wanted in zip(tokens.split(case.rows), targets.split(case.rows), strict=True):
        (end(begin(some), wanted) / MICROBATCHES).backward()
    return time.perf_counter() - start


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
                cold, warm = (median(column) for column in zip(*seconds, strict=True))
                rows.append({"contender": contender, "layers": count, "cold": cold, "warm": warm})
                print(f"{contender}, {count} layers: {cold:.1f} s, with a filled cache {warm:.1f} s", file=sys.stderr)
    if as_json:
        document = {"schema_version": 1, "schedule": schedule, "kernels": kernels, "rows": rows}
        as_json.write_text(json.dumps(document, indent=2) + "\n")
    table = Table("contender", "layers", "first step", "÷ fewest layers", "filled cache", "÷ fewest layers")
    for row in rows:
        fewest = next(each for each in rows if each["contender"] == row["contender"])
        figures = [(row[key], row[key] / fewest[key]) for key in ("cold", "warm")]
        cells = (text for seconds, ratio in figures for text in (f"{seconds:.1f} s", f"{ratio:.2f}"))
        table.add_row(row["contender"], str(row["layers"]), *cells)
    Console(width=110).print(table)


def measure_in_new_process(
    contender: str, layers: int, schedule: str, kernels: str, package: Path, cache: Path
) -> float:
    """Run `measure` in a process of its own, with the cache in a folder."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    call = f"print(measure({contender!r}, {layers}, {schedule!r}, {kernels!r}, Path({str(package)!r})))"
    code = f"from pathlib import Path\nfrom benchmarks.compile import measure\n{call}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    typer.run(main)
