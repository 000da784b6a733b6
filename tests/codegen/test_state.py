"""Parameters and buffers: names, ties, frozen ones, and where they may stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipegraph.package import Buffer
from tests.codegen.layers import Block, Blocks, Row, batch, ints
from tests.codegen.parity import differences, split


class Tied(nn.Module):
    """One weight under three names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.middle = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 8, bias=False)
        self.middle.weight = self.embed.weight
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


class Direct(Blocks):
    """Parameters of the model itself, read by several stages, before and after an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.randn(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.weight)
        return self.c(self.b(self.a(x * gate) * gate) * self.weight) * gate * self.scale + self.empty.sum()


class Holders(nn.Module):
    """Parameters in lists, dicts and bare modules, and modules under names that are no attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(8, 8)) for _ in range(3)])
        self.named = nn.ParameterDict({"in": torch.randn(8), "a-b": torch.randn(8)})
        self.bare = nn.Module()
        self.bare.weight = nn.Parameter(torch.ones(8))
        self.bare.inner = Block()
        self.bare.register_buffer("shift", torch.ones(8))
        self.several = nn.ModuleDict({"0": Block(), "1x": Block(), "a-b": Block()})
        self.add_module("_modules_", Block())
        self.type_ = Block()

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = x @ row
        for block in self.several.values():
            x = block(x)
        x = self.bare.inner(x * self.named["in"]) * self.bare.weight + self.bare.shift
        return self.type_(self._modules["_modules_"](x)) + self.named["a-b"]  # type: ignore[misc]


class Constants(Blocks):
    """Plain tensors in attributes and in the code, and buffers of all sorts; one module is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.arange(8.0)
        self.listed = [torch.arange(3.0), torch.ones(2)]
        self.register_buffer("large", torch.randn(8, 8), persistent=False)
        self.register_buffer("small", torch.ones(8))
        self.register_buffer("index", torch.tensor([0, 2, 4]))
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = (
            self.a(x) * self.plain
            + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, float("inf")]).clamp(max=9)
            + torch.tensor(3.0)
        )
        h = self.b(h @ self.large) * self.small
        h = torch.where(h > 0, h, torch.tensor(float("-inf")).clamp(min=-3)) * self.listed[0].sum()
        return self.c(h)[:, self.index]


class Integers(nn.Module):
    """A parameter of integers, and values computed from integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.bag = nn.EmbeddingBag(10, 8, mode="sum")
        self.table = nn.Parameter(torch.arange(10), requires_grad=False)
        self.block = Block()
        self.register_buffer("order", torch.randperm(10))

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        order, table = self.order[tokens], self.table[tokens]
        h = self.block(self.embed(order) + self.bag(table)[:, None])
        return h + self.embed(table), order, table // 2, tokens.bool().any(), (order > 3).sum()


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(8, dtype=torch.float64)
        self.b = nn.Linear(8, 8).double()
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.norm(self.a(x.bfloat16()).double())).float()
        return torch.fft.irfft(torch.fft.rfft(h) * self.spectrum * 2j, n=8)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 8), Row([Block() for _ in range(4)]), nn.Linear(8, 11))
    model[0].requires_grad_(False)
    model[1].layers[0].requires_grad_(False)
    model[1].layers[2].linear.bias.requires_grad_(False)
    return model


CASES = {
    "tied, two of three in the second stage": (Tied, "middle", [ints(8, 3, 4)]),
    "tied, one in each stage": (Tied, "middle,head", [ints(8, 3, 4)]),
    "parameters of the model itself": (Direct, "b,c", [batch()]),
    "parameters in holders": (Holders, "several.1x,type_", [batch()]),
    "constants and buffers": (Constants, "b,c", [batch()]),
    "integers": (Integers, "block", [ints(10, 3, 4)]),
    "other dtypes": (Dtypes, "norm", [batch()]),
    "frozen": (frozen, "1.layers.1,1.layers.3", [ints(11, 3, 5)]),
    "all frozen": (lambda: frozen().requires_grad_(False), "1.layers.2", [ints(11, 3, 5)]),
}


@pytest.mark.parametrize("case", CASES)
def test_parity(case: str, tmp_path: Path) -> None:
    build, cut, args = CASES[case]
    torch.manual_seed(0)
    model = build()
    assert differences(split(tmp_path, model, tuple(args), cut=cut), model, tuple(args), train=True) == []


