"""Classes of one name in their author's text are one class, with the author's branches and the author's names."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipegraph.codegen.classes import merge_branches
from tests.codegen.parity import differences, source, split


def traced_size(size: Tensor) -> int:
    """Only a tracer calls it."""
    return int(size.item())


class Layer(nn.Module):
    """A convolution, with a norm and an activation if the caller wants them."""

    def __init__(self, width_in: int, width_out: int, stride: int = 1, norm: bool = True, act: bool = True) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width_in, width_out, 3, stride=stride, padding=1)
        self.norm = nn.GroupNorm(1, width_out) if norm else None
        if act:
            self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        if hasattr(self, "act"):  # the last layer of a block has none
            x = self.act(x)
        return x


class Gate(nn.Module):
    """Scales by what a root of the width says; pads its input if it is a gate of the second kind."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)
        self.scale = 1 / math.sqrt(width)
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        size = traced_size(x) if torch.jit.is_tracing() else x.shape[-1]
        if self.kind == "shifted":
            x = torch.roll(x, 1, dims=-1)
        elif self.kind == "scaled":
            x = x * self.scale
        return torch.sigmoid(self.proj(x)) * size


class Residual(nn.Module):
    """One of two modules, under one name."""

    def __init__(self, width: int, hidden_width: int, kind: str | None) -> None:
        super().__init__()
        self.inside = Layer(width, width, norm=False) if kind is None else Gate(width, kind)
        self.expand = Layer(width, hidden_width)
        self.reduce = Layer(hidden_width, width, norm=False, act=False)
        self.is_gated = kind is not None

    def forward(self, x: Tensor) -> Tensor:
        if self.is_gated:
            x = x + self.inside(x.mT).mT
        else:
            x = self.inside(x)
        return x + self.reduce(self.expand(x))


class Model(nn.Module):
    """Blocks that run different lines of the same text."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = Layer(4, 8, stride=2)
        kinds = ((8, 12, None), (8, 16, "shifted"), (8, 12, "scaled"), (8, 24, "plain"), (8, 12, None))
        self.blocks = nn.ModuleList([Residual(width, hidden, kind) for width, hidden, kind in kinds])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


INPUTS = (torch.randn(4, 4, 10),)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = Model()
    package = split(tmp_path_factory.mktemp("branches"), model, INPUTS, cut="blocks.2")
    for train in (True, False):
        assert differences(package, model, INPUTS, train=train) == []
    stages = [package.load_stage(index) for index in range(2)]
    x = torch.randn(2, 4, 14)  # of other sizes than the example
    torch.testing.assert_close(stages[1](stages[0](x)), model(x))
    return source(package)


def test_modules_that_run_different_branches_share_a_class(text: str) -> None:
    assert [text.count(f"class {name}") for name in ("Layer", "Gate", "Residual")] == [1, 1, 1]
    assert 'if hasattr(self, "act"):  # the last layer of a block has none' in text
    assert 'elif self.kind == "scaled":' in text


def test_what_a_module_lacks_is_none_or_absent(text: str) -> None:
    assert "def __init__(self, width_in, width_out, stride=1, norm=None, act=None):" in text
    assert "self.norm = norm\n        if act is not None:\n            self.act = act" in text
    assert "self.reduce = Layer(width_in=hidden_width, width_out=8)" in text


def test_modules_that_differ_are_arguments(text: str) -> None:
    assert 'Residual(hidden_width=16, is_gated=True, inside=Gate(kind="shifted"))' in text
    assert "inside=Layer(width_in=8, width_out=8, act=nn.SiLU())" in text


def test_a_number_that_the_constructor_computes_is_computed(text: str) -> None:
    assert "self.scale = 1 / math.sqrt(8)" in text


def test_a_side_that_never_ran_is_left_out(text: str) -> None:
    assert "size = x.shape[-1]" in text
    assert "traced_size" not in text


class Doubled(nn.Module):
    """What decides is the module's own number, and the graph's constant."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.number % 2 == 0:
            return self.norm(x) * 2
        x = self.norm(x)
        if self.number > 2:
            x = x + self.number
        return x


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Doubled(number) for number in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_number_that_decides_is_an_argument(tmp_path: Path) -> None:
    model, inputs = Numbered(), (torch.randn(3, 8),)
    package = split(tmp_path, model, inputs, cut="layers.3")
    assert differences(package, model, inputs) == []
    text = source(package)
    assert text.count("class Doubled") == 1
    assert "nn.ModuleList([Doubled(0), Doubled(1), Doubled(2)])" in text


class WithBuffer(nn.Module):
    """Has a table in one of two modules."""

    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.has_table = has_table
        if has_table:
            self.register_buffer("table", torch.arange(8.0))
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.has_table:
            x = x + self.table
        return self.proj(x)


