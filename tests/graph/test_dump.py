"""``PIPEGRAPH_DUMP=DIR`` writes every form that a model goes through, in order, and the same twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pipegraph
from pipegraph import debug as module_of_debug
from pipegraph.debug import dump
from pipegraph.graph.pass_order import PASSES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIPEGRAPH_DUMP", str(tmp_path / "forms"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(module_of_debug, "_numbers", {})
    return tmp_path / "forms"


def test_forms_are_numbered_in_order(folder: Path) -> None:
    captured = pipegraph.capture(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.ones(2, 4),))
    pipegraph.plan(captured, points=["2"])
    names = ["export", *(rewrite.__name__ for rewrite in PASSES), "settle_fixed_modes", "segments", "marked", "stages"]
    assert sorted(file.name for file in folder.iterdir()) == [f"{i:02d}_{name}.txt" for i, name in enumerate(names)]
    name = "follow_created_dtypes"
    first, *lines = (folder / f"{names.index(name):02d}_{name}.txt").read_text().splitlines()
    assert re.fullmatch(r"# follow_created_dtypes: [\d.]+ [mµn]?s", first)
    assert lines[-2:] == [
        "linear_1 = aten.linear.default(relu, p_2_weight, p_2_bias)    # f32[batch, 2]  2  requires_grad",
        "return (linear_1,)",
    ]
    stages = (folder / f"{names.index('stages')}_stages.txt").read_text()
    assert stages.startswith(
        "# boundaries\ninput_1: f32[batch, 4]  stage -1 -> stages [0]\nrelu: f32[batch, 4]  stage 0"
    )
    assert "# stage 1(relu,) -> (linear_1,)" in stages


def test_two_captures_differ_only_in_times(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for directory in (folder, folder.with_name("again")):
        monkeypatch.setenv("PIPEGRAPH_DUMP", str(directory))
        pipegraph.capture(nn.Linear(4, 4), (torch.ones(2, 4),))
        texts.append([re.sub(r": [\d.]+ [mµn]?s\n", "\n", file.read_text()) for file in sorted(directory.iterdir())])
    assert texts[0] == texts[1]


def test_a_rank_has_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    dump("joint graph of layers/0", "text")
    assert (folder / "rank_03/00_joint_graph_of_layers_0.txt").read_text() == "text\n"


def test_a_text_is_made_only_if_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPEGRAPH_DUMP", raising=False)
    dump("anything", lambda: pytest.fail("made"))
