"""Weights of other tools: other names, other formats, padded embeddings. The outputs are those of the whole model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import pipegraph
from pipegraph.errors import ArgumentError, CheckpointError, PackageError
from pipegraph.package import Package
from tests.messages import refused
from tests.runtime import ranks

ROWS = 10


class LanguageModel(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.register_buffer("scale", torch.ones(8))
        self.head = nn.Linear(8, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return self.head(x)


def trained() -> LanguageModel:
    """A model with other weights than the package has."""
    torch.manual_seed(3)
    model = LanguageModel()
    with torch.no_grad():
        model.scale.fill_(2.0)
    return model


def tokens() -> Tensor:
    return torch.randint(0, ROWS, (4, 3), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    torch.manual_seed(0)
    plan = pipegraph.plan(pipegraph.capture(LanguageModel(), (tokens(),)), points=["layers.1"])
    return pipegraph.write_package(plan, tmp_path_factory.mktemp("weights") / "package")


def outputs(package: Package, weights: Any) -> Tensor:
    pipe = pipegraph.Pipeline(package, "gpipe", 2, kernels="eager", weights=weights)
    result: Tensor = pipe.eval(tokens())
    return result


def check(package: Package, weights: Any, model: nn.Module) -> None:
    """No warning is raised, and the outputs are the model's."""
    with torch.no_grad():
        assert_close(outputs(package, weights), model(tokens()))


