"""Lists, dicts and Sequentials of modules: as the model has them, under the model's names."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
from torch import Tensor, nn

from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences, forward_lines, split


class WithContainer(nn.Module):
    """A container of three blocks, followed by a head."""

    def __init__(self, container: nn.Module) -> None:
        super().__init__()
        self.held = container
        self.between = nn.Tanh()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.held.children():
            x = self.between(module(x))
        return self.head(x)


class Layers(nn.ModuleList):
    """A ModuleList with another class name."""


def blocks() -> list[nn.Module]:
    return [Block(), Block(), nn.Linear(8, 8)]


NAMED = {"first": Block(), "second": Block(), "1": nn.Linear(8, 8)}
CASES = {
    "a list": (nn.ModuleList(blocks()), "nn.ModuleList([Block(), Block(), nn.Linear(8, 8)])"),
    "a list of equals": (
        nn.ModuleList(Block() for _ in range(3)),
        "nn.ModuleList([Block() for _ in range(3)])",
    ),
    "a class of its own": (Layers(blocks()), "nn.ModuleList([Block(), Block(), nn.Linear(8, 8)])"),
    "a Sequential": (nn.Sequential(*blocks()), "nn.Sequential(Block(), Block(), nn.Linear(8, 8))"),
    "a Sequential of equals": (
        nn.Sequential(*(Block() for _ in range(3))),
        "nn.Sequential(*[Block() for _ in range(3)])",
    ),
    "a dict of numbers": (
        nn.ModuleDict({str(index): Block() for index in range(3)}),
        "nn.ModuleDict({str(i): Block() for i in range(3)})",
    ),
    "a dict of names": (
        nn.ModuleDict(NAMED),
        'nn.ModuleDict({"first": Block(), "second": Block(), "1": nn.Linear(8, 8)})',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_container_is_of_the_models_own_kind(case: str, tmp_path: Path) -> None:
    container, constructor = CASES[case]
    model = WithContainer(container)
    package = split(tmp_path, model, (batch(),), cut="head")
    assert f"        self.held = {constructor}\n" in (package.path / "stage_0.py").read_text()
    assert differences(package, model, (batch(),)) == []


def test_a_list_that_starts_in_another_stage_keeps_its_numbers(tmp_path: Path) -> None:
    model = WithContainer(nn.ModuleList(blocks()))
    package = split(tmp_path, model, (batch(),), cut="held.1")
    assert '"1": Block(), "2": nn.Linear(8, 8)' in (package.path / "stage_1.py").read_text()
    assert differences(package, model, (batch(),)) == []


class Sequences(nn.Module):
    """Sequentials of layers, each assigned to a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Block() for _ in range(4)))
        self.one = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.two = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        left = self.one(x)
        right = self.two(x)
        return self.head(left + right)


END = "return self.head(left + right)"


@pytest.mark.parametrize(
    ("cut", "first", "second"),
    [
        ("one", ["x = self.layers(x)", "return x"], ["left = self.one(x)", "right = self.two(x)", END]),
        (
            "layers.2",
            ["return self.layers(x)"],
            ["x = self.layers(x)", "left = self.one(x)", "right = self.two(x)", END],
        ),
        (
            "two.1",
            ["x = self.layers(x)", "left = self.one(x)", "right = self.two(x)", "return left, right"],
            ["right = self.two(right)", END],
        ),
    ],
)
def test_a_sequential_is_called_whole_and_its_values_have_the_models_names(
    cut: str, first: list[str], second: list[str], tmp_path: Path
) -> None:
    model = Sequences()
    package = split(tmp_path, model, (batch(),), cut=cut)
    assert (forward_lines(package, 0), forward_lines(package, 1)) == (first, second)
    assert "self.layers = nn.Sequential(*[Block() for _ in range(" in (package.path / "stage_0.py").read_text()
    assert differences(package, model, (batch(),)) == []


