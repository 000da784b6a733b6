"""Classes of one name that do not run the same operations stay apart, each without a branch."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.captured import Captured
from tests.codegen.layers import Row, batch
from tests.codegen.parity import differences, split, write

pytestmark = pytest.mark.usefixtures("from_graph")


class Attention(nn.Module):
    """Attends to itself or to another sequence, perhaps with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        source = x if memory is None else memory
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k = self.k(source).unflatten(-1, (2, 4)).transpose(1, 2)
        v = self.v(source).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Layer(nn.Module):
    """Calls its attention with what it is given, and scales the result if it is a decoder's."""

    def __init__(self, is_decoder: bool) -> None:
        super().__init__()
        self.attention = Attention()
        self.is_decoder = is_decoder
        self.norm = nn.LayerNorm(8)
        if is_decoder:
            self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        y = x + self.attention(self.norm(x), memory, mask)
        if self.is_decoder:
            y = y * self.gate(x).sigmoid()
        return y


class Translator(nn.Module):
    """An encoder, and a decoder whose layers are given the encoder's result or a mask or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.ModuleList(Layer(False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(True) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        x = self.encoder[1](self.encoder[0](x, None, mask))
        y = self.decoder[0](y, None, mask)
        return self.decoder[2](self.decoder[1](y, x), x, mask)


class Scaled(nn.Module):
    """A format in words that ``forward`` compares."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "last":
            return self.norm(x)
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Residual(nn.Module):
    """A shortcut that only some have, and an inner part that differs."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.shortcut is None else self.shortcut(x)
        return self.inner(x) + y


class Shift(nn.Module):
    """Does nothing if its number is 0."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.by).sin() * x.cos() if self.by else x


class Shifted(nn.Module):
    """Calls a module whose call leaves no trace if it does nothing."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.shift = Shift(by)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift(self.inner(x))
        return x + self.shift(x.tanh())


class Activated(nn.Sequential):
    """A Sequential of two or three modules."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__(nn.Linear(8, 8), nn.LayerNorm(8), *([] if activation is None else [activation]))


class Gated(nn.Module):
    """Some have a gate of two modules, with another module between or after them, and some end in another way."""

    def __init__(self, is_gated: bool, between: bool, end: str = "none") -> None:
        super().__init__()
        inner = nn.Linear(8, 8)
        self.is_gated, self.end = is_gated, end
        if is_gated:
            self.gate = nn.Linear(8, 8)
        if between:
            self.inner = inner
        if is_gated:
            self.norm = nn.LayerNorm(8)
        if not between:
            self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if self.is_gated:
            y = y * self.norm(self.gate(x))
        if self.end == "none":
            return y
        y = y.tanh() * 2
        y = y.sin() + y
        return y.exp()


class Reassigned(nn.Module):
    """Assigns its optional argument before it asks for it again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor] | Tensor:
        has_bias = bias is not None
        if bias is None:
            bias = self.linear(x).tanh()
        h = (x + bias).sigmoid() * 2
        return h if has_bias else (h, bias)


class Biased(nn.Module):
    """The first layer makes what the others are given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Reassigned() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x, bias = self.layers[0](x)
        for layer in self.layers[1:]:
            x = x + layer.linear(layer(x, bias))
        return x


def blocks(folder: Path) -> str:
    return (folder / "package" / "blocks.py").read_text(encoding="utf-8")


def code(folder: Path) -> str:
    """The blocks without what docstrings say."""
    return re.sub(r'"""(.|\n)*?"""', "", blocks(folder))


def classes(folder: Path) -> list[str]:
    return [line.split("(")[0][6:] for line in blocks(folder).splitlines() if line.startswith("class ")]


MASK = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) > 0
TRANSLATION = (batch(2, 5, 8), batch(2, 5, 8) + 1, MASK | torch.eye(5, dtype=torch.bool))


@cache
def translator() -> tuple[Translator, Captured]:
    """The model, and its capture for all tests."""
    model = Translator()
    return model, pipegraph.capture(model, TRANSLATION)


def test_layers_with_other_arguments_are_other_classes(tmp_path: Path) -> None:
    model, captured = translator()
    package = write(tmp_path, pipegraph.plan(captured, stages=2, balance="uniform"))
    assert {"Attention", "Attention2", "Attention3", "Layer", "Layer2"} <= set(classes(tmp_path))
    assert "def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:" in blocks(tmp_path)
    assert " if " not in code(tmp_path) and "None" not in code(tmp_path)
    assert differences(package, model, TRANSLATION, train=True) == []


def residuals() -> nn.Module:
    inner = [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 8))]
    return Row([Residual(module, nn.Linear(8, 8) if i == 1 else None) for i, module in enumerate(inner)])


@pytest.mark.parametrize(
    ("build", "shape", "names"),
    [
        (lambda: Row([Scaled("last"), Scaled("first"), Scaled("last")]), (2, 8, 8), ["Scaled", "Scaled2"]),
        (residuals, (3, 8), ["Residual", "Residual2"]),
        (lambda: Row([Shifted(0.0), Shifted(0.5), Shifted(0.25)]), (3, 8), ["Shifted", "Shift", "Shifted2"]),
        (
            lambda: Row([Gated(False, True), Gated(True, True), Gated(False, True, "tanh")]),
            (3, 8),
            ["Gated", "Gated2", "Gated3"],
        ),
        (Biased, (3, 8), ["Reassigned", "Reassigned2"]),
    ],
)
def test_variants_have_no_branches(
    build: Callable[[], nn.Module], shape: tuple[int, ...], names: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = build()
    package = split(tmp_path, model, (batch(*shape),))
    assert set(names) <= set(classes(tmp_path))
    assert " if " not in code(tmp_path)
    assert differences(package, model, (batch(*shape),), train=True) == []


def test_a_sequential_is_given_its_modules(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Row([Activated(nn.ReLU()), Activated(), Activated(nn.Tanh())])
    package = split(tmp_path, model, (batch(),))
    assert classes(tmp_path) == ["Activated"]
    assert "Activated(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())" in (tmp_path / "package" / "stage_0.py").read_text()
    assert differences(package, model, (batch(),), train=True) == []


def test_parts_of_a_class_are_named_after_their_place(tmp_path: Path) -> None:
    model, captured = translator()
    package = write(tmp_path, pipegraph.plan(captured, points=["decoder.1.attention.k"]))
    assert {"LayerStart", "LayerEnd", "Layer"} < set(classes(tmp_path))
    assert differences(package, model, TRANSLATION) == []


def test_kernels_are_those_of_the_branch_that_each_module_takes(tmp_path: Path) -> None:
    model, captured = translator()
    package = write(tmp_path, pipegraph.plan(captured, stages=3, balance="uniform"))
    inputs = tuple(torch.cat([tensor, tensor.flip(0)]) for tensor in TRANSLATION)
    model.zero_grad()
    F.mse_loss(model(*inputs), target := batch(4, 5, 8)).backward()
    pipe = pipegraph.Pipeline(package, schedule="zb-h1", microbatches=2, loss_fn=F.mse_loss, kernels="eager")
    pipe.step(*inputs, target=target)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in pipe.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
