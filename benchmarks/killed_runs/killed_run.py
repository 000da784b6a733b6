"""One training run under torchrun that continues by itself, and the moments at which a rank of it is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipegraph.workflows.run_checkpoints import LOG, read_log

RANKS: Final = 2
RESTARTS: Final = 3
STEPS: Final = 300
_SAVED_EVERY: Final = 20
_POLL_SECONDS: Final = 0.001
_RUN_SECONDS: Final = 300.0
_START_SECONDS: Final = 10.0
_PARTIAL: Final = ".step-*.partial"


@dataclass(frozen=True)
class Kill:
    """A rank is sent SIGKILL `delay` seconds after a moment.

    Attributes:
        moment: "start" of the ranks; a "step" that is done; or "saving", when the next checkpoint is being written.
        step: from which step on, of the steps that the log has.
    """

    rank: int
    moment: str
    step: int
    delay: float

    def __str__(self) -> str:
        suffix = "" if self.moment == "start" else f" after step {self.step}"
        return f"rank {self.rank} at {self.moment}{suffix} + {self.delay * 1000:.0f} ms"


def draw(chance: random.Random, kills: int) -> list[Kill]:
    """Draw `kills` kills at random, in the order in which they come."""
    planned_kills = []
    for step in sorted(chance.randrange(STEPS - _SAVED_EVERY) for _ in range(kills)):
        moment = chance.choice(("start", "step", "saving", "saving"))
        longest = {"start": _START_SECONDS, "step": 0.02, "saving": 0.05}[moment]
        planned_kills.append(Kill(chance.randrange(RANKS), moment, step, chance.uniform(0, longest)))
    return planned_kills


@dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        losses: of each step that the log has, in its order.
        struck: the kills that came in time.
    """

    code: int
    losses: list[float]
    struck: list[Kill]
    output: str


def run(package: Path, model: Path, folder: Path, kills: list[Kill], environment: Mapping[str, str]) -> Ended:
    """Train, and kill ranks meanwhile. No process outlives the call."""
    folder.mkdir(parents=True)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    torchrun += ["--max-restarts", str(RESTARTS)]
    options = ["--model", str(model), "--steps", str(STEPS), "--microbatches", "4", "--kernels", "eager"]
    options += ["--checkpoint", str(folder / "run"), "--checkpoint-every", str(_SAVED_EVERY), "--timeout", "60"]
    command = [sys.executable, "-m", *torchrun, "-m", "pipegraph", "run", str(package), *options]
    struck: list[Kill] = []
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment})
        try:
            deadline = time.monotonic() + _RUN_SECONDS
            coming, killed = iter(kills), set[int]()
            for kill in coming:
                pid = _strike(kill, process, folder / "run", killed, deadline)
                if pid is None:
                    break
                killed.add(pid)
                struck.append(kill)
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            for pid in [*_ranks(process.pid).values(), process.pid]:
                if process.poll() is None:
                    os.kill(pid, signal.SIGKILL)
            code = process.wait()
    losses = [line["loss"] for line in read_log(folder / "run") if "loss" in line]
    return Ended(code, losses, struck, (folder / "output").read_text(errors="replace"))


def _strike(
    kill: Kill, process: subprocess.Popen[bytes], folder: Path, killed: set[int], deadline: float
) -> int | None:
    """Wait for the moment and kill. Returns the process that is gone; None if the run ended before."""
    for ranks in _living(process, killed, deadline):
        if len(ranks) == RANKS and _has_come(kill, folder):
            time.sleep(kill.delay)
            try:
                os.kill(ranks[kill.rank], signal.SIGKILL)
            except ProcessLookupError:
                return None
            return ranks[kill.rank]
    return None


def _living(process: subprocess.Popen[bytes], killed: set[int], deadline: float) -> Iterator[dict[int, int]]:
    """Again and again, the processes of the ranks that were started after the last kill, until the run ends."""
    while process.poll() is None and time.monotonic() < deadline:
        ranks = _ranks(process.pid)
        if not killed & {*ranks.values()}:
            yield ranks
        time.sleep(_POLL_SECONDS)


def _has_come(kill: Kill, folder: Path) -> bool:
    if kill.moment == "start":
        return True
    try:
        done = (folder / LOG).read_bytes().count(b'"loss"')
    except FileNotFoundError:
        return False
    return done > kill.step and (kill.moment == "step" or any(folder.glob(_PARTIAL)))


def _ranks(launcher: int) -> dict[int, int]:
    """The processes that a launcher has started, by their ranks."""
    processes = {}
    try:
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    except OSError:
        return {}
    for child in children:
        try:
            pairs = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((pair.removeprefix(b"RANK=") for pair in pairs if pair.startswith(b"RANK=")), None)
        if rank is not None:
            processes[int(rank)] = int(child)
    return processes