def safetensors(folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def dcp_folder(folder: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_state_dict(package: Package) -> None:
    check(package, trained().state_dict(), trained())


def test_other_names(package: Package, tmp_path: Path) -> None:
    state = trained().state_dict()
    prefixed = {f"ema.{name}": tensor for name, tensor in state.items()}
    zeros = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in state.items()}
    check(package, pipegraph.Weights(safetensors(tmp_path / "ema", prefixed | zeros), prefix="ema."), trained())
    renamed = {name.replace("layers.", "blocks_").replace("embed", "tok"): tensor for name, tensor in state.items()}
    rename = {r"^blocks_(\d)": r"layers.\1", "^tok": "embed"}
    check(package, pipegraph.Weights(safetensors(tmp_path / "renamed", renamed), rename=rename), trained())


def test_a_tied_weight_under_one_of_its_names(package: Package, tmp_path: Path) -> None:
    state = {f"m.{name}": tensor for name, tensor in trained().state_dict().items() if name != "embed.weight"}
    check(package, pipegraph.Weights(safetensors(tmp_path / "tied", state), prefix="m."), trained())


@pytest.mark.parametrize("rows", [ROWS + 6, ROWS - 2])
def test_rows_of_a_padded_embedding(rows: int, package: Package, tmp_path: Path) -> None:
    state = trained().state_dict()
    weight = state["embed.weight"]
    state["embed.weight"] = torch.cat([weight, torch.ones(6, 8)])[:rows]
    del state["head.weight"]
    folder = safetensors(tmp_path / "padded", state)
    with refused(PackageError, f"[{rows}, 8]", "[10, 8]", advice="rows="):
        outputs(package, folder)
    expected = trained()
    with torch.no_grad():
        expected.embed.weight[rows:] = 0.0
    check(package, pipegraph.Weights(folder, rows={"embed.weight": ROWS}), expected)


def test_tensors_are_converted(package: Package, tmp_path: Path) -> None:
    """As wq and wk of torchtitan's Llama, whose rows are in another order."""
    state = {name: tensor.flip(0) for name, tensor in trained().state_dict().items()}
    weights = pipegraph.Weights(safetensors(tmp_path / "flipped", state), convert=lambda name, tensor: tensor.flip(0))
    check(package, weights, trained())


def test_a_folder_of_dcp(package: Package, tmp_path: Path) -> None:
    check(package, dcp_folder(tmp_path / "flat", trained().state_dict()), trained())
    model = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    model(tokens()).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    nested = dcp_folder(tmp_path / "nested", state)
    check(package, pipegraph.Weights(nested, prefix="model."), model)
    with refused(PackageError, "'model.'", advice="prefix='model.'"):
        outputs(package, nested)


def test_a_checkpoint_of_another_run(package: Package, tmp_path: Path) -> None:
    pipe = pipegraph.Pipeline(package, "gpipe", 2, kernels="eager", weights=trained().state_dict())
    pipe.save(tmp_path / "run", step=7)
    check(package, tmp_path / "run" / "step-00000007", trained())
    with refused(PackageError, "run", advice="step-00000007"):
        outputs(package, tmp_path / "run")


def save_sharded(rank: int, folder: str) -> None:
    """What a trainer with FSDP saves."""
    model = trained()
    fully_shard(model.layers[1])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(state | {"optimizer": optimizer_state, "train_state": {"step": torch.tensor(rank)}}, checkpoint_id=folder)
    dist.barrier()


def test_a_sharded_checkpoint_of_a_trainer(package: Package, tmp_path: Path) -> None:
    assert ranks.run(save_sharded, 2, str(tmp_path / "dcp")) == [None, None]
    with pytest.warns(UserWarning, match=r"no stage reads: .*(optimizer|train_state)\.\*"):
        actual = outputs(package, tmp_path / "dcp")
    with torch.no_grad():
        assert_close(actual, trained()(tokens()))


def test_a_stage_reads_its_own_tensors(package: Package) -> None:
    read = set()

    class Recorded(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.add(name)
            return super().__getitem__(name)

    package.load_stage(1, weights=Recorded(trained().state_dict()))
    assert read == {"layers.1.weight", "layers.1.bias", "scale", "embed.weight"}


def test_a_model_reads_them_too(tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in trained().state_dict().items()}
    model = LanguageModel()
    model.load_state_dict(pipegraph.Weights(safetensors(tmp_path / "saved", state), prefix="module."))
    assert_close(model(tokens()), trained()(tokens()))


def test_write_package_copies_them(package: Package, tmp_path: Path) -> None:
    state = {f"module.{name}": tensor for name, tensor in trained().state_dict().items()}
    folder = safetensors(tmp_path / "saved", state)
    plan = pipegraph.plan(pipegraph.capture(LanguageModel(), (tokens(),)), points=["layers.1"])
    with refused(PackageError, "'module.'", advice="prefix='module.'"):
        pipegraph.write_package(plan, tmp_path / "out", weights=folder)
    written = pipegraph.write_package(plan, tmp_path / "out", weights=pipegraph.Weights(folder, prefix="module."))
    check(written, None, trained())


def test_names_that_are_missing_or_not_read(package: Package) -> None:
    state: dict[str, Tensor] = trained().state_dict()
    unread = {"layers.2.weight": torch.ones(1), "value_head.weight": torch.ones(1), "value_head.bias": torch.ones(1)}
    with pytest.warns(UserWarning, match=r"no stage reads: layers\.2\.weight, value_head\.\* \(2 tensors\)"):
        outputs(package, state | unread)
    del state["layers.1.weight"], state["layers.1.bias"]
    with refused(PackageError, "layers.1.weight, layers.1.bias", "the dict", advice="rename="):
        outputs(package, state)


@pytest.mark.parametrize(
    ("arguments", "kind", "places", "advice"),
    [
        ({"prefix": "mod."}, ArgumentError, ["'mod.'", "embed.weight"], "prefix"),
        ({"rename": {"(": ""}}, ArgumentError, ["'('"], "regular expression"),
        ({"rename": {"^layers": r"\9"}}, ArgumentError, [r"\\9"], "regular expression"),
        ({"rename": {r"layers\.\d": "layers"}}, ArgumentError, ["layers.0.", "layers.1."], "pattern"),
        ({"rows": {"lm_head.weight": 10}}, ArgumentError, ["lm_head.weight"], "embed.weight"),
        ({"rows": {"embed.weight": 0}}, ArgumentError, ["embed.weight", "0"], "rows="),
        ({"prefix": 3}, ArgumentError, ["prefix", "3"], "prefix="),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, Any], kind: type[Exception], places: list[str], advice: str, tmp_path: Path
) -> None:
    folder = safetensors(tmp_path / "saved", trained().state_dict())
    with refused(kind, *places, advice=advice):
        pipegraph.Weights(folder, **arguments)


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def leave_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


@pytest.mark.parametrize(
    ("damage", "kind", "text"),
    [
        (truncate, PackageError, "truncated"),
        (leave_metadata, CheckpointError, "system"),
        (lambda folder: (folder / "model.safetensors").unlink(), PackageError, "nothing"),
    ],
)
def test_damaged_files(damage: Callable[[Path], object], kind: type[Exception], text: str, tmp_path: Path) -> None:
    folder = safetensors(tmp_path / "saved", trained().state_dict())
    damage(folder)
    with refused(kind, "saved", text):
        pipegraph.Weights(folder)
