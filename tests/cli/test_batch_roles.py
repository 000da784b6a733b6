"""``--batch-dim``: roles of inputs are declared, printed and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command

TIME_FIRST = """
import torch
from torch import nn


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), nn.Linear(8, 3))


example_inputs = (torch.randn(6, 4, 4),)
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "model.py"
    file.write_text(TIME_FIRST)
    return file


def test_a_model_that_mixes_rows_is_split_with_a_cure(pipegraph: Command, model: Path, tmp_path: Path) -> None:
    done = pipegraph("split", model, "--points", "2", "-o", tmp_path / "out")
    assert done.code == 0
    lines = done.out.splitlines()
    assert "batch: input rows (0)" in lines
    assert any(line.startswith("mixes the rows of a batch: scaled_dot_product_attention") for line in lines)
    assert any("--batch-dim input=1" in line for line in lines)
    done = pipegraph("run", tmp_path / "out", "--nproc", 1, "--kernels", "eager", "--microbatches", 2)
    assert done.code == 2
    assert "--batch-dim input=1" in done.err


def test_a_declared_dimension_is_recorded_and_verified(pipegraph: Command, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = pipegraph("split", model, "--points", "2", "--batch-dim", "input=1", "-o", out, "--json")
    assert json.loads(done.out)["batch"]["inputs"] == {"input": {"role": "rows", "dim": 1}}
    assert "batch: input rows (1)" in pipegraph("show", out).out.splitlines()
    assert json.loads(pipegraph("show", out, "--json").out)["batch"]["proof"] == "rules"
    done = pipegraph("verify", out, model)
    assert done.code == 0, done.err
    assert "rows, all different" in done.out


def test_a_model_file_declares_roles(pipegraph: Command, model: Path, tmp_path: Path) -> None:
    model.write_text(f"{TIME_FIRST}\nbatch_dims = {{'input': 1}}\n")
    done = pipegraph("split", model, "--points", "2", "--dry-run")
    assert "batch: input rows (1)" in done.out.splitlines()


@pytest.mark.parametrize(
    ("role", "code", "advice"),
    [
        ("input", 2, "tokens=0"),
        ("input=first", 2, "cu_seqlens=list"),
        ("x=1", 3, "Try: input."),
        ("input=3", 3, "whole"),
    ],
)
def test_a_role_that_does_not_fit_is_refused(
    pipegraph: Command, model: Path, tmp_path: Path, role: str, code: int, advice: str
) -> None:
    done = pipegraph("split", model, "--points", "2", "--batch-dim", role, "-o", tmp_path / "out")
    assert done.code == code
    assert advice in done.err
    assert not (tmp_path / "out").exists()
