"""The command: `python -m benchmarks.faults --tries 60 --seed 0`.

Each try runs `pipegraph run`, or torchrun with it, on two to four ranks; a random one sends itself SIGKILL, SIGSTOP,
SIGTERM or SIGINT: before it is connected, while it compiles, in a forward, a backward, the optimizer, or while it saves
a profile or a checkpoint. A try passes if all other ranks are gone within 10 s (for SIGSTOP 10 s and the timeout), the
right rank is named, no process and no temporary file is left, and every checkpoint under its name is whole. Prints how
many passed, and exits with 1 if one did not.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

import pipegraph
from benchmarks.faults.fault_try import SCHEDULES, draw


def write_package(stages: int, folder: Path) -> Path:
    """A package of `stages` stages."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(stages)]
    captured = pipegraph.capture(nn.Sequential(*layers), (torch.randn(16, 64),))
    out = folder / f"package-{stages}"
    pipegraph.write_package(pipegraph.plan(captured, points=[str(index) for index in range(1, stages)]), out)
    return out


def main(
    tries: int = 60,
    seed: int = 0,
    only: Annotated[str, typer.Option(help="Only the try of this number.")] = "",
    timeout: Annotated[float, typer.Option(help="seconds that a rank waits for another one")] = 20.0,
) -> None:
    """Send a random rank a signal at a random moment, again and again."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored, by children too
    passed = total = 0
    with tempfile.TemporaryDirectory(prefix="pipegraph-faults-") as name:
        folder = Path(name)
        packages: dict[int, Path] = {}
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        compiled = set[tuple[str, ...]]()
        for number in range(tries):
            if only and str(number) != only:
                continue
            outcome = None
            for again in range(5):  # until the signal comes in time
                try_folder = folder / f"{number}-{again}"
                try_folder.mkdir()
                fault_try = draw(random.Random(f"{seed} {number} {again}"), timeout, try_folder)
                stages = fault_try.ranks * SCHEDULES[fault_try.schedule]
                if stages not in packages:
                    packages[stages] = write_package(stages, folder)
                command = (str(packages[stages]), *fault_try.options)
                if fault_try.fault.moment == "compilation" and command not in compiled:
                    # So that it takes seconds then: a rank that compiles waits for nobody, and notices nothing.
                    arguments = [sys.executable, "-m", "pipegraph", "run", *command, "--nproc", "1"]
                    subprocess.run(arguments, env={**os.environ, **environment}, check=True, capture_output=True)
                    compiled.add(command)
                start = time.monotonic()
                outcome = fault_try.run(packages[stages], try_folder, environment)
                if outcome is not None:
                    break
            total += 1
            passed += outcome == ""
            verdict = outcome if outcome is not None else "the signal never came in time"
            typer.echo(f"{number} {fault_try}: {verdict or 'passed'} ({time.monotonic() - start:.0f} s)")
    typer.echo(f"{passed} of {total} tries passed")
    raise typer.Exit(0 if passed == total else 1)


if __name__ == "__main__":
    typer.run(main)
