"""Lines of source, seconds and memory to split the largest Llama, from its configuration and without weights.

python -m benchmarks.large [--stages 16] [--seq 8192] [--json]

Llama 3.1 with 405 B parameters is split by the command line in a separate process, once whole and once with 32 of
its 126 layers: layers are loops in the source, so depth adds hardly any lines. Seconds and memory are those of the
whole process, imports included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.planner_scale import LLAMA_405B


@dataclass(frozen=True)
class SplitMeasurement:
    """One split: lines of Python in the package, wall-clock and CPU seconds, and the largest resident memory in MB."""

    layers: int
    lines: int
    seconds: float
    cpu_seconds: float
    peak_mb: float


def measure(layers: int, stages: int, seq: int) -> SplitMeasurement:
    """Split a Llama of this many layers as a user would, in a process that does nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "out")
        config.write_text(json.dumps(LLAMA_405B | {"num_hidden_layers": layers}))
        options = ["--stages", str(stages), "--seq", str(seq), "--no-weights", "-o", str(out)]
        started = time.perf_counter()
        split = subprocess.Popen(
            [sys.executable, "-m", "pipegraph", "split", f"hf:{config}", *options], stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(split.pid, 0)
        seconds = time.perf_counter() - started
        split.returncode = os.waitstatus_to_exitcode(status)
        if split.returncode:
            raise SystemExit(split.returncode)
        lines = sum(len(file.read_text().splitlines()) for file in out.glob("*.py"))
    return SplitMeasurement(layers, lines, seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6)


def main(
    stages: int = 16,
    seq: Annotated[int, typer.Option(help="Tokens of a microbatch.")] = 8192,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure 32 and 126 layers."""
    splits = [measure(layers, stages, seq) for layers in (32, LLAMA_405B["num_hidden_layers"])]
    if as_json:
        print(json.dumps([asdict(split) for split in splits], indent=1))
        return
    table = Table("layers", "lines", "s", "CPU s", "MB", title=f"Llama 405 B in {stages} stages, {seq} tokens")
    for split in splits:
        figures = (f"{split.seconds:.1f}", f"{split.cpu_seconds:.1f}", f"{split.peak_mb:.0f}")
        table.add_row(str(split.layers), str(split.lines), *figures)
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
