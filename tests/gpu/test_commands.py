"""Commands with `--device cuda`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Result, program

MODEL = "examples/transformer.py:build_tiny_model"

pytestmark = pytest.mark.timeout(600)


def command(*arguments: object) -> Result:
    done = program("-m", "pipegraph", *arguments, timeout=300)
    assert done.code == 0, f"{done.out}\n{done.err}"
    return done


def test_split_run_and_report(tmp_path: Path) -> None:
    package, runs = tmp_path / "package", tmp_path / "runs"
    command("split", MODEL, "--points", "layers.4", "-o", package)
    alone = "--nproc", 1, "--model", MODEL, "--device", "cuda"
    done = command("run", package, *alone, "--steps", 3, "--microbatches", 4, "--schedule", "zb-h1")
    assert "loss" in done.out
    graphs = "--kernels", "eager", "--cuda-graphs"
    assert "loss" in command("run", package, *alone, *graphs, "--steps", 4, "--schedule", "zb-h1").out
    command("run", package, *alone, "--kernels", "eager", "--steps", 4, "--profile", runs)
    (run,) = runs.iterdir()
    assert "idle" in command("trace", "report", run).out


def test_checkpoints_go_on(tmp_path: Path) -> None:
    package, folder = tmp_path / "package", tmp_path / "run"
    command("split", MODEL, "--points", "layers.4", "-o", package)
    alone = "--nproc", 1, "--model", MODEL, "--device", "cuda", "--kernels", "eager", "--checkpoint", folder
    command("run", package, *alone, "--steps", 2)
    assert "continues from" in command("run", package, *alone, "--steps", 3).out


def test_calibrate(tmp_path: Path) -> None:
    profile = tmp_path / "gpu.json"
    command("calibrate", "--device", "cuda", "-o", profile)
    figures = json.loads(profile.read_text())
    assert figures["peak_flops"]["bfloat16"] > figures["peak_flops"]["float32"] > 1e12


@pytest.mark.parametrize("balance", ["measured", "auto"])
def test_plan(balance: str) -> None:
    options = "--recompute", "min-cut", "--balance", balance  # measured takes minutes for every choice of recompute
    done = command("plan", MODEL, "--ranks", 2, "--device", "cuda", "--hardware", "h100", *options)
    assert "stage" in done.out
