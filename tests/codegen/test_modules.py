"""Modules used in every way that models use them: the source runs as the model does, and says so in few classes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.codegen.layers import Block, Blocks, Row, batch, ints
from tests.codegen.parity import differences, forward_lines, source, split
from tests.slow import cases


class Twice(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.a(self.b(self.a(x))))


class Recurrent(Blocks):
    """One module in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.a(x)
        return self.c(self.b(x))


class OtherMethod(Blocks):
    """Calls a module's ``forward``, calls its child alone, and reads its weight directly."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a.linear(x)
        return self.c(self.b(h)) + self.c.linear(x) + F.linear(x, self.a.linear.weight)


class Shapes(nn.Module):
    """Rows of sums; equal modules called on two shapes need two classes, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = Summed()
        self.b = Block()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sum(self.b(x))) + self.sum(x[:2]).mean()


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(x.shape[0], -1, 4).sum(-1)


class SharedLayer(Row):
    """One layer in two places of a list, and its weight in a third module."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        shared = Block()
        super().__init__([shared, Block(), shared, Block()])
        self.head = nn.Linear(8, 8)
        self.head.weight = shared.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))


class Scaled(nn.Linear):
    """A subclass of a torch.nn module is not that module."""

    scale = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for module in self:
            x = x + module(x)
        return x


class Flagged(nn.Module):
    """A layer whose Python arguments change what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: int, add: bool = False) -> Tensor:
        return self.linear(x) + factor if add else self.linear(x) * factor


class FlaggedRow(Row):
    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(x, index + 1, add=index % 2 == 0)
        return x


class Windowed(nn.Module):
    def __init__(self, shift: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).roll(self.shift, -1)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x = Block()
        self.y = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.y(self.x(x) + x)


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.i = Inner()
        self.j = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.j(self.i(x) * 2) + x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m = Middle()
        self.n = Middle()

    def forward(self, x: Tensor) -> Tensor:
        return self.n(self.m(x))


