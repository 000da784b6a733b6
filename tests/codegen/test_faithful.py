"""What can be done with a model's modules can be done with the stages': other dtypes, initialisation, state dicts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.sources import load
from pipegraph.package import Package
from tests.codegen.layers import Block, batch
from tests.codegen.parity import plan_of, split
from tests.slow import cases
from tests.zoo.architectures import shallow
from tests.zoo.visit import loss_fn

pytestmark = pytest.mark.usefixtures("from_graph")

# With rotary tables, with experts, and with learned positions.
ARCHITECTURES = cases(
    ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "BertForMaskedLM"], slow=("LlamaForCausalLM", "BertForMaskedLM")
)


def half(module: nn.Module) -> nn.Module:
    return module.to(torch.bfloat16)


@pytest.mark.filterwarnings("ignore:.* got no gradient in a step, as in the model")  # the bias of BERT's predictions
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_train_in_bfloat16_as_the_model_does(architecture: str, tmp_path: Path) -> None:
    """Converted after the split: losses, gradients and what crosses between stages."""
    config = {"architectures": [architecture], **shallow(architecture)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = load(f"hf:{tmp_path}", batch=2, seq=12)
    package = split(tmp_path, source.model, (), source.kwargs, cut=3)
    model: Any = half(copy.deepcopy(source.model))
    expected = loss_fn(model(**source.kwargs))
    expected.backward()
    pipe = pipegraph.Pipeline(package, "gpipe", 1, loss_fn, kernels="autograd", parallelize_fn=half)
    result = pipe.step(**source.kwargs, return_outputs=True)
    assert result.loss is not None
    assert {tensor.dtype for stage in pipe.stages.values() for tensor in stage.state_dict().values()} == {
        torch.bfloat16
    }
    crossing = [value for value in pipe.package.manifest.values.values() if value.producer >= 0]
    assert crossing and {value.dtype for value in crossing} == {"bfloat16"}
    logits = model(**source.kwargs).logits
    torch.testing.assert_close(result.outputs["logits"], logits.detach(), rtol=0.05, atol=0.02)
    reference = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters() if parameter.grad is not None}
    assert gradients.keys() == reference.keys()
    vectors = [torch.cat([grads[name].double().flatten() for name in reference]) for grads in (gradients, reference)]
    assert F.cosine_similarity(*vectors, dim=0) > 0.999


def test_a_table_follows_its_buffer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shallow("LlamaForCausalLM")))
    source = load(f"hf:{tmp_path}", weights=False, batch=2, seq=12)
    package = pipegraph.write_package(plan_of(source.model, (), source.kwargs), tmp_path / "out", weights=False)
    assert "return cos.to(self.inv_freq.dtype), sin.to(self.inv_freq.dtype)" in (package.path / "blocks.py").read_text()


class Weighted(nn.Module):
    """Casts that do nothing in float32, and that bfloat16 needs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.softmax(h, dim=-1, dtype=torch.float32).to(x.dtype) * h)


def test_casts_stay_as_the_model_writes_them(tmp_path: Path) -> None:
    package = split(tmp_path, Weighted(), (batch(),), cut="b")
    assert "F.softmax(h, dim=-1, dtype=torch.float32).to(h.dtype) * h" in (package.path / "stage_0.py").read_text()
    x = batch().bfloat16()
    stages = [half(package.load_stage(index)) for index in range(2)]
    assert stages[1](stages[0](x)).dtype == torch.bfloat16


class Precise(Weighted):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(F.softmax(h, dim=-1, dtype=torch.float64).to(x.dtype) * h)


def test_a_dtype_that_says_something_stays(tmp_path: Path) -> None:
    package = split(tmp_path, Precise(), (batch(),), cut="b")
    assert "F.softmax(h, dim=-1, dtype=torch.float64)" in (package.path / "stage_0.py").read_text()


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(48, 8), nn.LayerNorm(8))
    return split(tmp_path_factory.mktemp("sequence"), model, (torch.randn(3, 4, 8),), cut="3"), model


def test_leaf_modules_initialise_themselves(sequence: tuple[Package, nn.Module]) -> None:
    """On the meta device, then with memory: as a large model is made."""
    package, _ = sequence
    layers = ("0", nn.Conv1d(4, 8, 3)), ("3", nn.Linear(48, 8))
    for index, (name, like) in enumerate(layers):
        stage = package.load_stage(index, device="meta", weights=False).to_empty(device="cpu")
        for module in (stage.get_submodule(name), like):
            torch.manual_seed(7)
            assert callable(module.reset_parameters)
            module.reset_parameters()
        parameters = dict(stage.get_submodule(name).named_parameters())
        assert all(torch.equal(parameters[key], parameter) for key, parameter in like.named_parameters())


def test_state_dicts_go_both_ways(sequence: tuple[Package, nn.Module]) -> None:
    package, model = sequence
    state = {name: torch.full_like(tensor, 3) for name, tensor in model.state_dict().items()}
    pipe = pipegraph.Pipeline(package, "gpipe", 1, loss_fn, kernels="autograd")
    assert pipe.state_dict().keys() == state.keys()
    pipe.load_state_dict(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in pipe.state_dict().items())
    model = copy.deepcopy(model)
    model.load_state_dict(pipe.state_dict())
    stages = [set(package.load_stage(index).state_dict()) for index in range(2)]
    assert stages[0] | stages[1] == set(state) and not stages[0] & stages[1]


class Widened(nn.Module):
    """The first of several takes the model's dtype, and makes float32, which all others take."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x).float()
        return x + h * F.softmax(self.lin(x), dim=-1, dtype=torch.float32)


def test_a_cast_that_says_something_in_one_layer_stays_in_all(tmp_path: Path) -> None:
    model = nn.Sequential(Widened(), Widened(), Widened(), nn.Linear(8, 8))
    package = split(tmp_path, model, (batch(),), cut="2")
    text = (package.path / "blocks.py").read_text()
    assert text.count("class Widened") == 1
    assert "self.lin(x).to(torch.float32)" in text
    assert "dim=-1, dtype=torch.float32)" in text
    stages = [package.load_stage(index) for index in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(batch()), stages[1](stages[0](batch()))
    assert torch.equal(actual, expected)