class Scales(nn.Module):
    """Parameters by name, in an order that is not that of the alphabet, and in a list that two stages share."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()
        self.sides = nn.ParameterDict()
        self.sides["up"], self.sides["down"] = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.rows = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x * self.sides["up"] + self.sides["down"]) * self.rows[0] + self.rows[1]
        return self.b(x) * self.rows[2] + self.rows[3]


def test_parameters_in_containers_are_in_the_same_containers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Scales()
    package = split(tmp_path, model, (batch(),), cut="b")
    assert differences(package, model, (batch(),), train=True) == []
    texts = ((tmp_path / f"package/stage_{index}.py").read_text() for index in range(2))
    first, second = ("".join(text.split()) for text in texts)
    assert 'self.sides=nn.ParameterDict(OrderedDict({"up":' in first
    assert 'x*self.sides["up"]+self.sides["down"]' in first
    assert "self.rows=nn.ParameterList([" in first
    assert 'self.rows=nn.ParameterDict({"2":' in second
    names = [name for index in range(2) for name in package.load_stage(index).state_dict()]
    model_names = list(model.state_dict())
    assert sorted(names) == sorted(model_names)
    for index in range(2):
        names = list(package.load_stage(index).state_dict())
        assert names == [name for name in model_names if name in names]


def test_the_manifest_has_the_names_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    package = split(tmp_path, Constants(), (batch(),), cut="b")
    assert [stage.parameters for stage in package.manifest.stages] == [
        ("a.linear.weight", "a.linear.bias", "unused.weight", "unused.bias"),
        ("b.linear.weight", "b.linear.bias", "c.linear.weight", "c.linear.bias"),
    ]
    assert Buffer("large", persistent=False) in package.manifest.stages[0].buffers
    assert {Buffer("small"), Buffer("index")} <= set(package.manifest.stages[1].buffers)


def test_a_buffer_that_is_not_persistent_stays_so(tmp_path: Path) -> None:
    """torch.distributed.pipelining makes it persistent, so that ``state_dict()`` has keys that the model lacks."""
    torch.manual_seed(0)
    model = Constants()
    package = split(tmp_path, model, (batch(),), cut="b")
    stages = [package.load_stage(index) for index in range(2)]
    assert {key for stage in stages for key in stage.state_dict()} == set(model.state_dict())
    assert torch.equal(stages[0].large, model.large)


def test_tied_names_in_one_stage_are_one_parameter(tmp_path: Path) -> None:
    package = split(tmp_path, Tied(), (ints(8, 3, 4),), cut="middle")
    assert package.manifest.tied == (("embed.weight", "middle.weight", "head.weight"),)
    for stage in (package.load_stage(1), package.load_stage(1, weights=False), package.load_stage(1, device="meta")):
        assert stage.middle.weight is stage.head.weight
        assert [name for name, _ in stage.named_parameters()] == ["middle.weight"]
        assert [*stage.state_dict()] == ["middle.weight", "head.weight"]


def test_a_stage_says_what_is_tied_to_parameters_of_other_stages(tmp_path: Path) -> None:
    package = split(tmp_path, Tied(), (ints(8, 3, 4),), cut="middle,head")
    docstrings = [type(package.load_stage(index)).__doc__ or "" for index in range(3)]
    assert "embed.weight is tied to middle.weight of stage 1, head.weight of stage 2.\n" in docstrings[0]
    assert "head.weight is tied to embed.weight of stage 0, middle.weight of stage 1.\n" in docstrings[2]


def test_of_many_ties_a_stage_names_the_first(tmp_path: Path) -> None:
    shared = Row([Block(), Block(), Block()])
    package = split(tmp_path, nn.Sequential(shared, nn.Linear(8, 8), shared), (batch(),), cut="1")
    text = (package.path / "stage_1.py").read_text(encoding="utf-8")
    assert "2.layers.0.linear.weight is tied to 0.layers.0.linear.weight of stage 0.\n" in text
    assert text.count("is tied to") == 4
    assert "2 more are tied; pipeline.json lists their names.\n" in text


def test_frozen_parameters_stay_frozen(tmp_path: Path) -> None:
    package = split(tmp_path, frozen(), (ints(11, 3, 5),), cut="1.layers.1,1.layers.3")
    for weights in (True, False):
        stages = [package.load_stage(index, weights=weights) for index in range(3)]
        assert {
            name for stage in stages for name, parameter in stage.named_parameters() if not parameter.requires_grad
        } == {"0.weight", "1.layers.0.linear.weight", "1.layers.0.linear.bias", "1.layers.2.linear.bias"}
