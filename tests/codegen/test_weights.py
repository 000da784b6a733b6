"""Shards, their index, and ``load_stage``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import PackageError
from pipegraph.package import Package
from tests.captures import captured
from tests.codegen.layers import Block, batch
from tests.codegen.parity import plan_of, split


class Model(nn.Module):
    """A tied weight, a buffer of each sort, a table that a constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, bias=False)
        self.block = Block()
        self.register_buffer("table", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("mean", torch.full((8,), 0.5))
        self.last = nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.first(x) * self.table) + self.mean)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return split(tmp_path, Model(), (batch(),), cut="block,last")


def shards(package: Package) -> dict[str, list[str]]:
    return {file.name: sorted(load_file(file)) for file in sorted(package.path.glob("*.safetensors"))}


def test_every_tensor_is_stored_once(package: Package) -> None:
    assert shards(package) == {
        "stage-00000-of-00003.safetensors": ["first.weight", "table"],
        "stage-00001-of-00003.safetensors": ["block.linear.bias", "block.linear.weight", "mean"],
    }
    assert [stage.weights for stage in package.manifest.stages] == [*shards(package), None]


def test_the_index_says_where(package: Package) -> None:
    index = json.loads((package.path / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 4 * (64 + 8 + 64 + 8 + 8)},
        "weight_map": {name: file for file, names in shards(package).items() for name in names},
    }


def test_stages_hold_the_values(package: Package) -> None:
    model = Model()
    expected = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    for index in range(3):
        stage = package.load_stage(index)
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
            assert torch.equal(tensor, expected[name]), name


def test_without_weights_parameters_are_new_and_buffers_are_read(package: Package) -> None:
    stage = package.load_stage(0, weights=False)
    assert 0 < stage.first.weight.abs().max() <= 1 / math.sqrt(8)
    assert not torch.equal(stage.first.weight, package.load_stage(0).first.weight)
    assert torch.equal(stage.table, torch.linspace(0, 1, 8))


@pytest.mark.parametrize("weights", [True, False])
def test_on_the_meta_device(package: Package, weights: bool) -> None:
    stage = package.load_stage(1, device="meta", weights=weights)
    assert {tensor.device.type for tensor in (*stage.parameters(), *stage.buffers())} == {"meta"}
    assert stage(torch.empty(3, 8, device="meta")).shape == (3, 8)


def test_written_without_weights_shards_hold_buffers(tmp_path: Path) -> None:
    plan = plan_of(Model(), (batch(),), cut="block,last")
    package = pipegraph.write_package(plan, tmp_path / "out", weights=False)
    assert shards(package) == {
        "stage-00000-of-00003.safetensors": ["table"],
        "stage-00001-of-00003.safetensors": ["mean"],
    }
    assert not package.has_weights
    assert torch.equal(package.load_stage(0, weights=False).table, torch.linspace(0, 1, 8))
    with pytest.raises(PackageError, match=r"index.json lacks first.weight, a weight of stage 0"):
        package.load_stage(0)


@pytest.mark.slow
def test_rotary_tables_keep_their_values(tmp_path: Path) -> None:
    """The parameters are on the meta device; a table computed in a constructor must survive."""
    plan = pipegraph.plan(captured("hf:tests/models/tied_llama"), stages=2, balance="uniform")
    package = pipegraph.write_package(plan, tmp_path / "out", weights=False)
    stage = package.load_stage(1, weights=False)
    tables = [buffer for name, buffer in stage.named_buffers() if name.endswith("inv_freq")]
    assert tables and torch.allclose(tables[0], 10000.0 ** (-torch.arange(0, 8, 2) / 8))


def test_weights_on_meta_cannot_be_written(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = plan_of(model, (batch(),), cut="1")
    with pytest.raises(
        PackageError, match=r"0.weight and 1 more on the meta device: there are no weights to write.\nTry: "
    ):
        pipegraph.write_package(plan, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    assert pipegraph.write_package(plan, tmp_path / "out", weights=False).path.is_dir()


def test_buffers_on_meta_cannot_be_written(tmp_path: Path) -> None:
    plan = plan_of(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, device="meta")), (batch(),), cut="1")
    with pytest.raises(PackageError, match=r"there are no buffers to write.\nTry: build the model on the CPU"):
        pipegraph.write_package(plan, tmp_path / "out", weights=False)


def test_a_tensor_of_the_wrong_shape_is_named(package: Package) -> None:
    file = package.path / "stage-00001-of-00003.safetensors"
    save_file({**load_file(file), "block.linear.weight": torch.zeros(8, 4)}, file)
    with pytest.raises(PackageError, match=r"block.linear.weight is \[8, 4\] in its file and \[8, 8\] in the stage"):
        package.load_stage(1)


def test_views_and_strides_are_stored_as_plain_tensors(tmp_path: Path) -> None:
    """Two parameters that share memory without being one, and one that is transposed."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    matrix = torch.randn(16, 8)
    model[0].weight = nn.Parameter(matrix[:8])
    model[1].weight = nn.Parameter(matrix[8:].t())
    package = split(tmp_path, model, (batch(),), cut="1")
    assert torch.equal(package.load_stage(1).get_parameter("1.weight"), matrix[8:].t())


def test_a_parameter_that_an_edit_adds_is_no_meta_tensor(package: Package) -> None:
    """With any weights; without, it starts as the source says."""
    stage = package.path / "stage_1.py"
    text = stage.read_text()
    assert "super().__init__()\n" in text
    added = "super().__init__()\n        self.scale = nn.Parameter(torch.ones(8))\n"
    stage.write_text("import torch\n" + text.replace("super().__init__()\n", added))
    edited = Package.open(package.path)
    message = (
        r"stage 1 \(.*stage_1.py\).* cannot be loaded: ValueError: scale of stage 1 has no value: list it in "
        r"pipeline.json and store it in a shard.\nTry: "
    )
    for weights in (True, package.path):
        with pytest.raises(PackageError, match=message):
            edited.load_stage(1, weights=weights)
    assert torch.equal(edited.load_stage(1, weights=False).scale, torch.ones(8))


def test_a_parameter_that_an_edit_removes_is_named(package: Package) -> None:
    blocks = package.path / "blocks.py"
    blocks.write_text(blocks.read_text().replace("nn.Linear(8, 8)", "nn.Linear(8, 8, bias=False)"))
    with pytest.raises(PackageError, match=r"the stage has no block.linear.bias, which pipeline.json lists"):
        Package.open(package.path).load_stage(1)


class Starred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.factors = nn.ParameterDict({name: torch.randn(8) for name in ("w*", "w0", "*", "w?", "[w]", "{w}", "%w")})
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for factor in self.factors.values():
            x = x * factor
        return self.last(x)


def test_a_star_in_a_name_is_a_star(tmp_path: Path) -> None:
    """Beside a name that it would count, too."""
    model = Starred()
    package = split(tmp_path, model, (batch(),), cut="last")
    stage = package.load_stage(0)
    assert {name: factor.tolist() for name, factor in stage.named_parameters() if name.startswith("factors")} == {
        f"factors.{name}": factor.tolist() for name, factor in model.factors.items()
    }


def test_a_parameter_that_was_added_by_hand_has_to_be_in_the_package(package: Package) -> None:
    source = package.path / "stage_1.py"
    edited = source.read_text().replace("super().__init__()", "super().__init__(); self.more = nn.Linear(2, 2)")
    source.write_text(edited if "import nn" in edited else f"from torch import nn\n{edited}")
    with pytest.raises(PackageError, match=r"more.weight of stage 1 has no value: list it in pipeline.json"):
        Package.open(package.path).load_stage(1)
