"""Names that the source calls or that every module has: other names in the package, and the same numbers."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipegraph.codegen.names.identifiers import variable
from pipegraph.package import Package
from tests.codegen.layers import Block, batch
from tests.codegen.parity import ROOT, differences, source, split

OF_MODULES = ["dump_patches", "T_destination", "call_super_init", "half", "type", "to", "zero_grad"]


class Around(nn.Module):
    """Two layers, and something of a subclass between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Block(), Block()


def equal(folder: Path, model: nn.Module) -> Package:
    package = split(folder, model, (batch(),), cut="last")
    assert differences(package, model, (batch(),)) == []
    return package


class Tensors(Around):
    """Plain attributes may have the names of methods."""

    def __init__(self) -> None:
        super().__init__()
        for name in OF_MODULES:
            setattr(self, name, torch.rand(8) + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for name in OF_MODULES:
            x = x * vars(self)[name]
        return self.last(x)


def test_tensors_with_names_that_every_module_has(tmp_path: Path) -> None:
    stage = equal(tmp_path, Tensors()).load_stage(0)
    assert {name for name, _ in stage.named_buffers()} == {f"{name}_" for name in OF_MODULES}
    stage.half().to(torch.float32).zero_grad()


class Variables(Around):
    """So may variables, those of attributes and those of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.5
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        half = torch.tensor([0.5] * 8)
        training = torch.tensor([1.5] * 8)
        scale = torch.tensor([2.5] * 8)
        norm = torch.tensor([3.5] * 8)
        return self.last(self.norm(self.first(x)) * self.scale * half - training + scale * norm)


def test_variables_with_names_that_a_module_has(tmp_path: Path) -> None:
    model = Variables()
    stage = equal(tmp_path, model).load_stage(0)
    assert stage.training is True
    assert {name for name, _ in stage.named_buffers()} == {"half_", "training_", "scale", "norm_1"}


class Numbered(nn.Module):
    def __init__(self, half: float, eps: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.half = half
        self.options = [eps]
        self.register_buffer("eps", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.linear(x), (8,), eps=self.options[0]) * self.half + self.eps


class Numbers(Around):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Numbered(index + 0.5, 10.0**-index) for index in range(1, 5)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def test_numbers_with_names_that_a_module_has(tmp_path: Path) -> None:
    """They become arguments of one class, which keeps them as attributes."""
    package = equal(tmp_path, Numbers())
    assert source(package).count("class Numbered(") == 1
    package.load_stage(0).half()


class Holder(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, Block())


class WithHolder(Around):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.held = Holder(names)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.held.children():
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("names", [["keys", "values"], ["append", "0"], ["torch", "nn", "F", "self", "super", "range"]])
def test_layers_with_names_of_what_holds_layers(names: list[str], tmp_path: Path) -> None:
    equal(tmp_path, WithHolder(names))


CALLED = "complex, enumerate, len, range, next, getattr, setattr, torch, F, nn, zip, tuple, OrderedDict, Tensor, super"


class Counted(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = nn.Linear(8, 8), index

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.index


def test_arguments_with_names_that_the_source_calls(tmp_path: Path) -> None:
    scope: dict[str, Any] = {"infinite": float("inf")}
    exec(
        f"def forward(self, {CALLED}):\n"
        "    x = self.first(complex)\n"
        "    for layer in self.layers: x = layer(x)\n"
        "    x = (x * (1 + 2j)).real.clamp(max=infinite)\n"
        f"    return self.last(x + {CALLED.replace(', ', ' + ')})",
        scope,
    )
    model = type("Model", (Around,), {"forward": scope["forward"]})()
    model.layers = nn.ModuleList([Counted(index) for index in range(4)])
    inputs = tuple(batch() + index for index in range(CALLED.count(",") + 1))
    assert differences(split(tmp_path, model, inputs, cut="last"), model, inputs) == []


def test_no_variable_hides_what_the_source_calls() -> None:
    """Every builtin that the generator can write, found in its own source."""
    written: set[str] = set()
    for file in (ROOT / "pipegraph" / "codegen").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("call", "Name"):
                texts = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
                written |= {text.partition(".")[0] for text in texts}
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Template":
                written |= set(re.findall(r"(\w+)\(", ast.unparse(node.args[0])))
    called = {name for name in written if hasattr(builtins, name)} | {"torch", "nn", "self", "OrderedDict"}
    assert called >= {"complex", "enumerate", "float", "getattr", "next", "range", "setattr", "str", "torch", "self"}
    assert [name for name in called if variable(name, "x") == name] == []