def test_classes_with_other_tensors_stay_apart(tmp_path: Path) -> None:
    model = nn.Sequential(WithBuffer(True), WithBuffer(False), WithBuffer(True))
    inputs = (torch.randn(3, 8),)
    package = split(tmp_path, model, inputs, cut="1")
    assert differences(package, model, inputs) == []
    text = source(package)
    assert "if self.has_table" not in text
    assert text.count("class WithBuffer") == 2


def test_a_class_that_differs_loses_the_other_branches_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = merge_branches._Group.merged

    def wrong(group: Any) -> Any:
        source = merged(group)
        text = source.author_text
        functions = tuple(function.replace("x * 2", "x * 3").replace(") * 2", ") * 3") for function in text.functions)
        return replace(source, forward=(replace(text, functions=functions, places=(("", 0),) * len(text.places)),))

    monkeypatch.setattr(merge_branches._Group, "merged", wrong)
    model, inputs = Numbered(), (torch.randn(3, 8),)
    package = split(tmp_path, model, inputs, cut="layers.3")
    assert differences(package, model, inputs) == []
    text = source(package)
    assert "* 3" not in text
    assert "return self.norm(x) * 2" in text


class Shaped(nn.Module):
    """Is given the sizes of its input, which no tensor has: that statement is written from the graph."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, sizes: tuple[int, int]) -> Tensor:
        rows, columns = sizes
        x = x.unflatten(1, (rows, columns)) + 1
        return self.norm(x.flatten(1, 2))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList([Shaped(8), Shaped(8), Shaped(8)])

    def forward(self, x: Tensor) -> Tensor:
        for level, columns in zip(self.levels, (12, 6, 4), strict=True):
            x = level(x, (24 // columns, columns))
        return x


def test_numbers_of_statements_from_the_graph_are_arguments(tmp_path: Path) -> None:
    model, inputs = Pyramid(), (torch.randn(3, 24, 8),)
    package = split(tmp_path, model, inputs, cut="levels.2")
    assert differences(package, model, inputs) == []
    text = source(package)
    assert text.count("class Shaped") == 1
    assert "nn.ModuleList([Shaped(12), Shaped(6)])" in text
    assert "x = x.unflatten(1, (-1, self.size)) + 1" in text


class Windowed(nn.Module):
    """Reads its number in one kind of layer alone."""

    def __init__(self, number: int, kind: str) -> None:
        super().__init__()
        self.number, self.kind = number, kind
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "window":
            x = torch.roll(x, self.number, dims=0)
        return self.norm(x)


def test_a_number_that_a_module_does_not_read_is_none(tmp_path: Path) -> None:
    """Equal modules share their kernels, which a number that nothing reads would keep apart."""
    model = nn.Sequential(*(Windowed(number, "window" if number == 2 else "all") for number in range(5)))
    inputs = (torch.randn(3, 8),)
    package = split(tmp_path, model, inputs, cut="3")
    assert differences(package, model, inputs) == []
    text = source(package)
    assert text.count("class Windowed") == 1
    assert 'Windowed(kind="window", number=2)' in text
    assert text.count('Windowed(kind="all")') == 3  # 0, 1, and a comprehension for 3 and 4


class Embedding(nn.Module):
    """Adds a guidance, which a caller may leave out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time, self.guidance = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, time: Tensor, guidance: Tensor | None = None) -> Tensor:
        embedding: Tensor = (
            self.time(time) * torch.sigmoid(time).sum(dim=-1, keepdim=True)
            if guidance is None
            else self.time(time) * torch.sigmoid(time).sum(dim=-1, keepdim=True) + self.guidance(guidance)
        )
        return embedding


class Guided(nn.Module):
    """Calls the embedding with a guidance once, or once without and once with."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both = both
        self.embedding, self.other, self.head = Embedding(8), Embedding(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, guidance: Tensor | None = None) -> Tensor:
        if guidance is not None:
            guidance = guidance * 10
        h = (
            self.embedding(x.clamp(min=-1, max=1), torch.zeros_like(x).softmax(dim=-1))
            if guidance is None
            else self.embedding(x.clamp(min=-1, max=1), guidance)
        )
        mode = (
            self.head(torch.tanh(h)) * torch.sigmoid(h).mean(dim=-1, keepdim=True)
            if self.training
            else self.head(torch.tanh(h)) * torch.sigmoid(h).amax(dim=-1, keepdim=True)
        )
        return self.other(mode) if self.both else mode


@pytest.mark.parametrize("both", [False, True])
def test_a_side_whose_lines_never_ran_is_left_out(both: bool, tmp_path: Path) -> None:
    """A side that one mode runs, or another module of the class, stays."""
    torch.manual_seed(0)
    model, inputs = Guided(both), (torch.randn(4, 8), torch.randn(4, 8))
    package = split(tmp_path, model, inputs, cut="head")
    text = source(package)
    assert "h = self.embedding(x.clamp(min=-1, max=1), guidance)" in text and "zeros_like" not in text
    assert "if self.training" in text and ".amax(" in text
    assert ("if guidance is None" in text) == both
    for train in (False, True):
        assert differences(package, model, inputs, train=train) == []
