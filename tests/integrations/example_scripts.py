"""Running the examples, killing them, and reading what they logged."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest

FOLDER = Path(__file__).parents[2] / "examples/integrations"
FIGURES = ("loss", "grad_norm", "learning_rate", "eval_loss")


def load(name: str) -> ModuleType:
    """An example as a module."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def _command(name: str, ranks: int, *folders: Path) -> list[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return [sys.executable, *torchrun, str(FOLDER / f"{name}.py"), *map(str, folders)]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER.parents[1])}


def run(name: str, ranks: int, *folders: Path) -> str:
    """Run an example to its end; returns what it printed."""
    command = _command(name, ranks, *folders)
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, timeout=290)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_killed(name: str, ranks: int, out: Path, file: Path) -> None:
    """Run an example until a file is there, and kill all of its processes."""
    process = psutil.Popen(_command(name, ranks, out), env=_environment())
    deadline = time.monotonic() + 200
    try:
        while not file.exists() and time.monotonic() < deadline:
            assert process.poll() is None, f"it ends before {file}"
            time.sleep(0.1)
    finally:
        # torchrun starts each rank in a session of its own, so that a signal to its process group does not reach them.
        processes = [*process.children(recursive=True), process]
        for rank in processes:
            rank.kill()
        psutil.wait_procs(processes, timeout=10)
    assert file.exists()


def history(out: Path) -> list[dict[str, float]]:
    """The log of the newest checkpoint of a Trainer."""
    newest = max((out / "runs").glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    logs: list[dict[str, float]] = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    return logs


def assert_same(logs: list[dict[str, float]], expected_logs: list[dict[str, float]]) -> None:
    """Compare losses and learning rates, step by step."""
    for name in FIGURES:
        curve = {log["step"]: log[name] for log in logs if name in log}
        expected_curve = {log["step"]: log[name] for log in expected_logs if name in log}
        assert curve == pytest.approx(expected_curve, rel=1e-5 if name != "grad_norm" else 1e-4), name