class Returned(nn.Module):
    """A Sequential that makes what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def test_values_of_a_returned_sequential_have_the_name_of_what_it_takes(tmp_path: Path) -> None:
    package = split(tmp_path, Returned(), (batch(),), cut="layers.2")
    assert forward_lines(package, 0) == ["return self.layers(x)"]
    assert forward_lines(package, 1) == ["return self.layers(x)"]


def test_a_part_of_a_sequential_is_a_sequential(tmp_path: Path) -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.0), nn.Linear(16, 8))

    model = nn.Sequential(nn.Linear(8, 8), block(), block())
    package = split(tmp_path, model, (batch(),), cut="1.3")
    first, second = ((package.path / f"stage_{index}.py").read_text() for index in range(2))
    assert "nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(p=0.0))" in first
    assert '"1": nn.Sequential(OrderedDict({"3": nn.Linear(16, 8)})),' in second
    assert "class " not in (package.path / "blocks.py").read_text()
    assert differences(package, model, (batch(),), train=True) == []
    assert [name for index in range(2) for name in package.load_stage(index).state_dict()] == list(model.state_dict())


def test_a_sequential_of_two_is_called_as_one(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU())
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.features(x))

    model = Two()
    package = split(tmp_path, model, (batch(),), cut="features.2")
    assert forward_lines(package, 0) == ["return self.features(x)"]
    assert differences(package, model, (batch(),), train=True) == []


SEQUENTIAL = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(5)), nn.Tanh())
NAMED_PARTS = nn.Sequential(OrderedDict({"embed": nn.Linear(8, 8), "1": Block(), "norm": nn.LayerNorm(8)}))


@pytest.mark.parametrize(
    ("model", "cut", "first", "second"),
    [
        (
            SEQUENTIAL,
            "2",
            "super().__init__(nn.Linear(8, 8), Block())",
            'super().__init__(OrderedDict({**{str(i): Block() for i in range(2, 6)}, "6": nn.Tanh()}))',
        ),
        (
            nn.Sequential(*(Block() for _ in range(5))),
            "3",
            "super().__init__(*[Block() for _ in range(3)])",
            "super().__init__(OrderedDict({str(i): Block() for i in range(3, 5)}))",
        ),
        (
            NAMED_PARTS,
            "norm",
            'super().__init__(OrderedDict({"embed": nn.Linear(8, 8), "1": Block()}))',
            'super().__init__(OrderedDict({"norm": nn.LayerNorm(8)}))',
        ),
    ],
)
def test_stages_of_a_sequential_are_sequentials(
    model: nn.Module, cut: str, first: str, second: str, tmp_path: Path
) -> None:
    package = split(tmp_path, model, (batch(),), cut=cut)
    for index, constructor in enumerate((first, second)):
        text = (package.path / f"stage_{index}.py").read_text()
        assert f"class Stage{index}(nn.Sequential):" in text
        assert constructor in text and "def forward" not in text
    assert differences(package, model, (batch(),), train=True) == []
    assert [name for index in range(2) for name in package.load_stage(index).state_dict()] == list(model.state_dict())


class Pair(nn.Module):
    """Two modules, with an operation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).sin())


def test_a_stage_that_begins_inside_a_sequentials_module_takes_the_others_by_their_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Pair(), *(Block() for _ in range(4)))
    package = split(tmp_path, model, (batch(),), cut="1.second")
    assert "class Stage1(nn.ModuleDict):" in (package.path / "stage_1.py").read_text()
    assert 'self["1"] = PairEnd()' in (package.path / "stage_1.py").read_text()
    assert "self.update({str(i): Block() for i in range(2, 6)})" in (package.path / "stage_1.py").read_text()
    assert forward_lines(package, 1)[1:] == [
        "for i in range(2, 6):",
        "    input = self[str(i)](input)",
        "return input",
    ]
    assert differences(package, model, (batch(),), train=True) == []
    names = [name for index in range(2) for name in package.load_stage(index).state_dict()]
    assert names == list(model.state_dict())


@pytest.mark.parametrize("frozen", ["0", "6"])
def test_a_sequential_with_frozen_modules(frozen: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(5)), nn.Linear(8, 8))
    model.get_submodule(frozen).requires_grad_(False)
    package = split(tmp_path, model, (batch(),), cut="3")
    assert differences(package, model, (batch(),), train=True) == []
    stages = map(package.load_stage, range(2))
    trained = [name for stage in stages for name, parameter in stage.named_parameters() if parameter.requires_grad]
    assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]


class Two(nn.Module):
    """A residual block whose two layers are called by index."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x) * self.scale(x)) + x


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.head = Two(), Two(), Two(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.third(self.second(self.first(x).tanh())))


def test_a_module_that_holds_layers_and_occurs_again_is_a_class(tmp_path: Path) -> None:
    model = Residual()
    package = split(tmp_path, model, (batch(2, 4, 8),), cut="third.blocks.1")
    assert differences(package, model, (batch(2, 4, 8),)) == []
    stage = (package.path / "stage_0.py").read_text()
    assert "self.first = Two()" in stage and "self.second(self.first(x).tanh())" in stage
    assert "self.third = TwoStart()" in stage  # it is cut
