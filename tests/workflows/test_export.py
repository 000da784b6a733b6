"""``pipegraph export``: what is read back with transformers or `load_state_dict` computes what the checkpoint does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import pipegraph
from pipegraph.errors import CheckpointError, PackageError
from pipegraph.graph.sources import load
from pipegraph.package import Package
from pipegraph.workflows import export as exporting
from pipegraph.workflows.export import export
from tests.messages import refused
from tests.models import counting
from tests.runtime import ranks
from tests.slow import cases
from tests.zoo.architectures import shallow

LLAMA = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40},
}


@dataclass(frozen=True)
class Trained:
    """A package, the checkpoint of a run on it, and the unsplit model with the weights of that checkpoint."""

    package: Package
    run: Path
    model: nn.Module
    inputs: dict[str, Any]


def trained(folder: Path, model: str, point: str, dtype: torch.dtype | None = None) -> Trained:
    """Train a step."""
    source = load(model, batch=2, seq=8) if model.startswith("hf:") else load(model)
    captured = pipegraph.capture(source.model, source.args, source.kwargs)
    package = pipegraph.write_package(pipegraph.plan(captured, points=[point]), folder / "package", source=source)
    pipe = pipegraph.Pipeline(
        package,
        loss_fn=lambda output, *_: (
            next(iter(output.values() if isinstance(output, dict) else [output])).square().mean()
        ),
        kernels="eager",
        parallelize_fn=None if dtype is None else lambda stage: stage.to(dtype),
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    pipe.step(*source.args, **source.kwargs)
    optimizer.step()
    pipe.save(folder / "run", optimizer, step=1)
    source.model.load_state_dict(pipe.state_dict())
    return Trained(package, folder / "run", source.model.eval(), source.kwargs)


@pytest.fixture(scope="module", params=cases(["tied", "untied", "experts"], slow=("tied", "untied")))
def huggingface(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Models of transformers; experts are stored in parts."""
    folder = tmp_path_factory.mktemp(request.param)
    config = LLAMA | {"tie_word_embeddings": request.param == "tied"}
    if request.param == "experts":
        config = {"architectures": ["MixtralForCausalLM"], **shallow("MixtralForCausalLM")}
    (folder / "config.json").write_text(json.dumps(config))
    return trained(folder, f"hf:{folder}", "model.layers.1")


@pytest.mark.parametrize("shard_bytes", cases([5 * 10**9, 3000], slow=[5 * 10**9]))
def test_from_pretrained_computes_the_same(huggingface: Trained, tmp_path: Path, shard_bytes: int) -> None:
    written = export(huggingface.run, huggingface.package, tmp_path / "out", shard_bytes)
    assert (written.checkpoint.name, written.has_config, written.is_huggingface) == ("step-00000001", True, True)
    assert (len(written.files) > 2) == (shard_bytes == 3000)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(model) is type(huggingface.model)
    with torch.no_grad():
        expected, logits = (module(**huggingface.inputs).logits for module in (huggingface.model, model))
    assert torch.equal(logits, expected)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A model with a tied weight and a buffer."""
    return trained(tmp_path_factory.mktemp("plain"), counting.__file__, "layers.2")


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, from the files that the index names for them."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {file: load_file(folder / file) for file in {*index["weight_map"].values()}}
    assert set(files) == {path.name for path in folder.glob("*.safetensors")}
    tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    return tensors


def test_a_plain_model_loads_its_state_dict(plain: Trained, tmp_path: Path) -> None:
    written = export(plain.run / "step-00000001", plain.package, tmp_path / "out", 500)
    assert (written.has_config, written.is_huggingface) == (False, False)
    model = counting.build_model()
    model.load_state_dict(read(tmp_path / "out"))
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(model(*counting.example_inputs), plain.model(*counting.example_inputs))


def test_dtypes_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    half = trained(tmp_path, counting.__file__, "layers.2", torch.bfloat16)
    export(half.run, half.package, tmp_path / "out")
    assert {tensor.dtype for tensor in read(tmp_path / "out").values()} == {torch.bfloat16}


def test_ranks_write_files_of_their_own(plain: Trained, tmp_path: Path) -> None:
    files_by_rank = ranks.run(write_on_rank, 2, str(plain.run), str(plain.package.path), str(tmp_path / "out"))
    assert all(isinstance(files, list) for files in files_by_rank), files_by_rank
    assert sorted(file for files in files_by_rank for file in files) == sorted(
        path.name for path in (tmp_path / "out").glob("*.safetensors")
    )
    assert all(files_by_rank)
    for name, tensor in plain.model.state_dict().items():
        assert torch.equal(read(tmp_path / "out")[name], tensor), name


def write_on_rank(rank: int, run: str, package: str, out: str) -> list[str]:
    """The files that this rank writes, of no more than 720 B of tensors each."""
    written = []
    write_tensors: Callable[..., None] = exporting.write_tensors

    def note(tensors: dict[str, torch.Tensor], file: Path, *arguments: Any) -> None:
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 720
        written.append(file.name)
        write_tensors(tensors, file, *arguments)

    exporting.write_tensors = note
    export(run, Package.open(package), out, 720, timeout=30)
    return written


def test_a_rank_that_cannot_write_leaves_nothing(plain: Trained, tmp_path: Path) -> None:
    messages = ranks.run(fail_on_rank, 2, str(plain.run), str(plain.package.path), str(tmp_path / "out"))
    assert messages[0] == messages[1]
    assert re.match(r"CheckpointError: rank 1: .*/out cannot be written: disk on fire\.\nTry: ", messages[0])
    assert list(tmp_path.iterdir()) == []


def fail_on_rank(rank: int, run: str, package: str, out: str) -> None:
    if rank == 1:

        def fail(*_: Any) -> None:
            raise OSError("disk on fire")

        exporting.write_tensors = fail
    export(run, Package.open(package), out, 720, timeout=30)


def test_what_cannot_be_exported_is_refused(plain: Trained, huggingface: Trained, tmp_path: Path) -> None:
    with refused(CheckpointError, "another model", "lm_head.weight", advice="package"):
        export(plain.run, huggingface.package, tmp_path / "out")
    with refused(CheckpointError, "no checkpoint", advice="save()"):
        export(tmp_path, plain.package, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "precious").touch()
    with refused(PackageError, str(tmp_path), "files", advice="out with a new folder"):
        export(plain.run, plain.package, tmp_path)
