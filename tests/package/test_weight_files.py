"""What guards the weights of a package: digests of its shards, and that everything listed is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import pipegraph
from pipegraph.errors import PackageError
from pipegraph.package import MANIFEST, WEIGHTS_INDEX, Package
from tests.codegen.layers import Block, Row, batch
from tests.codegen.parity import plan_of, split
from tests.messages import refused

FIRST, SECOND = "stage-00000-of-00002.safetensors", "stage-00001-of-00002.safetensors"


class Scaled(Row):
    """A buffer of the first stage is not in ``state_dict()``."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(2)])
        self.register_buffer("scale", batch(8), persistent=False)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return super().forward(x * self.scale)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split(tmp_path_factory.mktemp("written"), Scaled(), (batch(),), cut="layers.1").path


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A new copy of the package for each test, which may damage it."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


def flip_a_bit(file: Path) -> None:
    """In the last value, so that the file is still read."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / WEIGHTS_INDEX).read_text())
    change(index["weight_map"])
    (folder / WEIGHTS_INDEX).write_text(json.dumps(index))


def pipeline(folder: Path, **options: object) -> pipegraph.Pipeline:
    return pipegraph.Pipeline(folder, kernels="autograd", **options)  # type: ignore[arg-type]


def test_a_flipped_bit_is_an_error(folder: Path) -> None:
    flip_a_bit(folder / SECOND)
    with refused(PackageError, SECOND, "content", advice="check_weights=False"):
        pipeline(folder)
    assert sorted(pipeline(folder, check_weights=False).stages) == [0, 1]
    assert Package.open(folder).damaged() == (SECOND,)


def test_a_stage_checks_what_it_reads(folder: Path) -> None:
    """Of a stage whose weights are a checkpoint's, the buffers alone; the second stage has none."""
    package = Package.open(folder)
    flip_a_bit(folder / SECOND)
    package.check_weights([0])
    package.check_weights([1], weights=folder)
    with pytest.raises(PackageError, match=SECOND):
        package.check_weights([0, 1])
    flip_a_bit(folder / FIRST)
    for weights in (folder, False):
        with pytest.raises(PackageError, match=FIRST):
            package.check_weights([0], weights=weights)


def test_the_shard_of_a_tied_weight_is_checked_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    package = split(tmp_path, model, (batch(),), cut="1,2")
    shard = "stage-00000-of-00003.safetensors"
    flip_a_bit(package.path / shard)
    package.check_weights([1])
    with pytest.raises(PackageError, match=shard):
        package.check_weights([2])


@pytest.mark.parametrize(
    ("unlisted", "named"),
    [({SECOND}, SECOND), ({WEIGHTS_INDEX}, WEIGHTS_INDEX), ({FIRST, SECOND, WEIGHTS_INDEX}, WEIGHTS_INDEX)],
)
def test_a_file_that_is_not_listed_is_not_read(unlisted: set[str], named: str, folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"] = {name: entry for name, entry in manifest["shards"].items() if name not in unlisted}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with refused(PackageError, named, "pipeline.json", "list", advice="check_weights"):
        pipeline(folder)
    assert sorted(pipeline(folder, check_weights=False).stages) == [0, 1]


def test_a_file_of_another_size_is_not_read(folder: Path) -> None:
    with (folder / SECOND).open("ab") as file:
        file.write(b"more")
    with refused(PackageError, SECOND, "460 B", "456 B", advice="restore"):
        pipeline(folder)


def test_a_package_of_a_version_without_sizes(folder: Path) -> None:
    """It listed digests alone, and not the index."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["shards"][WEIGHTS_INDEX]
    for place in ("files", "shards"):
        manifest[place] = {name: entry["digest"] for name, entry in manifest[place].items()}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "schema_version": 2}))
    with refused(PackageError, WEIGHTS_INDEX, "pipeline.json", "list", advice="check_weights"):
        pipeline(folder)
    assert sorted(pipeline(folder, check_weights=False).stages) == [0, 1]


def test_an_empty_index_is_no_random_start(folder: Path) -> None:
    change_index(folder, dict.clear)
    for check in (True, False):
        with refused(PackageError, WEIGHTS_INDEX, "weight_map", FIRST, "pipeline.json", advice="restore"):
            pipeline(folder, check_weights=check)


def test_nor_is_an_index_of_buffers(folder: Path) -> None:
    """Of every shard one tensor is listed, and no parameter."""

    def keep_buffers(weight_map: dict[str, str]) -> None:
        for name in [name for name in weight_map if name != "scale"]:
            del weight_map[name]
        weight_map["nothing"] = SECOND

    change_index(folder, keep_buffers)
    with (
        refused(PackageError, WEIGHTS_INDEX, "layers.0.linear.bias", f"{FIRST} of stage 0", advice="restore"),
        pytest.warns(UserWarning, match="holds no weights"),
    ):
        pipeline(folder, check_weights=False)


def test_a_lost_shard_is_an_error_without_parameters_too(tmp_path: Path) -> None:
    package = pipegraph.write_package(plan_of(Scaled(), (batch(),), cut="layers.1"), tmp_path / "out", weights=False)
    (package.path / FIRST).unlink()
    with refused(PackageError, f"{FIRST} is missing", "stage 0", advice="restore"):
        package.load_stage(0, weights=False)