class Attentions(nn.Module):
    """``out_proj`` is a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.MultiheadAttention(8, 2, dropout=0.1, kdim=6, vdim=5, batch_first=True, add_bias_kv=True)
        self.second = nn.MultiheadAttention(8, 2, bias=False)
        self.norm = nn.LayerNorm(8, bias=False)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.first(x, key, value)
        mask = nn.Transformer.generate_square_subsequent_mask(len(y))
        return self.norm(self.second(y, y, y, attn_mask=mask)[0]), weights


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return x + sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Dense(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4 * (index + 1), 4, 1)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return F.relu(self.convolution(torch.cat(parts, 1)))


class DenseRow(Row):
    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for layer in self.layers:
            parts.append(layer(parts))
        return torch.cat(parts, 1)


class Lambda(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def hooked(leaf: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8) if leaf else Block(), nn.Linear(8, 8))
    model[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    model[1].register_forward_hook(lambda module, inputs, output: output * 2)
    return model


def sequence() -> nn.Module:
    return nn.Sequential(
        Block(), Lambda(), nn.Linear(8, 8), nn.Flatten(), nn.Identity(), nn.Dropout(0.0), nn.Linear(8, 2)
    )


CASES = {
    "called twice": (Twice, "b", [batch()]),
    "called in a loop": (Recurrent, "b", [batch()]),
    "a part called beside the whole": (OtherMethod, "b", [batch()]),
    "called on two shapes": (Shapes, "head", [batch()]),
    "one layer in two places, both here": (SharedLayer, "head", [batch()]),
    "one layer in two places, cut between": (SharedLayer, "layers.2", [batch()]),
    "one layer in three stages": (SharedLayer, "layers.1,layers.3,head", [batch()]),
    "subclass of a leaf": (lambda: nn.Sequential(Scaled(8, 8), Block(), Scaled(8, 8)), "1", [batch()]),
    "Sequential with a forward": (lambda: nn.Sequential(Residual(nn.Linear(8, 8), Block()), Block()), "0.1", [batch()]),
    "layers with other Python arguments": (lambda: FlaggedRow([Flagged() for _ in range(4)]), 2, [batch()]),
    "layers with other attributes": (lambda: Row([Windowed(i % 2) for i in range(4)]), 2, [batch()]),
    "nested, cut below": (Nested, "m.i.y", [batch()]),
    "nested, cut between": (Nested, "m.j", [batch()]),
    "nested, cut twice below": (Nested, "m.j.y,n.i.x:end", [batch()]),
    "nested, cut within leaves": (Nested, "n.j.x.linear,n.j.y.linear:end", [batch()]),
    "nested, cut at an end": (Nested, "m:end", [batch()]),
    "attention": (Attentions, "second", [batch(3, 4, 8), batch(3, 5, 6), batch(3, 5, 5)]),
    "experts": (lambda: Row([Experts() for _ in range(3)]), "layers.1,layers.2.experts.2", [batch()]),
    "everything goes everywhere": (
        lambda: DenseRow([Dense(i) for i in range(4)]),
        "layers.1,layers.3",
        [batch(2, 4, 5)],
    ),
    "hooks on leaves": (lambda: hooked(leaf=True), "1", [batch()]),
    "hooks on a class": (lambda: hooked(leaf=False), "1", [batch()]),
    "a Sequential model": (sequence, "2,6", [batch()]),
    "a Sequential cut at its dropout": (
        lambda: Row([nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Identity()) for _ in range(3)]),
        "layers.1.2",
        [batch()],
    ),
    "a Sequential cut behind its dropout": (
        lambda: Row([nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8)) for _ in range(3)]),
        "layers.1.1:end",
        [batch()],
    ),
    "weight normalisation": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), Block()),
        "1",
        [batch()],
    ),
    "spectral normalisation": (
        lambda: nn.Sequential(Block(), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))),
        "1",
        [batch()],
    ),
    "a whole Transformer": (
        lambda: nn.Transformer(8, 2, 1, 2, 16, dropout=0.1, batch_first=True),
        "decoder.layers.0,decoder.layers.1",
        [batch(2, 4, 8), batch(2, 3, 8)],
    ),
    "an embedding of its own": (
        lambda: nn.Sequential(nn.Embedding(11, 8, padding_idx=3), Block(), Block()),
        "2",
        [ints(11, 3, 4)],
    ),
}


# Attention is a separate case; tests/codegen/test_attention.py has encoders.
SLOW = ("a whole Transformer",)


@pytest.mark.parametrize("case", cases(CASES, slow=SLOW))
def test_parity(case: str, tmp_path: Path) -> None:
    build, cut, args = CASES[case]
    torch.manual_seed(0)
    model = build()
    assert differences(split(tmp_path, model, tuple(args), cut=cut), model, tuple(args), train=True) == []


def classes(text: str) -> list[str]:
    return [line.split("(")[0].removeprefix("class ") for line in text.splitlines() if line.startswith("class ")]


@pytest.mark.parametrize("case", ["weight normalisation", "spectral normalisation"])
def test_a_normalised_layer_is_made_by_a_function_of_torch(case: str, tmp_path: Path) -> None:
    build, cut, args = CASES[case]
    text = source(split(tmp_path, build(), tuple(args), cut=cut))
    function = case.partition(" ")[0]
    assert f"nn.utils.parametrizations.{function}_norm(nn.Linear(8, 8))" in text
    assert "_weight_norm(" not in text and "torch.ops" not in text


def test_equal_layers_share_one_class(tmp_path: Path) -> None:
    package = split(tmp_path, Nested(), (batch(),), cut="n")
    assert classes(source(package)) == ["Block", "Inner", "Middle", "Stage0", "Stage1"]


def test_a_module_that_is_spread_out_leaves_no_class_behind(tmp_path: Path) -> None:
    package = split(tmp_path, OtherMethod(), (batch(),), cut="b")
    assert classes(source(package)) == ["Block", "Stage0", "Stage1"]
    assert forward_lines(package, 1) == [
        "return F.relu(self.c.linear(self.b(h))) + self.c.linear(x) + F.linear(x, self.a.linear.weight)"
    ]


def test_a_module_called_twice_stays_one_module(tmp_path: Path) -> None:
    package = split(tmp_path, Twice(), (batch(),), cut="c")
    assert forward_lines(package) == ["return self.a(self.b(self.a(x)))"]


def test_a_sequential_stays_one(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.1)
        ),
        nn.Sequential(nn.Flatten(), nn.Linear(64, 2)),
    )
    package = split(tmp_path, model, (batch(2, 3, 4, 4),), cut="1")
    row = "nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(p=0.1)"
    assert f"nn.Sequential({row})" in (package.path / "stage_0.py").read_text()
    assert "class Stage0(nn.Sequential):" in (package.path / "stage_0.py").read_text()


def test_a_subclass_of_sequential_keeps_its_name(tmp_path: Path) -> None:
    class Pair(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 8), nn.Tanh())

    package = split(tmp_path, Row([Pair(), Pair(), Pair()]), (batch(),), cut="layers.2")
    text = (package.path / "blocks.py").read_text()
    assert classes(text) == ["Pair"]
    assert "        super().__init__(nn.Linear(8, 8), nn.Tanh())\n" in text


def test_a_sequential_with_a_module_without_state_stays_one(tmp_path: Path) -> None:
    model = Row([nn.Sequential(nn.Linear(8, 8), Lambda(), nn.Linear(8, 8)) for _ in range(3)])
    package = split(tmp_path, model, (batch(),), cut="layers.2")
    assert classes(source(package)) == ["Lambda", "Stage0", "Stage1"]
    assert "nn.Sequential(nn.Linear(8, 8), Lambda(), nn.Linear(8, 8))" in source(package)
    assert differences(package, model, (batch(),)) == []
