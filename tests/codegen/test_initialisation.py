"""Stages without weights start as the model does: constants exactly, random numbers from the same distribution."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.initialisation import Initialisation, initialisation_of, initialisation_recorded
from pipegraph.graph.sources import load
from pipegraph.package import Package

WIDTH = 64

MODEL = """
import math
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, start):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64) * start)
        self.shift = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return x * self.weight + self.shift


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = Norm(1.0), nn.LayerNorm(64)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.gamma = nn.Parameter(1e-5 * torch.ones(64))
        self.memory = nn.Parameter(torch.randn(8, 64) * 0.3)
        self.mixing = nn.Parameter(torch.empty(64, 64))
        nn.init.orthogonal_(self.mixing, gain=2.0)

    def forward(self, x):
        y = self.norm(x) @ self.mixing
        x = x + self.attention(y, y, y, need_weights=False)[0] + self.memory.sum(0)
        return x + self.gamma * self.down(self.up(self.mlp_norm(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 64, padding_idx=0)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(64, 50, bias=False)
        self.apply(self.start)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.trunc_normal_(parameter, std=0.02 / math.sqrt(8))
        self.head.weight = self.embed.weight

    def start(self, module):
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.1)
            module.weight.data[module.padding_idx].zero_()
        if type(module) is nn.Linear:
            nn.init.normal_(module.weight, std=0.05)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


torch.manual_seed(0)
model = Model()
example_inputs = (torch.randint(50, (2, 3)),)
"""


def package_of(folder: Path, stages: int, weights: bool) -> Package:
    (folder / "model.py").write_text(MODEL)
    source = load(str(folder / "model.py"), weights=weights)
    plan = pipegraph.plan(pipegraph.capture(source.model, source.args), stages=stages, balance="uniform")
    return pipegraph.write_package(plan, folder / f"package-{stages}-{weights}", weights=False, source=source)


def parameters_of(package: Package) -> dict[str, Tensor]:
    stages = (package.load_stage(index, weights=False) for index in range(len(package.manifest.stages)))
    return {name: parameter.detach() for stage in stages for name, parameter in stage.named_parameters()}


@pytest.fixture(scope="module", params=[pytest.param(True, marks=pytest.mark.slow), False])
def package(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """Two stages, of a model with weights and of one on the meta device."""
    return package_of(tmp_path_factory.mktemp("package"), 2, request.param)


def test_stages_without_weights_start_as_the_model(package: Package) -> None:
    actual = parameters_of(package)
    model = load(str(package.path.with_name("model.py"))).model
    expected = dict(model.named_parameters(remove_duplicate=False))
    assert {*actual} == {*expected}
    for name, parameter in expected.items():
        initial, values = actual[name], parameter.detach()
        if values.unique().numel() == 1:
            assert torch.equal(initial, values), name
        else:
            assert initial.std().item() == pytest.approx(values.std().item(), rel=0.15), name
            assert abs(initial.mean().item() - values.mean().item()) < 0.3 * values.std().item(), name
    assert torch.allclose(actual["layers.1.mixing"] @ actual["layers.1.mixing"].T, 4 * torch.eye(WIDTH), atol=1e-4)
    assert torch.equal(actual["head.weight"], actual["embed.weight"])
    assert not actual["embed.weight"][0].any()  # the row for padding
    assert actual["embed.weight"][1:].all()


@pytest.mark.slow
def test_numbers_do_not_depend_on_the_cut_or_on_earlier_ones(tmp_path: Path) -> None:
    two = parameters_of(package_of(tmp_path, 2, False))
    rng_state = torch.random.get_rng_state()
    torch.rand(3)
    three = parameters_of(package_of(tmp_path, 3, False))
    assert {*two} == {*three}
    assert all(torch.equal(two[name], three[name]) for name in two)
    assert not torch.equal(two["layers.0.memory"], two["layers.1.memory"])
    torch.random.set_rng_state(rng_state)


def test_the_source_says_how(package: Package) -> None:
    text = (package.path / "weights.py").read_text()
    table = text[text.index("INITIALISATION") : text.index("def initialise(")]
    assert '"layers.*.down.weight": partial(nn.init.trunc_normal_, std=0.0070710678118654745),' in table
    assert '"layers.*.up.bias": nn.init.zeros_,' in table
    assert "attention" not in table  # what MultiheadAttention does in any case
    assert "norm.weight" not in table
    blocks = (package.path / "blocks.py").read_text()
    assert "self.weight = nn.Parameter(torch.ones(64))" in blocks
    assert "self.gamma = nn.Parameter(torch.full((64,), 1e-05))" in blocks


class InitialisesChild(nn.Module):
    """Its own ``reset_parameters`` also initialises a parameter of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 8))
        self.scale = nn.Parameter(torch.ones(8))
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        nn.init.normal_(self.inner.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.inner(x) @ self.weight * self.scale)


def test_a_model_that_is_built_already_is_asked_and_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model = InitialisesChild()
    model.norm.running_mean.fill_(3.0)  # type: ignore[union-attr]
    state_before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.random.get_rng_state()
    initialisations = initialisation_of(model)
    named = {name: initialisations.get(id(parameter)) for name, parameter in model.named_parameters()}
    assert named["weight"] == Initialisation("kaiming_uniform_", (("a", math.sqrt(5)),))
    assert named["scale"] == Initialisation("ones_")
    assert named["inner.weight"] == Initialisation("normal_", (("std", 0.5),))
    assert named["inner.bias"].is_usual
    assert all(torch.equal(tensor, state_before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)


def zeroed(parameter: Tensor, *indices: Any) -> Tensor:
    nn.init.normal_(parameter)
    for index in indices:
        parameter[index].zero_()
    return parameter


def test_rows_of_zeros_are_recorded() -> None:
    rows = {
        Initialisation("normal_", zero_row=2): lambda: zeroed(torch.empty(5, 3), 2),
        Initialisation("normal_", zero_row=0): lambda: zeroed(torch.empty(5, 3), 0, 0),
    }
    other_parts = [
        lambda: zeroed(torch.empty(5, 3), slice(1, 3)),
        lambda: zeroed(torch.empty(6), slice(2, 4)),
        lambda: zeroed(torch.empty(4, 4), (slice(None), 1)),
        lambda: zeroed(torch.empty(5, 3), 0, 2),
    ]
    with initialisation_recorded() as mark:
        models = [nn.ParameterList([make()]) for make in (*rows.values(), *other_parts)]
        for model in models:
            mark(model)
    assert [initialisation_of(model).get(id(model[0])) for model in models] == [*rows, None, None, None, None]


def test_what_is_recorded() -> None:
    cases = {
        Initialisation("normal_", (("std", 0.5),)): lambda: torch.randn(4, 4).div(2),
        Initialisation("uniform_", (("a", -1.0), ("b", 2.0))): lambda: torch.empty(4).uniform_(-1.0, 2.0),
        Initialisation("constant_", (("val", 3.0),)): lambda: torch.full((4,), 3.0),
        Initialisation("xavier_normal_", (("gain", 2.0),)): lambda: nn.init.xavier_normal_(torch.empty(4, 4), 2.0),
        Initialisation("ones_"): lambda: torch.zeros(4).fill_(1),
    }
    unknown = [lambda: torch.arange(4.0).log1p(), lambda: torch.zeros(4).index_fill_(0, torch.tensor([1]), 2.0)]
    with initialisation_recorded() as mark:
        models = [nn.ParameterList([make()]) for make in (*cases.values(), *unknown)]
        for model in models:
            mark(model)
    initialisations = [initialisation_of(model).get(id(model[0])) for model in models]
    assert initialisations == [*cases, None, None]
