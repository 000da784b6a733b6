"""Two hundred steps whose lengths have a long tail, compared with torch.compile.

python -m benchmarks.lengths [--steps 200] [--rounds 1] [--json FILE]
python -m benchmarks.lengths --ratio 60     steps of one length, with kernels of this length and of all sizes in turns

The rows of a step are as long as its longest text. Lengths are log-normal (median 90, sigma 0.6), between 16 and 384
tokens, as those of a corpus of short texts are. Each contender trains a small Llama in a fresh process with one thread
and an empty Inductor cache: pipegraph with the stages of one process under `1f1b`, torch.compile with the unsplit
model, microbatch by microbatch. "padded" is padded to the longest text of all.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import pipegraph
from benchmarks.step.models import LlamaCase

SHORTEST, LONGEST, MEDIAN, SIGMA = 16, 384, 90, 0.6
CASE = LlamaCase(microbatches=2, rows=2, vocabulary=4096, layers=4, sequence=LONGEST)
CONTENDERS: dict[str, dict[str, Any]] = {
    "pipegraph": {},
    "pipegraph, dynamic=True": {"dynamic": True},
    "pipegraph, pad_to 64": {"pad_to": {"x_1": 64}, "dynamic": False},
    "torch.compile": {},
    "torch.compile, dynamic=True": {"dynamic": True},
    "torch.compile, padded": {"dynamic": False},
}


@dataclass(frozen=True)
class LengthMeasurement:
    """The seconds of one contender.

    Attributes:
        total: of all steps.
        first: of the first step.
        longest: of the longest step after it.
        median: of the second half of the steps.
        stalls: how many steps after the first took 1 s longer than that.
    """

    contender: str
    total: float
    first: float
    longest: float
    median: float
    stalls: int


def lengths(steps: int) -> list[int]:
    """The longest text of each step."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randn(steps, CASE.rows * CASE.microbatches, generator=generator) * SIGMA
    longest: list[int] = (texts.exp() * MEDIAN).clamp(SHORTEST, LONGEST).amax(1).int().tolist()
    return longest


def train(contender: str, steps: int) -> list[float]:
    """Run the steps of a contender. Return the seconds of each."""
    torch.set_num_threads(1)
    options, model = CONTENDERS[contender], CASE.build()
    step = (_pipegraph_step if contender.startswith("pipegraph") else _torch_step)(model, dict(options))
    seconds = []
    for length in lengths(steps):
        padded = LONGEST if contender.endswith("padded") else length
        generator = torch.Generator().manual_seed(length)
        tokens = torch.randint(0, CASE.vocabulary, (CASE.rows * CASE.microbatches, length), generator=generator)
        inputs, target = F.pad(tokens, (0, padded - length)), F.pad(tokens, (0, padded - length), value=-100)
        start = time.perf_counter()
        step(inputs, target)
        seconds.append(time.perf_counter() - start)
    return seconds


def _pipegraph_step(model: torch.nn.Module, options: dict[str, Any]) -> Callable[[Tensor, Tensor], object]:
    captured = pipegraph.capture(CASE.unsplit(model), (torch.zeros(CASE.rows, 64, dtype=torch.int64),))
    with tempfile.TemporaryDirectory() as folder:
        package = pipegraph.write_package(pipegraph.plan(captured, points=list(CASE.even(2))), Path(folder, "package"))
        pipe = pipegraph.Pipeline(package, "1f1b", CASE.microbatches, CASE.loss, **options)

    def step(inputs: Tensor, target: Tensor) -> object:
        pipe.zero_grad()
        return pipe.step(inputs, target=target)

    return step


def _torch_step(model: torch.nn.Module, options: dict[str, Any]) -> Callable[[Tensor, Tensor], object]:
    unsplit = CASE.unsplit(model)
    compiled = torch.compile(lambda inputs, target: CASE.loss(unsplit(inputs), target), **options)

    def step(inputs: Tensor, target: Tensor) -> None:
        unsplit.zero_grad()
        for microbatch, labels in zip(inputs.split(CASE.rows), target.split(CASE.rows), strict=True):
            (compiled(microbatch, labels) / CASE.microbatches).backward()

    return step


def ratio(rounds: int, length: int = 128) -> list[float]:
    """Seconds of a step with kernels for all sizes ÷ those of a step with kernels of one shape, of pairs of steps."""
    torch.set_num_threads(1)
    model = CASE.build()
    symbolic, static = (_pipegraph_step(model, {"dynamic": dynamic}) for dynamic in (True, False))
    tokens = torch.randint(0, CASE.vocabulary, (CASE.rows * CASE.microbatches, length))

    def seconds(step: Callable[[Tensor, Tensor], object]) -> float:
        start = time.perf_counter()
        step(tokens, tokens)
        return time.perf_counter() - start

    for step in (symbolic, static, symbolic, static):  # compiles
        step(tokens, tokens)
    return [seconds(symbolic) / seconds(static) for _ in range(rounds)]


def measure(contender: str, steps: int) -> LengthMeasurement:
    """Measure a contender in a fresh process."""
    code = f"import json\nfrom benchmarks.lengths import train\nprint(json.dumps(train({contender!r}, {steps})))"
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.run(
            [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
        )
    seconds = json.loads(process.stdout.splitlines()[-1])
    median = statistics.median(seconds[steps // 2 :])
    later = seconds[1:]
    stalls = sum(value > median + 1 for value in later)
    return LengthMeasurement(contender, sum(seconds), seconds[0], max(later), median, stalls)


def main(
    steps: int = 200,
    rounds: int = 1,
    pairs: Annotated[int, typer.Option("--ratio", help="Compare this many pairs of steps instead.")] = 0,
    as_json: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure all contenders, in turns."""
    if pairs:
        quartiles = statistics.quantiles(ratio(pairs), n=4)
        print("all sizes ÷ one shape: {1:.3f} (quartiles {0:.3f} and {2:.3f})".format(*quartiles))
        return
    measurements: dict[str, list[LengthMeasurement]] = {contender: [] for contender in CONTENDERS}
    for _ in range(rounds):
        for contender in CONTENDERS:
            measurements[contender].append(measure(contender, steps))
            print(measurements[contender][-1], file=sys.stderr)
    best = {contender: min(runs, key=lambda run: run.total) for contender, runs in measurements.items()}
    if as_json:
        rows = [asdict(run) for runs in measurements.values() for run in runs]
        as_json.write_text(json.dumps({"schema_version": 1, "steps": steps, "rows": rows}, indent=2) + "\n")
    table = Table("contender", f"{steps} steps", "first step", "longest later", "stalls", "median step")
    for run in best.values():
        figures = f"{run.total:.1f} s", f"{run.first:.1f} s", f"{run.longest:.1f} s", str(run.stalls)
        table.add_row(run.contender, *figures, f"{1000 * run.median:.0f} ms")
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
