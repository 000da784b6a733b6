"""``pipegraph split`` and ``show``: what they print and what they leave on disk."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipegraph.codegen.expressions.operator_call import OperatorCall
from pipegraph.codegen.syntax.expressions import FunctionCall
from pipegraph.package import Package
from tests.cli.command import CHAIN, ROOT, Command


def test_split_echoes_the_stages(pipegraph: Command, tmp_path: Path) -> None:
    done = pipegraph("split", CHAIN, "--points", "layers.1,layers.3:end", "-o", tmp_path / "out", "--verbose")
    assert (done.code, done.err) == (0, "")
    *stages, fixed, batch, layout, wrote = done.out.splitlines()
    assert stages == ["stage 0: layers.0", "stage 1: layers.1 – layers.3", "stage 2: head"]
    assert re.fullmatch(r"x\.shape\[1\] is 8 in every batch: .*chain\.py:\d+: x = layer\(x\)", fixed)
    assert batch == "batch: x rows (0)"
    assert layout.split()[:2] == ["layout", "t|t*3|L"]
    assert wrote == f"wrote {tmp_path / 'out'}"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "__init__.py",
        "blocks.py",
        "model.safetensors.index.json",
        "pipeline.json",
        "stage-00000-of-00003.safetensors",
        "stage-00001-of-00003.safetensors",
        "stage-00002-of-00003.safetensors",
        "stage_0.py",
        "stage_1.py",
        "stage_2.py",
        "weights.py",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


LOOP = """
import torch
from torch import nn


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.RNNCell(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        state = x[:, 0]
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)


