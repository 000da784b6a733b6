"""``--weights DIR``: a Hugging Face checkpoint's, read by each rank, copied by split, compared by verify."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipegraph.cli import main
from pipegraph.graph.sources import load
from tests.cli.command import Command
from tests.equal_work import equal_work_shared
from tests.zoo.architectures import shallow

SIZES = ("--batch", "2", "--seq", "8")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as it comes from the hub: config.json, shards and their index. Its experts are stored one by one."""
    folder, name = tmp_path_factory.mktemp("mixtral"), "MixtralForCausalLM"
    (folder / "config.json").write_text(json.dumps({"architectures": [name], **shallow(name)}))
    model = load(f"hf:{folder}", batch=2, seq=8).model
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


@pytest.fixture(scope="module")
def package(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights."""
    out = tmp_path_factory.mktemp("package") / "out"
    with equal_work_shared(), pytest.raises(SystemExit) as ended:
        main(["split", f"hf:{checkpoint}", *SIZES, "--points", "model.layers.1", "--no-weights", "-o", str(out)])
    assert ended.value.code == 0
    return out


def first_loss(printed: str) -> str:
    return printed.splitlines()[0].split()[3]


@pytest.mark.slow
def test_every_rank_reads_its_own_weights(pipegraph: Command, package: Path, checkpoint: Path, tmp_path: Path) -> None:
    """On two processes, and in one from a package with the weights inside: the same loss."""
    run = ("--kernels", "autograd", "--steps", 1)
    ranks = pipegraph("run", package, "--weights", checkpoint, *run)
    assert (ranks.code, ranks.err) == (0, "")
    inside = tmp_path / "inside"
    split = ("split", f"hf:{checkpoint}", *SIZES, "--points", "model.layers.1", "-o", inside)
    assert pipegraph(*split, "--weights", checkpoint).code == 0
    assert first_loss(pipegraph("run", inside, "--nproc", 1, *run).out) == first_loss(ranks.out)


def test_show_says_that_a_file_holds_no_weights(pipegraph: Command, package: Path) -> None:
    stages = pipegraph("show", package).out.splitlines()[3:5]
    assert [stage.rpartition("FLOP")[2].strip() for stage in stages] == ["buffers only", "none"]


@pytest.mark.slow
def test_verify_compares_a_checkpoint(pipegraph: Command, package: Path, checkpoint: Path, tmp_path: Path) -> None:
    model = f"hf:{checkpoint}"
    matching = pipegraph("verify", package, model, *SIZES, "--weights", checkpoint)
    assert matching.code == 0 and "equal in training and evaluation mode" in matching.out
    for file in checkpoint.glob("*.safetensors*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = sorted(tmp_path.glob("*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard)
    mismatching = pipegraph("verify", package, model, *SIZES, "--weights", tmp_path)
    assert mismatching.code == 1
    assert "Try: the checkpoint that MODEL is made from." in mismatching.err


@pytest.mark.slow
def test_check_knows_the_weights(pipegraph: Command, package: Path, checkpoint: Path, tmp_path: Path) -> None:
    split = ("split", f"hf:{checkpoint}", *SIZES, "--points", "model.layers.1", "-o", tmp_path / "out")
    assert pipegraph(*split, "--weights", checkpoint).code == 0
    assert pipegraph(*split, "--weights", checkpoint, "--check").out.endswith("out is as it would be written\n")
    assert pipegraph(*split, "--check").out.endswith("out is as it would be written\n")


@pytest.mark.parametrize("verb", ["split", "run", "verify"])
def test_a_folder_that_is_no_checkpoint(verb: str, pipegraph: Command, package: Path, checkpoint: Path) -> None:
    arguments = {
        "split": [f"hf:{checkpoint}", "--stages", 2, "--dry-run"],
        "run": [package],
        "verify": [package, "x.py"],
    }
    done = pipegraph(verb, *arguments[verb], "--weights", package.parent)
    assert done.code == 2
    assert (
        f"error: {package.parent} holds neither model.safetensors nor model.safetensors.index.json, but out."
        in done.err
    )


def test_a_tensor_that_is_missing_ends_the_run(
    pipegraph: Command, package: Path, checkpoint: Path, tmp_path: Path
) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for file in checkpoint.glob("*.safetensors"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    done = pipegraph("run", package, "--weights", tmp_path, "--kernels", "autograd", "--nproc", 1)
    assert done.code == 2
    assert "model.safetensors.index.json lacks model.norm.weight" in done.err


def test_split_names_the_checkpoint_that_does_not_fit(pipegraph: Command, checkpoint: Path, tmp_path: Path) -> None:
    """And not the folder that the package was being written to, which is gone."""
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"lm_head.weight": torch.ones(2, 2)}, weights / "model.safetensors")
    split = ("split", f"hf:{checkpoint}", *SIZES, "--points", "model.layers.1", "-o", tmp_path / "out")
    done = pipegraph(*split, "--weights", weights)
    assert done.code == 2
    assert f"error: stage 0 (stage_0.py), with weights of {weights}, cannot be loaded" in done.err
    assert ".out-" not in done.err


def test_weights_and_no_weights_are_refused_together(pipegraph: Command, checkpoint: Path) -> None:
    done = pipegraph("split", f"hf:{checkpoint}", "--stages", 2, "--weights", checkpoint, "--no-weights")
    assert done.code == 2
    assert "--weights writes weights" in done.err
