"""The weights of ``hf:``: stored ones are read, and what has initial values instead is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipegraph.errors import SourceError
from pipegraph.graph.sources import load
from tests.cli.command import Command
from tests.messages import refused

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A configuration of a small model, without weights."""
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=16
    )
    config.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def model(folder: Path) -> torch.nn.Module:
    """All of its parameters are 0.5."""
    llama = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder))
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.fill_(0.5)
    return llama


def in_shards(folder: Path) -> None:
    tensors = model(folder).state_dict()
    files = {name: f"pytorch_model-0000{1 + place % 2}-of-00002.bin" for place, name in enumerate(tensors)}
    for file in {*files.values()}:
        torch.save({name: tensor for name, tensor in tensors.items() if files[name] == file}, folder / file)
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


WRITERS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda folder: model(folder).save_pretrained(folder),
    "shards of safetensors": lambda folder: model(folder).save_pretrained(folder, max_shard_size="1KB"),
    "bin": lambda folder: torch.save(model(folder).state_dict(), folder / "pytorch_model.bin"),
    "shards of bin": in_shards,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_weights_are_read(kind: str, folder: Path) -> None:
    WRITERS[kind](folder)
    source = load(f"hf:{folder}")
    assert all((parameter == 0.5).all() for parameter in source.model.parameters())
    assert source.initial_values == ""


@pytest.mark.parametrize("kind", ["shards of safetensors", "shards of bin"])
def test_a_missing_shard_is_an_error(kind: str, folder: Path) -> None:
    WRITERS[kind](folder)
    next(file for file in folder.iterdir() if "-of-" in file.name).unlink()
    with refused(SourceError, "LlamaForCausalLM", "-of-000", advice="LlamaForCausalLM.from_pretrained"):
        load(f"hf:{folder}")


@pytest.mark.parametrize(
    "name",
    [
        *("model.fp16.safetensors", "adapter_model.safetensors", "adapter_model.bin", "tf_model.h5"),
        *("flax_model.msgpack", "consolidated.00.pth", "model-q4.gguf", "diffusion_pytorch_model.bin"),
    ],
)
def test_weights_under_another_name_are_an_error(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"x")
    with refused(SourceError, str(folder), name, advice="model.safetensors"):
        load(f"hf:{folder}")
    assert load(f"hf:{folder}", weights=False).model is not None


def test_state_of_a_trainer_is_no_weights(folder: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (folder / name).write_bytes(b"x")
    assert load(f"hf:{folder}").initial_values.startswith("all parameters")


class Call:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.folder),)


def test_code_in_weights_does_not_run(folder: Path, tmp_path: Path) -> None:
    torch.save({"a": Call(tmp_path / "mark")}, folder / "pytorch_model.bin")
    with refused(SourceError, str(folder), "posix.mkdir", advice="safetensors") as raised:
        load(f"hf:{folder}")
    assert "weights_only" not in str(raised.value)
    assert not (tmp_path / "mark").exists()


def test_split_says_what_has_initial_values(folder: Path, tmp_path: Path, pipegraph: Command) -> None:
    def split(*options: str) -> list[str]:
        where = ("--points", "model.layers.1", "--seq", 8, "-o", tmp_path / "out", "--overwrite")
        return pipegraph("split", f"hf:{folder}", *where, *options).out.splitlines()

    line = f"initial values: all parameters, because {folder} has a configuration and no weights"
    assert line in split()
    assert json.loads("".join(split("--json")))["initial_values"] == line.partition(": ")[2]
    assert line not in split("--no-weights")
    tensors = model(folder).state_dict()
    del tensors["model.norm.weight"]
    torch.save(tensors, folder / "pytorch_model.bin")
    assert f"initial values: model.norm.weight, which the weights in {folder} lack" in split()
    WRITERS["bin"](folder)
    assert not any("initial values" in line for line in split())
