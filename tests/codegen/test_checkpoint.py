"""Stages that read their tensors from a Hugging Face checkpoint: only theirs, from the files that hold them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pipegraph
from pipegraph.errors import PackageError
from pipegraph.graph.sources import load
from pipegraph.package import Package
from pipegraph.planner.plan import Plan
from tests.codegen.parity import plan_of, split
from tests.zoo.architectures import shallow

LISTING = "model.safetensors.index.json"


@dataclass(frozen=True)
class Saved:
    """A model with random weights, its checkpoints in one file and in shards, and its package without weights.

    The plan is of the same model on the meta device, as a large one is captured.
    """

    model: nn.Module
    plan: Plan
    package: Package
    single: Path
    sharded: Path


def save(folder: Path, architecture: str) -> Saved:
    config = {"architectures": [architecture], **shallow(architecture)}
    (folder / "config.json").write_text(json.dumps(config))
    model: Any = load(f"hf:{folder}", batch=2, seq=12).model
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="20KB")
    source = load(f"hf:{folder}", weights=False, batch=2, seq=12)
    plan = plan_of(source.model, (), source.kwargs, cut=3)
    package = pipegraph.write_package(plan, folder / "package", weights=False)
    return Saved(model, plan, package, folder / "single", folder / "sharded")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Its head is its embedding, and stored once."""
    return save(tmp_path_factory.mktemp("gpt2"), "GPT2LMHeadModel")


def stages(package: Package, weights: Path | bool) -> list[nn.Module]:
    return [package.load_stage(index, weights=weights) for index in range(len(package.manifest.stages))]


def differing(package: Package, weights: Path | bool, model: nn.Module) -> list[str]:
    """The names of ``state_dict()`` whose values are not the model's; those of only one of them count."""
    actual = {name: tensor for stage in stages(package, weights) for name, tensor in stage.state_dict().items()}
    expected = model.state_dict()
    return [
        name
        for name in sorted({*actual, *expected})
        if name not in actual or name not in expected or not torch.equal(actual[name], expected[name])
    ]


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_what_save_pretrained_writes_is_read(model: str, request: pytest.FixtureRequest) -> None:
    """Of the other architectures, `tests/zoo` shows it."""
    saved: Saved = request.getfixturevalue(model)
    assert len(list(saved.sharded.glob("*.safetensors"))) > 3
    assert differing(saved.package, saved.single, saved.model) == []
    assert differing(saved.package, saved.sharded, saved.model) == []


