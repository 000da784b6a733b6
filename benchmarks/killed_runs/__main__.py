"""The command: `python -m benchmarks.killed_runs --runs 20 --seed 0`.

Each run trains a tiny model on two ranks under `torchrun --max-restarts 3`; one to three times a random rank is killed:
while the ranks start, after a step, or while a checkpoint is written. It passes if it ends by itself with the losses of
the run that nobody killed, to the last digit. Prints how many passed, and exits with 1 if one did not.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import typer

import pipegraph
from benchmarks.killed_runs.killed_run import RESTARTS, STEPS, draw, run
from pipegraph.graph.sources import load

MODEL = Path(__file__).parents[2] / "tests/models/counting.py"


def write_package(folder: Path) -> Path:
    """The package of the model in two stages."""
    source = load(str(MODEL))
    plan = pipegraph.plan(pipegraph.capture(source.model, source.args), points=["layers.2"])
    return pipegraph.write_package(plan, folder / "package", source=source).path


def main(runs: int = 20, seed: int = 0) -> None:
    """Kill ranks of training runs at random moments, again and again."""
    passed = kills = 0
    with tempfile.TemporaryDirectory(prefix="pipegraph-killed-") as name:
        folder, environment = Path(name), {"OMP_NUM_THREADS": "1"}
        package = write_package(folder)
        alone = run(package, MODEL, folder / "alone", [], environment)
        if alone.code or len(alone.losses) != STEPS:
            raise SystemExit(f"the run that nobody killed failed:\n{alone.output}")
        for number in range(runs):
            chance = random.Random(f"{seed} {number}")
            start = time.monotonic()
            ended = run(package, MODEL, folder / str(number), draw(chance, chance.randint(1, RESTARTS)), environment)
            is_right = ended.code == 0 and ended.losses == alone.losses
            passed += is_right
            kills += len(ended.struck)
            verdict = "passed" if is_right else f"exit code {ended.code}, {len(ended.losses)} losses\n{ended.output}"
            typer.echo(f"{number} {'; '.join(map(str, ended.struck))}: {verdict} ({time.monotonic() - start:.0f} s)")
    typer.echo(f"{passed} of {runs} runs ended as the one that nobody killed; ranks were killed {kills} times")
    raise typer.Exit(0 if passed == runs else 1)


if __name__ == "__main__":
    typer.run(main)
