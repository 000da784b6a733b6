"""One run with a fault: what is injected, and how the run has to end."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from pipegraph.errors import CheckpointError
from pipegraph.runtime.checkpoint.folder import candidates, check_files, read_index

HOOK: Final = Path(__file__).parent / "hook"
SIGNALS: Final = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGINT)
SCHEDULES: Final = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "zb-v": 2}  # name → stages of a rank
DELAYS: Final = {  # moment → how many seconds after its beginning the signal may come
    "connection": 4.0,
    "compilation": 3.0,
    "forward": 0.005,
    "backward": 0.005,
    "optimizer": 0.005,
    "saving": 0.1,
    "checkpoint": 0.1,
}
STEPS: Final = 4
SECONDS: Final = 10.0
"""How long the others may take to end after a death, or after the timeout of a rank that is stopped."""
_END_SECONDS: Final = 180.0  # until a launcher counts as hung; torchrun gives a stopped rank 30 s to end


@dataclass(frozen=True)
class Fault:
    """A signal that a rank sends itself, `delay` seconds after the `call`th beginning of the moment."""

    rank: int
    moment: str
    call: int
    delay: float
    signal: int
    file: str
    claimed: str


@dataclass(frozen=True)
class FaultTry:
    """A run with a fault."""

    launcher: str
    ranks: int
    schedule: str
    timeout: float
    fault: Fault

    def __str__(self) -> str:
        name = signal.Signals(self.fault.signal).name
        return (
            f"{self.launcher}, {self.ranks} ranks, {self.schedule}: {name} of rank {self.fault.rank}, "
            f"{self.fault.moment} {self.fault.call} + {self.fault.delay * 1000:.0f} ms"
        )

    @property
    def options(self) -> list[str]:
        """What is run."""
        kernels = "inductor" if self.fault.moment == "compilation" else "eager"
        return ["--schedule", self.schedule, "--microbatches", "8", "--kernels", kernels]

    def run(self, package: Path, folder: Path, environment: Mapping[str, str]) -> str | None:
        """Return what was wrong; empty if nothing; None if the run was over before the signal came."""
        temporary = folder / "tmp"
        temporary.mkdir()
        variables = {
            "PYTHONPATH": str(HOOK),
            "PIPEGRAPH_FAULT": json.dumps(asdict(self.fault)),
            "TMPDIR": str(temporary),
            "OMP_NUM_THREADS": "1",
        }
        options = [*self.options, "--steps", str(STEPS)]
        if self.fault.moment == "saving":
            options += ["--profile", str(folder / "runs")]
        checkpoints = folder / "checkpoints"
        if self.fault.moment == "checkpoint":
            options += ["--checkpoint", str(checkpoints), "--checkpoint-every", "1"]
        command = ["-m", "pipegraph", "run", str(package), *options, "--timeout", str(self.timeout)]
        if self.launcher == "torchrun":
            command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks), *command]
        output = folder / "output"
        variables = {**os.environ, **environment, **variables}
        with output.open("w") as file:
            process = subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT, env=variables)
            watch = _Watch(process, self.fault.file)
            try:
                watch.until_the_end()
            finally:
                survivors = watch.kill_all()
        text = output.read_text(errors="replace")
        if watch.struck is None:
            return None if process.returncode == 0 else f"failed before the signal\n{text}"
        wrong = [f"rank {rank} lived on" for rank in survivors]
        limit = SECONDS + (self.timeout if self.fault.signal == signal.SIGSTOP else 0)
        if self.fault.signal != signal.SIGSTOP and watch.died is None:
            wrong.append(f"rank {self.fault.rank} did not die of the signal")
        elif (took := watch.others_gone - (watch.died or watch.struck)) > limit:
            wrong.append(f"the others were gone after {took:.1f} s")
        if process.returncode == 0:
            wrong.append("the run succeeded")
        if not self._is_blamed(text):
            wrong.append(f"rank {self.fault.rank} is not named")
        torchs = ("torchelastic_", "torchinductor_")  # its logs and its cache
        files = [path.name for path in temporary.iterdir() if not path.name.startswith(torchs)]
        if files:
            wrong.append(f"files left: {', '.join(files)}")
        wrong += map(str, _damaged(checkpoints))
        return f"{'; '.join(wrong)}\n{text}" if wrong else ""

    def _is_blamed(self, output: str) -> bool:
        """Whether the output names the rank, and no other, as the one that failed first."""
        rank = self.fault.rank
        if self.fault.signal == signal.SIGSTOP:
            last = output[output.rfind("error: ") :] if self.launcher == "pipegraph" else output
            silent = re.findall(
                r"No word from (.*?): it|^(?:error: )?(rank .*?) did not (?:come|end)", last, re.MULTILINE
            )
            return bool(silent) and all("".join(groups) == f"rank {rank}" for groups in silent)
        if self.launcher == "torchrun":
            cause = re.search(r"Root Cause.*?rank +: (\d+)", output, re.DOTALL)
        else:
            cause = re.search(r"^error: rank (\d+)", output, re.MULTILINE)
        return cause is not None and int(cause[1]) == rank


class _Watch:
    """The processes of a run, found by the fault in their environment."""

    def __init__(self, process: subprocess.Popen[bytes], file: str) -> None:
        self._process = process
        self._file = Path(file)
        self._mark = os.fsencode(json.dumps(file))
        self._ranks: dict[int, str] = {}
        self.struck: float | None = None
        self.died: float | None = None
        self.others_gone = time.time()

    def until_the_end(self) -> None:
        end, target = time.time() + _END_SECONDS, 0
        while self._process.poll() is None and time.time() < end:
            self._find()
            now = time.time()
            if self.struck is None and self._file.exists() and (text := self._file.read_text().split())[1:]:
                target, self.struck = int(text[0]), float(text[1])
            alive = [pid for pid in self._ranks if _is_alive(pid)]
            if target and self.died is None and target not in alive:
                self.died = now
            if any(pid != target for pid in alive):
                self.others_gone = now
            time.sleep(0.05)

    def kill_all(self) -> list[str]:
        """Kill what is left. Return the ranks of those that are alive though the launcher has ended."""
        time.sleep(1.0)  # children of ranks see their parents' end
        self._find()
        live_pids = [pid for pid in self._ranks if _is_alive(pid)]
        for pid in live_pids:
            os.kill(pid, signal.SIGKILL)
        is_hung = self._process.poll() is None
        self._process.kill()
        self._process.wait()
        return [*(self._ranks[pid] for pid in live_pids), *(["the launcher's own"] if is_hung else [])]

    def _find(self) -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal() and int(entry.name) not in self._ranks:
                try:
                    pairs = (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                environment = dict(pair.split(b"=", 1) for pair in pairs if b"=" in pair)
                if b"RANK" in environment and self._mark in environment.get(b"PIPEGRAPH_FAULT", b""):
                    self._ranks[int(entry.name)] = os.fsdecode(environment[b"RANK"])


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def _damaged(checkpoints: Path) -> Iterator[CheckpointError]:
    """What is wrong with folders that have the name of a whole checkpoint."""
    for place in candidates(checkpoints):
        try:
            index = read_index(place)
            check_files(place, index.files, list(index.files))
        except CheckpointError as error:
            yield error


def draw(chance: random.Random, timeout: float, folder: Path) -> FaultTry:
    """A try at random."""
    ranks, moment = chance.randint(2, 4), chance.choice(list(DELAYS))
    calls = {"connection": 1, "compilation": 1, "optimizer": STEPS, "saving": 1, "checkpoint": STEPS}
    # A run that saves checkpoints answers SIGTERM: it saves one and leaves.
    signals = [candidate for candidate in SIGNALS if moment != "checkpoint" or candidate != signal.SIGTERM]
    fault = Fault(
        rank=chance.randrange(ranks),
        moment=moment,
        call=chance.randint(1, calls.get(moment, 8 * STEPS)),
        delay=chance.uniform(0, DELAYS[moment]),
        signal=int(chance.choice(signals)),
        file=str(folder / "struck"),
        claimed=str(folder / "claimed"),
    )
    return FaultTry(chance.choice(("pipegraph", "torchrun")), ranks, chance.choice(list(SCHEDULES)), timeout, fault)
