"""Where memory is short: what is said would do does, and a byte less does not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipegraph.units import parse_bytes
from tests.cli.command import Command

MODEL = """
import torch
from torch import nn


class Tall(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


model = Tall()
example_inputs = (torch.randn(256, 256),)
"""
LEAST = r"(\d+) bytes\) would be enough, and no less"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four layers of 256 KiB of parameters, each of which keeps 256 KiB."""
    file = tmp_path / "tall.py"
    file.write_text(MODEL)
    return file


def test_split_names_the_smallest_limit(pipegraph: Command, model: Path) -> None:
    options = ("split", model, "--stages", 2, "--microbatches", 4, "--recompute", "none", "--dry-run")
    short = pipegraph(*options, "--memory", "1.5MiB")
    assert (short.code, short.out) == (3, "")
    assert "1.5 MiB on each rank" in short.err
    assert "recompute or smaller microbatches" in short.err
    assert "4 stages on 4 ranks" in short.err
    assert "With --recompute block" in short.err
    match = re.search(LEAST, short.err)
    assert match is not None
    least = int(match[1])
    done = pipegraph(*options, "--memory", least)
    assert (done.code, done.err) == (0, "")
    assert "on the fullest rank" in done.out
    assert f"{least} bytes) would be enough, and no less" in pipegraph(*options, "--memory", least - 1).err


def test_plan_names_the_closest(pipegraph: Command, model: Path) -> None:
    options = ("plan", model, "--ranks", 2, "--schedule", "1f1b,gpipe", "--microbatches", "4,8")
    short = pipegraph(*options, "--memory", "1.5MiB")
    assert (short.code, short.out) == (3, "")
    assert "1.5 MiB on each rank" in short.err and "1f1b with 2 stages" in short.err
    tried = re.search(r"Try: --memory ([^ ,]+), or more ranks", short.err)
    assert tried is not None
    assert pipegraph(*options, "--memory", tried[1]).code == 0
    assert pipegraph(*options, "--memory", int(0.998 * parse_bytes(tried[1]))).code == 3


def test_points_that_do_not_fit(pipegraph: Command, model: Path) -> None:
    options = ("split", model, "--points", "layers.3", "--dry-run")
    short = pipegraph(*options, "--memory", "2MiB")
    assert (short.code, short.out) == (3, "")
    assert "rank 0 needs" in short.err and "optimizer state" in short.err and " activations" in short.err
    tried = re.search(r"Try: --memory ([^ ,]+),", short.err)
    assert tried is not None
    assert pipegraph(*options, "--memory", tried[1]).code == 0


def test_a_parameter_that_fits_nowhere(pipegraph: Command, model: Path) -> None:
    large = model.with_name("large.py")
    large.write_text(
        MODEL.replace("nn.Linear(256, 256, bias=False)", "nn.Linear(512, 512, bias=False)").replace(
            "256, 256)", "256, 512)"
        )
    )
    done = pipegraph("plan", large, "--ranks", 4, "--memory", "1.5MiB")
    assert (done.code, done.out) == (3, "")
    assert "The largest parameter, layers.0.weight, takes 4.0 MiB with its gradient" in done.err
    assert "Try: --memory 5MiB, or shard the stage" in done.err
