"""``pipegraph verify``: equal, different, and why."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.command import ROOT, Command

MODELS = {
    "batch_norm": "layers.2",
    "buffers": "layers.1,layers.3",
    "chain": "layers.1,layers.2,layers.3",
    "dropout": "layers.2",
    "hostile_names": "head",
    "late_input": "layers.2",
    "llama": "model.layers.1,model.layers.3",
    "masked": "layers.1,layers.3",
    "nested_values": "layers.1",
    "rotary": "layers.2,layers.4",
    "t5": "t5.encoder.block.2,t5.decoder.block.1",
}


# tests/codegen/test_parity.py compares the others too.
QUICK = ("batch_norm", "chain", "dropout", "hostile_names", "late_input")


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in MODELS]
)
def test_package_computes_what_the_model_computes(pipegraph: Command, tmp_path: Path, model: str) -> None:
    file = f"tests/models/{model}.py"
    split = pipegraph("split", file, "--points", MODELS[model], "-o", tmp_path / "out")
    assert split.code == 0, split.err
    done = pipegraph("verify", tmp_path / "out", file)
    assert (done.code, done.err) == (0, ""), done.out + done.err
    mode = "evaluation" if model == "dropout" else "training and evaluation"
    assert done.out.splitlines()[-1] == f"equal in {mode} mode, within 1e-05 relative"


def test_package_without_weights_gets_the_models(pipegraph: Command, tmp_path: Path) -> None:
    pipegraph("split", "tests/models/chain.py", "--stages", 2, "--no-weights", "-o", tmp_path / "out")
    assert pipegraph("verify", tmp_path / "out", "tests/models/chain.py").code == 0


def test_edited_stage_is_found(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    edited = Path(shutil.copytree(chain, tmp_path / "edited"))
    stage = edited / "stage_1.py"
    stage.write_text(stage.read_text().replace("return ", "return 2 * "))
    done = pipegraph("verify", edited, "tests/models/chain.py")
    assert done.code == 1
    assert "DIFFERENT:" in done.out
    assert "gradient head.weight" in done.out
    assert "Edited since they were written: stage_1.py" in done.err


def test_unseeded_model_is_suspected(pipegraph: Command, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    text = (ROOT / "tests/models/chain.py").read_text()
    file.write_text(text.replace("torch.manual_seed(0)", "torch.seed()"))
    assert pipegraph("split", file, "--stages", 2, "-o", tmp_path / "out").code == 0
    done = pipegraph("verify", tmp_path / "out", file)
    assert done.code == 1
    assert "Try: seed build_model" in done.err


def test_another_model_than_the_one_that_was_split(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    other_model = "tests/models/late_input.py"
    errors = "error: The package is of Chain (chain.py), and this is LateInput (late_input.py): "
    advice = "\nTry: the model that was split, or the package of this one.\n"
    run = ("run", chain, "--model", other_model, "--nproc", 1, "--kernels", "autograd")
    empty = tmp_path / "empty"
    assert pipegraph("split", "tests/models/chain.py", "--stages", 2, "--no-weights", "-o", empty).code == 0
    for command in (("verify", chain, other_model), ("verify", empty, other_model), run):
        done = pipegraph(*command)
        assert done.code == 2
        assert done.err.startswith(errors) and done.err.endswith(advice), done.err


def test_json(pipegraph: Command, chain: Path) -> None:
    result = json.loads(pipegraph("verify", chain, "tests/models/chain.py", "--json").out)
    assert (result["schema_version"], result["equal"], result["mode"]) == (1, True, "training")
    assert result["compared"] == {"weight": 10, "output": 1, "loss": 1, "gradient": 10, "evaluation": 1}
    assert result["different"] == []


def test_other_sizes_than_the_examples(pipegraph: Command, chain: Path) -> None:
    model = "tests/models/chain.py"
    done = pipegraph("verify", chain, model, "--batch", 7)
    assert (done.code, done.err) == (0, "")
    done = pipegraph("verify", chain, model, "--batch", 10**14)
    assert done.code == 2
    assert re.match(r"error: a tensor with --batch 10+ takes \S+ PiB, and this machine has .*\nTry: fewer", done.err)


def test_a_model_that_raises(pipegraph: Command, chain: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    text = "import torch\nclass Odd(torch.nn.Module):\n    def forward(self, x):\n        return x @ x\nmodel = Odd()\n"
    file.write_text(f"{text}example_inputs = (torch.ones(2, 8),)\n")
    done = pipegraph("verify", chain, file)
    assert done.code == 2
    assert done.err.startswith("error: Odd (model.py) raised RuntimeError: ")
    assert "model.py:4: return x @ x\nTry: " in done.err


def test_a_role_that_was_tampered_with(pipegraph: Command, tmp_path: Path) -> None:
    """The mask is cut with the rows, and the manifest says that each microbatch gets the whole."""
    file = tmp_path / "model.py"
    file.write_text(MASKED)
    assert pipegraph("split", file, "--points", "last", "-o", tmp_path / "out").code == 0
    done = pipegraph("verify", tmp_path / "out", file)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[-2] == "batch: 3 rows, all different, in microbatches of 2 and 1"
    manifest = tmp_path / "out" / "pipeline.json"
    tampered = json.loads(manifest.read_text())
    tampered["values"]["mask"] |= {"batch_dim": None}
    tampered["values"]["mask"].pop("role", None)
    manifest.write_text(json.dumps(tampered))
    done = pipegraph("verify", tmp_path / "out", file)
    assert done.code == 2 and "equal" not in done.out
    assert "pipeline.json" in done.err and "whole" in done.err
    assert "--batch-dim mask=0" in done.err


MASKED = """
import torch
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, mask):
        return self.last(self.first(x) * mask[:, None])


def build_model():
    torch.manual_seed(0)
    return Masked()


example_inputs = (torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2))
"""
