"""What a package's files can make a reader do: its source runs, its data does not, and nothing is read elsewhere."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipegraph
from pipegraph.errors import PackageError
from pipegraph.package import MANIFEST, WEIGHTS_INDEX, Package
from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import ROOT, split
from tests.messages import refused

SHARD = "stage-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(tmp_path_factory.mktemp("written"), Row([Block() for _ in range(4)]), (batch(),), cut="layers.2").path


@pytest.fixture
def package(written: Path, tmp_path: Path) -> Package:
    """A new copy of the package for each test, which may damage it."""
    return Package.open(shutil.copytree(written, tmp_path / "copy"))


class Harmful:
    """Pickled, it makes a file when it is loaded."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.file,)


LOAD = """
import pickle, sys
import torch

def refused(*args, **kwargs):
    raise AssertionError("unpickled")

torch.load = pickle.load = pickle.loads = pickle.Unpickler = refused
from pipegraph.package import Package

package = Package.open(sys.argv[1])
for weights in (True, False, *sys.argv[2:]):
    for stage in package.manifest.stages:
        package.load_stage(stage.index, weights=weights)
"""


def test_loading_unpickles_nothing(package: Package, tmp_path: Path) -> None:
    """Neither a package nor a checkpoint, whatever else lies in their folders."""
    checkpoint, touched = tmp_path / "checkpoint", tmp_path / "touched"
    checkpoint.mkdir()
    for file in (*package.path.glob("*.safetensors"), package.path / WEIGHTS_INDEX):
        (checkpoint / file.name).write_bytes(file.read_bytes())
    for folder in (package.path, checkpoint):
        for name in ("pytorch_model.bin", "model.pt", "pipeline.pkl"):
            (folder / name).write_bytes(pickle.dumps(Harmful(touched)))
    done = subprocess.run(
        [sys.executable, "-c", LOAD, package.path, checkpoint], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert not touched.exists()


def test_pickled_weights_are_no_safetensors(package: Package, tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    (package.path / SHARD).write_bytes(pickle.dumps(Harmful(touched)))
    with refused(PackageError, "stage 1 ", SHARD, "SafetensorError", advice="restore"):
        package.load_stage(1)
    assert not touched.exists()


PATHS = ["../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors", "..\\secret", "C:secret"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["weights", "files"])
def test_a_manifest_cannot_leave_the_folder(where: str, path: str, package: Package) -> None:
    entry = json.loads((package.path / MANIFEST).read_text())
    if where == "weights":
        entry["stages"][1]["weights"] = path
    else:
        entry["files"][path] = {"bytes": 9, "digest": f"sha256 {64 * '0'}"}
    (package.path / MANIFEST).write_text(json.dumps(entry))
    with refused(PackageError, MANIFEST, repr(path), "folder", advice="pipegraph split"):
        Package.open(package.path)


@pytest.mark.parametrize("module", ["../stage_1", "a.b", "a/b", "", "stage_1.py"])
def test_a_module_of_a_manifest_is_a_name(module: str, package: Package) -> None:
    entry = json.loads((package.path / MANIFEST).read_text())
    entry["stages"][1]["module"] = module
    (package.path / MANIFEST).write_text(json.dumps(entry))
    with refused(PackageError, "stages[1]", "module", advice="pipegraph split"):
        Package.open(package.path)


@pytest.mark.parametrize("path", PATHS)
def test_the_index_cannot_leave_the_folder(path: str, package: Package) -> None:
    index = json.loads((package.path / WEIGHTS_INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], path)
    (package.path / WEIGHTS_INDEX).write_text(json.dumps(index))
    with refused(PackageError, WEIGHTS_INDEX, "weight_map", repr(path), "folder", advice="split the model"):
        Package.open(package.path).load_stage(1)


@pytest.mark.parametrize("path", [300 * "a", "a\0b"])
@pytest.mark.parametrize("where", ["weights", "files", "index"])
def test_a_name_that_no_file_has(where: str, path: str, package: Package) -> None:
    file = package.path / (WEIGHTS_INDEX if where == "index" else MANIFEST)
    entry = json.loads(file.read_text())
    if where == "weights":
        entry["stages"][1]["weights"] = path
    elif where == "files":
        entry["files"][path] = {"bytes": 9, "digest": f"sha256 {64 * '0'}"}
    else:
        entry["weight_map"]["layers.2.linear.bias"] = path
    file.write_text(json.dumps(entry))
    with refused(PackageError, file.name, repr(path)[:9], "not a file name"):
        Package.open(package.path).load_stage(1)


def test_the_index_cannot_leave_the_folder_by_a_link(package: Package, tmp_path: Path) -> None:
    (package.path / SHARD).rename(tmp_path / "secret.safetensors")
    (package.path / "link").symlink_to(tmp_path / "secret.safetensors")
    index = json.loads((package.path / WEIGHTS_INDEX).read_text())
    index["weight_map"]["layers.2.linear.bias"] = "link"
    (package.path / WEIGHTS_INDEX).write_text(json.dumps(index))
    with refused(PackageError, WEIGHTS_INDEX, "weight_map", "link", "folder", advice="split the model"):
        Package.open(package.path).load_stage(1)


STANDALONE = """
import sys

sys.path.insert(0, sys.argv[1])
import package

try:
    package.load_stage(1)
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("path", ["../secret.safetensors", "{}/secret.safetensors"])
def test_nor_can_it_without_pipegraph(path: str, tmp_path: Path) -> None:
    """The package's own code says so, though there is such a file."""
    package = split(tmp_path, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (batch(),), cut="1")
    package.path.rename(tmp_path / "package")
    (tmp_path / "package" / SHARD).rename(tmp_path / "secret.safetensors")
    index = json.loads((tmp_path / "package" / WEIGHTS_INDEX).read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], path.format(tmp_path))
    (tmp_path / "package" / WEIGHTS_INDEX).write_text(json.dumps(index))
    done = subprocess.run(
        [sys.executable, "-c", STANDALONE, tmp_path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.endswith("secret.safetensors', which is not a file of its folder\n"), done.stderr


def test_shards_may_stand_elsewhere_by_a_link(package: Package, tmp_path: Path) -> None:
    """If `pipeline.json` knows their content. Hugging Face's cache is made of links."""
    (package.path / SHARD).rename(tmp_path / "large.safetensors")
    (package.path / SHARD).symlink_to(tmp_path / "large.safetensors")
    assert isinstance(package.load_stage(1), nn.Module)


def test_reading_a_package_writes_nothing_into_it(package: Package) -> None:
    files_before = {file.name: file.read_bytes() for file in package.path.iterdir()}
    pipe = pipegraph.Pipeline(package.path, microbatches=2, kernels="autograd", loss_fn=lambda out, _: out.mean())
    pipe.step(torch.cat([batch(), batch()]))
    assert {file.name: file.read_bytes() for file in package.path.iterdir()} == files_before
