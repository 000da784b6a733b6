"""Every example splits, computes what its model computes, and runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Command


def split_and_verify(pipegraph: Command, model: str, out: Path, *options: str) -> list[str]:
    """The stages as ``pipegraph split`` echoes them."""
    split = pipegraph("split", model, "-o", out, *options)
    assert (split.code, split.err) == (0, "")
    verified = pipegraph("verify", out, model)
    assert verified.code == 0, verified.out + verified.err
    assert "equal in training and evaluation mode" in verified.out
    return [line for line in split.out.splitlines() if line.startswith("stage ")]


@pytest.mark.slow  # README's commands split, verify and run the same model in two stages
def test_tiny_transformer(pipegraph: Command, tmp_path: Path) -> None:
    model = "examples/transformer.py:build_tiny_model"
    stages = split_and_verify(pipegraph, model, tmp_path / "out", "--points", "layers.2,layers.4,layers.6")
    assert len(stages) == 4
    ran = pipegraph("run", tmp_path / "out", "--kernels", "eager", "--nproc", 1, "--model", model, "--json")
    assert json.loads(ran.out)["ranks"] == 4


@pytest.mark.slow
def test_llama(pipegraph: Command, tmp_path: Path) -> None:
    stages = split_and_verify(pipegraph, "hf:examples/llama", tmp_path / "out", "--stages", "2")
    assert stages[0].startswith("stage 0: model.embed_tokens, model.layers.0 – ")
    manifest = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    assert manifest["tied"] == [["model.embed_tokens.weight", "lm_head.weight"]]


@pytest.mark.slow  # the pages split it as well
def test_unet(pipegraph: Command, tmp_path: Path) -> None:
    stages = split_and_verify(pipegraph, "examples/unet.py", tmp_path / "out", "--points", "down.2,up.1")
    assert stages[1] == "stage 1: down.2, bottom, up.0"
    manifest = json.loads((tmp_path / "out" / "pipeline.json").read_text())
    past = [value for value in manifest["values"].values() if value["producer"] == 0 and 2 in value["consumers"]]
    assert len(past) == 2  # the skips of the two upper levels go past stage 1
    ran = pipegraph(
        "run", tmp_path / "out", "--kernels", "eager", "--nproc", 1, "--model", "examples/unet.py", "--steps", 2
    )
    assert ran.code == 0, ran.err
    assert [line[:6] for line in ran.out.splitlines()[:3]] == ["step 0", "step 1", ""]