model = Loop()
example_inputs = (torch.ones(2, 5, 4),)
"""


def test_a_number_of_steps_is_said_to_be_fixed_only_if_it_is(pipegraph: Command, tmp_path: Path) -> None:
    """A stage that begins inside the loop takes one value for each step that is left."""
    (tmp_path / "loop.py").write_text(LOOP)
    at_head = pipegraph("split", tmp_path / "loop.py", "--points", "head", "-o", tmp_path / "behind")
    inside = pipegraph("split", tmp_path / "loop.py", "--stages", 2, "--balance", "uniform", "-o", tmp_path / "inside")
    assert (at_head.code, inside.code) == (0, 0)
    assert "x.shape[1] is 5 in every batch: " not in at_head.out
    assert "x.shape[1] is 5 in every batch: " in inside.out


def test_names_are_printed_on_one_line(pipegraph: Command) -> None:
    done = pipegraph("split", "tests/models/hostile_names.py", "--points", "head", "--dry-run")
    assert (done.code, len(done.out.splitlines())) == (0, 4)
    assert "layers.new\\nline" in done.out


def test_dry_run_writes_nothing(pipegraph: Command, tmp_path: Path) -> None:
    done = pipegraph("split", CHAIN, "--stages", 2, "--dry-run", "-o", tmp_path / "out")
    # Stages, a fixed size, the batch, the step; an empty line and nine of memory.
    assert (done.code, len(done.out.splitlines())) == (0, 16)
    assert list(tmp_path.iterdir()) == []


def test_rows_of_a_microbatch_are_those_that_are_asked_for(pipegraph: Command, tmp_path: Path) -> None:
    assert pipegraph("split", CHAIN, "--stages", 2, "--batch", 12, "-o", tmp_path / "out").code == 0
    manifest = json.loads((tmp_path / "out/pipeline.json").read_text())
    assert manifest["sizes"]["batch"]["captured"] == 12


def test_without_weights_no_parameter_is_written(pipegraph: Command, tmp_path: Path) -> None:
    assert pipegraph("split", CHAIN, "--stages", 2, "--no-weights", "-o", tmp_path / "out").code == 0
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"] == {}


def test_default_folder_is_named_after_the_model(
    pipegraph: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert pipegraph("split", ROOT / CHAIN, "--points", "layers.2").out.splitlines()[-1] == "wrote build/chain"
    config = json.loads((ROOT / "tests/models/tied_llama/config.json").read_text())
    folder = tmp_path / "small_llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    done = pipegraph("split", f"hf:{folder}", "--points", "model.norm")
    assert done.out.splitlines()[-1] == "wrote build/small_llama"


def test_split_json(pipegraph: Command, tmp_path: Path) -> None:
    result = json.loads(pipegraph("split", CHAIN, "--points", "layers.2", "-o", tmp_path / "out", "--json").out)
    validation = result["validation"]
    assert 0 < validation["seconds"] < 10 and validation["capture_seconds"] > 0 and validation["writing_seconds"] > 0
    assert validation["plainer"] == {} and validation["reasons"] == []
    assert (result["schema_version"], result["points"]) == (1, ["layers.2"])
    assert [stage["holds"] for stage in result["stages"]] == ["layers.0 – layers.1", "layers.2 – layers.3, head"]
    assert result["stages"][1]["inputs"] == result["stages"][0]["outputs"]
    assert result["stages"][0]["cost"]["parameters"] == 2 * (8 * 8 + 8)


def test_show(pipegraph: Command, chain: Path) -> None:
    done = pipegraph("show", chain, "--microbatches", 3, "--verbose")
    assert (done.code, done.err) == (0, "")
    value = json.loads(pipegraph("show", chain, "--json").out)["stages"][0]["outputs"][0]
    assert done.out.splitlines() == [
        "Chain of chain.py in 2 stages",
        "",
        "stage  holds                      parameters    forward  weights",
        "    0  layers.0 – layers.1               144  1.0 kFLOP  stage-00000-of-00002.safetensors",
        "    1  layers.2 – layers.3, head         162  1.2 kFLOP  stage-00001-of-00002.safetensors",
        "",
        "boundary  tensor             from     to       microbatch  gradient",
        "x         float32[batch, 8]  caller   stage 0       128 B  no",
        f"{value:<8}  float32[batch, 8]  stage 0  stage 1       128 B  yes",
        "",
        "layout     tt|ttL (for --points: E what runs before the layers, t a layer, L what runs after them)",
        "",
        "batch: x rows (0)",
        "",
        "1f1b: 2 ranks, 2 stages, 3 microbatches",
        "rank 0  0F0 0F1         0B0──── 0F2 0B1────     0B2────",
        "rank 1      1F0 1B0──── 1F1 1B1──── 1F2 1B2────",
    ]


def test_show_json(pipegraph: Command, chain: Path) -> None:
    result = json.loads(pipegraph("show", chain, "--schedule", "gpipe", "--json").out)
    assert result["schema_version"] == 1
    assert result["edited"] == result["missing"] == []
    assert result["schedule"]["ranks"][1] == ["1F0", "1F1", "1B0", "1B1"]
    assert [value["bytes"] for value in result["boundaries"]] == [128, 128]


def test_show_lists_edited_and_missing_files(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(chain, tmp_path / "copied"))
    (copied / "stage_0.py").unlink()
    (copied / "stage-00001-of-00002.safetensors").unlink()
    with (copied / "stage_1.py").open("a") as file:
        file.write("# mine\n")
    listing = pipegraph("show", copied)
    lines = listing.out.splitlines()
    assert listing.code == 2 and "stage-00001-of-00002.safetensors, stage_0.py are missing" in listing.err
    assert "edited since it was written: stage_1.py" in lines
    assert "missing: stage-00001-of-00002.safetensors, stage_0.py" in lines


def test_relayed_values_go_to_the_next_stage_alone(pipegraph: Command, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ("split", "tests/models/skipping.py", "--points", "middle,norm", "-o", out)
    assert pipegraph(*command).code == 0
    assert (0, 2) in Package.open(out).manifest.edges()
    assert pipegraph(*command, "--relay-skips", "--overwrite").code == 0
    assert Package.open(out).manifest.edges() == ((0, 1), (1, 2))


def test_several_stages_on_a_rank_are_told(pipegraph: Command) -> None:
    """`--stages 2` with a schedule that places two stages on each rank is a pipeline of one."""
    command = ("split", "tests/models/chain.py", "--dry-run", "--microbatches", 4)
    done = pipegraph(*command, "--stages", 2, "--schedule", "zb-v")
    assert "2 stages on 1 rank under zb-v (for 2 ranks: --stages 4)" in done.out.splitlines(), done.out + done.err
    done = pipegraph(*command, "--stages", 4, "--schedule", "zb-v")
    assert "4 stages on 2 ranks under zb-v (for 4 ranks: --stages 8)" in done.out.splitlines()
    assert " under 1f1b" not in pipegraph(*command, "--stages", 2).out


def test_source_that_is_not_the_model_is_not_written(
    pipegraph: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = OperatorCall.function

    def function(self: OperatorCall, name: str, *positional: Any, **named: Any) -> FunctionCall:
        return original(self, name.replace("F.relu", "F.silu"), *positional, **named)

    monkeypatch.setattr(OperatorCall, "function", function)
    model = tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        return self.b(torch.nn.functional.relu(self.a(x)) + x)\n\n\n"
        "def build_model():\n    return Net()\n\n\nexample_inputs = (torch.randn(3, 4),)\n"
    )
    result = pipegraph("split", model, "--points", "b", "-o", tmp_path / "out")
    assert result.code == 3
    assert "aten.relu" in result.err and "model.py:11" in result.err and "Try:" in result.err
    assert not (tmp_path / "out").exists()


EVALUATED = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).eval()
example_inputs = (torch.randn(2, 4),)
"""


def test_a_model_in_evaluation_mode_is_said_to_be(pipegraph: Command, tmp_path: Path) -> None:
    """Its stages are so, too, and would train without dropout."""
    (tmp_path / "model.py").write_text(EVALUATED)
    done = pipegraph("split", tmp_path / "model.py", "--points", "2", "-o", tmp_path / "out")
    assert done.code == 0
    assert "evaluation mode" in done.out
    assert "pipe.train()" in done.out
    (tmp_path / "model.py").write_text(EVALUATED.replace(".eval()", ""))
    done = pipegraph("split", tmp_path / "model.py", "--points", "2", "-o", tmp_path / "out", "--overwrite")
    assert "evaluation mode" not in done.out
