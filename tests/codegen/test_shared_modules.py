"""Equal modules at several places are a module each, also where a class takes them as arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.codegen.parity import split


class Part(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=not has_norm)
        self.norm = nn.LayerNorm(8) if has_norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return torch.relu(x if self.norm is None else self.norm(x))


class Two(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.first, self.second = Part(has_norm), Part(has_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + x


class Several(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(has_norm) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class InTurn(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.parts = nn.Sequential(Part(has_norm), Part(has_norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(x) * 2


class Nested(nn.Module):
    def __init__(self, has_norm: bool) -> None:
        super().__init__()
        self.left, self.right = Two(has_norm), Two(has_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(has_norm) for has_norm in (True, False, True))  # type: ignore[call-arg]
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("block", [Two, Several, InTurn, Nested])
def test_no_module_stands_at_two_places(block: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Model(block), torch.linspace(-1, 1, 32).reshape(4, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    stage = split(tmp_path, model, (x,), cut="head").load_stage(0)
    names = [name for name, _ in model.blocks.named_parameters(prefix="blocks")]
    assert [name for name, _ in stage.named_parameters()] == names
    expected = x
    for part in model.blocks:
        expected = part(expected)
    torch.testing.assert_close(stage(x), expected)
