"""Ranks that would run other source, or start from other weights, do not start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipegraph import Pipeline
from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import split
from tests.messages import missing
from tests.runtime import agreement_ranks, ranks
from tests.runtime.packages import write
from tests.runtime.sketches import chain


def edit_source(folder: Path) -> None:
    with (folder / "stage_1.py").open("a") as file:
        file.write("\n# mine\n")


def remove_source(folder: Path) -> None:
    (folder / "stage_1.py").unlink()


def edit_manifest(folder: Path) -> None:
    file = folder / "pipeline.json"
    file.write_text(file.read_text().replace('"batch_dim": 0', '"batch_dim":  0'))


def folders(tmp_path: Path, count: int, change: Callable[[Path], None], *changed: int) -> list[str]:
    """Copies of a package, of which some are changed."""
    package = write(chain(2), tmp_path / "package")
    copies = [Path(shutil.copytree(package, tmp_path / str(rank))) for rank in range(count)]
    for rank in changed:
        change(copies[rank])
    return list(map(str, copies))


@pytest.mark.parametrize(
    ("change", "file"),
    [(edit_source, "stage_1.py"), (remove_source, "stage_1.py"), (edit_manifest, "pipeline.json")],
)
def test_ranks_with_another_package_are_named(change: Callable[[Path], None], file: str, tmp_path: Path) -> None:
    """Also where only a stage of other ranks differs."""
    messages = ranks.run(agreement_ranks.message, 2, folders(tmp_path, 2, change, 0), ("pp",))
    assert messages[0] == messages[1]
    assert not missing(messages[0], "PackageError", "rank 1", "rank 0", str(file), "\nTry: ")


def test_replicas_with_another_package_are_named(tmp_path: Path) -> None:
    copies = folders(tmp_path, 4, edit_source, 2)
    messages = ranks.run(agreement_ranks.message, 4, copies, ("pp", "dp_replicate"))
    assert {*messages} == {messages[0]}
    assert not missing(messages[0], "PackageError", "rank 2 (pp 1, dp_replicate 0)", "rank 0 ")


def change_a_weight(folder: Path) -> None:
    """By the last bit of one value."""
    tensors = load_file(folder / "stage-1.safetensors")
    name = next(name for name in tensors if name.endswith("weight"))
    tensors[name].view(torch.int32)[0, 0] ^= 1
    save_file(tensors, folder / "stage-1.safetensors")


@pytest.mark.parametrize("mesh", ["dp_replicate", "dp_shard", "tp"])
def test_ranks_that_start_from_other_weights_are_named(mesh: str, tmp_path: Path) -> None:
    """The stage that both hold; nothing else compares shards that are taken as they are."""
    copies = folders(tmp_path, 2, change_a_weight, 1)
    messages = ranks.run(agreement_ranks.message, 2, copies, (mesh,))
    assert {*messages} == {messages[0]}
    assert not missing(messages[0], "ArgumentError", "weights of stage 1", "weight:", "\nTry: the same on every rank")


def test_weights_of_stages_that_no_other_rank_holds_may_differ(tmp_path: Path) -> None:
    """Such as on machines that only have the shards of their own stages."""
    copies = folders(tmp_path, 2, change_a_weight, 1)
    assert ranks.run(agreement_ranks.message, 2, copies, ("pp",)) == ["", ""]


def test_checkpoints_of_replicas_may_not_differ(tmp_path: Path) -> None:
    package = split(tmp_path, Row([Block() for _ in range(2)]), (batch(),), cut="layers.1").path
    checkpoints = [Path(shutil.copytree(package, tmp_path / str(rank))) for rank in range(2)]
    file = checkpoints[1] / "stage-00001-of-00002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(file).items()}, file)
    messages = ranks.run(agreement_ranks.message, 2, [str(package)] * 2, ("dp_replicate",), list(map(str, checkpoints)))
    assert not missing(messages[0], "ArgumentError", "weights of stage 1")


def test_other_uses_of_a_package_compare_it_too(tmp_path: Path) -> None:
    copies = folders(tmp_path, 2, edit_source, 1)
    Pipeline(copies[0], kernels="autograd").save(tmp_path / "run", step=1)
    errors = ranks.run(agreement_ranks.joint_errors, 2, copies, str(tmp_path / "run"), str(tmp_path / "out"))
    assert errors[0] == errors[1] and len(errors[0]) == 2
    assert all(error.startswith("PackageError: rank 1 would run another package") for error in errors[0])
    assert not (tmp_path / "out").exists()