@pytest.mark.slow
def test_experts_are_read_in_their_parts(tmp_path: Path) -> None:
    saved = save(tmp_path, "MixtralForCausalLM")
    stored = saved.package.manifest.checkpoint.stored
    assert stored["model.layers.1.mlp.experts.gate_up_proj"] == (
        "model.layers.1.block_sparse_moe.experts.*.w1.weight",
        "model.layers.1.block_sparse_moe.experts.*.w3.weight",
    )
    assert "model.layers.1.self_attn.q_proj.weight" not in stored
    weights = load_file(saved.single / "model.safetensors")
    pipe = pipegraph.Pipeline(saved.package, "gpipe", 1, kernels="eager", weights=saved.single)  # nothing is unread
    torch.testing.assert_close(dict(pipe.named_parameters()), dict(saved.model.named_parameters()))
    del weights["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
    save_file(weights, saved.single / "model.safetensors")
    with pytest.raises(PackageError, match=r"model.safetensors lacks model.layers.1.block.*experts.3.w3.weight"):
        stages(saved.package, saved.single)


def test_buffers_that_are_not_in_a_checkpoint_are_the_packages(llama: Saved) -> None:
    buffers = [named for stage in stages(llama.package, llama.single) for named in stage.named_buffers()]
    tables = {name: buffer for name, buffer in buffers if name.endswith("inv_freq")}
    assert tables and all(torch.equal(table, llama.model.get_buffer(name)) for name, table in tables.items())


def test_running_statistics_are_the_checkpoints(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    package = split(tmp_path, model, (torch.ones(4, 8),), cut="1")
    model[1].running_mean.fill_(3.0)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert differing(package, tmp_path, model) == []
    assert differing(package, True, model) == ["1.running_mean"]


def test_only_the_files_of_a_stage_are_needed(llama: Saved, tmp_path: Path) -> None:
    """Each stage is loaded from a folder that holds nothing but its files."""
    files = json.loads((llama.sharded / LISTING).read_text())["weight_map"]
    for stage in llama.package.manifest.stages:
        folder = tmp_path / str(stage.index)
        folder.mkdir()
        stage_files = {files[name] for name in stage.parameters}
        assert stage_files < set(files.values())
        for file in (*stage_files, LISTING):
            (folder / file).write_bytes((llama.sharded / file).read_bytes())
        llama.package.load_stage(stage.index, weights=folder)
    with pytest.raises(PackageError, match="cannot be read, or is truncated: No such file"):
        llama.package.load_stage(0, weights=tmp_path / "2")


def test_shards_may_be_links_as_in_the_cache_of_hugging_face(llama: Saved, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in llama.sharded.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert differing(llama.package, snapshot, llama.model) == []


def test_a_checkpoint_of_the_base_model_has_no_prefix(gpt2: Saved, tmp_path: Path) -> None:
    """GPT-2 was published so."""
    gpt2.model.base_model.save_pretrained(tmp_path)
    assert "wte.weight" in load_file(tmp_path / "model.safetensors")
    assert differing(gpt2.package, tmp_path, gpt2.model) == []


@pytest.mark.slow
def test_the_base_model_is_read_from_a_checkpoint_with_a_head(gpt2: Saved, tmp_path: Path) -> None:
    base, tokens = gpt2.model.base_model, torch.ones(1, 4, dtype=torch.long)
    package = split(tmp_path, base, (tokens,), {"use_cache": False}, cut="h.1")
    assert differing(package, gpt2.single, base) == []


def test_weights_take_the_dtype_of_the_stage(llama: Saved, tmp_path: Path) -> None:
    """As ``load_state_dict`` and ``from_pretrained(dtype=…)`` do."""
    weights = load_file(llama.single / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    stage = llama.package.load_stage(1, weights=tmp_path)
    assert {parameter.dtype for parameter in stage.parameters()} == {torch.float32}
    assert all(torch.equal(item, weights[name].bfloat16().float()) for name, item in stage.named_parameters())


def test_weights_are_copied_from_a_checkpoint(gpt2: Saved, tmp_path: Path) -> None:
    """The same files, byte for byte, as from the model with its weights."""
    source = load(f"hf:{gpt2.single}", batch=2, seq=12)
    reference = pipegraph.write_package(plan_of(source.model, (), source.kwargs, cut=3), tmp_path / "whole")
    copied = pipegraph.write_package(gpt2.plan, tmp_path / "copied", weights=gpt2.sharded)
    assert {file.name: file.read_bytes() for file in copied.path.iterdir()} == {
        file.name: file.read_bytes() for file in reference.path.iterdir()
    }


def test_a_package_is_a_checkpoint_too(llama: Saved, tmp_path: Path) -> None:
    """One that was cut elsewhere."""
    plan = pipegraph.plan(llama.plan.captured, points=["model.layers.1.mlp"])
    other_package = pipegraph.write_package(plan, tmp_path / "other", weights=llama.sharded)
    assert differing(other_package, True, llama.model) == []
    assert differing(llama.package, other_package.path, llama.model) == []


def test_a_copy_that_fails_leaves_nothing(llama: Saved, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / LISTING).write_text('{"weight_map": {}}')
    with pytest.raises(PackageError, match=r"lacks model.embed_tokens.weight, .*; load_stage\(weights=DIR\)"):
        pipegraph.write_package(llama.plan, tmp_path / "out", weights=tmp_path / "broken")
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken"]


def change(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Of the tensors of a checkpoint in one file."""

    def apply(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        edit(weights)
        save_file(weights, folder / "model.safetensors")

    return apply


def index(text: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / LISTING).write_text(text)

    return apply


NORM = "model.norm.weight"
DAMAGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (
        change(lambda weights: weights.pop(NORM)),
        r"damaged/model.safetensors lacks model.norm.weight; the nearest name there is model.",
    ),
    "other shape": (
        change(lambda weights: weights.update({NORM: torch.ones(16)})),
        r"model.norm.weight is \[16\] in .*damaged/model.safetensors and \[32\] in the stage",
    ),
    "quantized": (
        change(lambda weights: weights.update({NORM: torch.ones(32).to(torch.float8_e4m3fn)})),
        r"model.norm.weight is torch.float8_e4m3fn in .*model.safetensors, which is not converted to .* torch.float32",
    ),
    "truncated": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:5000]),
        "damaged/model.safetensors cannot be read, or is truncated: Error while deserializing header",
    ),
    "garbage": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"not safetensors"),
        "damaged/model.safetensors cannot be read, or is truncated: Error while deserializing header",
    ),
    "no index": (index("[]"), f"damaged/{LISTING} is no index of safetensors, or truncated"),
    "half an index": (index('{"weight_map": {"model.'), f"damaged/{LISTING} is no index of safetensors, or truncated"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_checkpoint_that_does_not_fit_is_told(damage: str, llama: Saved, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((llama.single / "model.safetensors").read_bytes())
    apply, message = DAMAGED[damage]
    apply(folder)
    with pytest.raises(PackageError, match=rf"stage 2 .*with weights of .*damaged, cannot be loaded: .*{message}"):
        llama.package.load_stage(2, weights=folder)


def test_an_index_cannot_leave_its_folder(llama: Saved, tmp_path: Path) -> None:
    files = json.loads((llama.sharded / LISTING).read_text())["weight_map"]
    for path in ("../elsewhere/{}", str(llama.sharded / "{}")):
        (tmp_path / LISTING).write_text(json.dumps({"weight_map": {name: path.format(files[name]) for name in files}}))
        with pytest.raises(PackageError, match="which is not a file of its folder"):
            llama.package.load_stage(0, weights=tmp_path)


def test_what_is_no_checkpoint_is_refused_before_anything_is_built(llama: Saved, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"absent is not a folder with a checkpoint.\nTry: the folder that save_pre"):
        llama.package.load_stage(0, weights=tmp_path / "absent")
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PackageError, match=r"json, but pytorch_model.bin. Pickled weights are never read.\nTry: save"):
        llama.package.load_stage(0, weights=tmp_path)


class Swapped:
    """Stands for a conversion of transformers that does not join parts."""

    operations = ("PermuteForRope",)
    target_patterns = (".q_proj.weight",)

    def rename_source_key(self, name: str) -> tuple[str, str | None]:
        return name, ".q_proj.weight" if name.endswith(".q_proj.weight") else None


def test_what_only_transformers_can_read_is_told(llama: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where name and shape are the same, so that wrong values would go unnoticed."""
    monkeypatch.setattr("pipegraph.graph.sources.huggingface._transforms", lambda model: ([], [Swapped()]))
    package = pipegraph.write_package(llama.plan, tmp_path / "out", weights=False)
    with pytest.raises(PackageError, match=r"q_proj.weight is stored in a form that only transformers can read"):
        package.load_stage(0, weights=llama.single)


MEASURE = """
import re, sys
from pathlib import Path
from pipegraph.package import Package

def own():  # bytes of this process's own, without pages of files, which the system takes back where it needs them
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

package = Package.open(sys.argv[1])
package.load_stage(0, weights=False)
before = own()
stage = package.load_stage(0, weights=sys.argv[2])
assert sum(each.double().sum().item() for each in stage.parameters())
print(own() - before, sum(each.nbytes for each in stage.parameters()))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_stage_is_read_without_a_copy(tmp_path: Path) -> None:
    """Of 64 MiB, in a checkpoint of 128 MiB."""
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(8)))
    package = pipegraph.write_package(plan_of(model, (torch.ones(1, 2048),), cut="4"), tmp_path / "out", weights=False)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, package.path, tmp_path], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    grown, size = map(int, done.stdout.split())
    assert size == 64 * 2**20
    assert grown < 48 * 2**20  # one parameter, in double, is 32 MiB


def test_transformers_reads_the_same(llama: Saved) -> None:
    read = transformers.AutoModelForCausalLM.from_pretrained(llama.sharded)
    assert differing(llama.package, llama.sharded, read) == []
    with safe_open(llama.single / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(read.state_dict())
