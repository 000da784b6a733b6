"""Lists whose layers share a module, and of which the model takes slices: each module has its name in the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from tests.codegen.parity import differences, split


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.up, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shared(torch.tanh(self.up(x)))


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(shared) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for block in self.blocks[1:][:-1]:
            x = block(x)
        return self.blocks[-1](x)


class SlicedSequential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(shared, nn.ReLU(), nn.Linear(4, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[::2]:
            x = block[1:](block[0](x))
        return x


@pytest.mark.parametrize(
    ("kind", "called", "cut"),
    [
        (Sliced, {f"blocks.{number}" for number in range(5)}, "blocks.3"),
        (SlicedSequential, {f"blocks.{number}.{part}" for number in (0, 2) for part in range(3)}, "blocks.2.2"),
    ],
)
def test_names(kind: type[nn.Module], called: set[str], cut: str, tmp_path: Path) -> None:
    model, x = kind(), torch.randn(2, 4)
    captured = pipegraph.capture(model, (x,))
    names = {fqn for node in captured.nodes for _, fqn in node.meta["path"]}
    assert called <= names <= {name for name, _ in model.named_modules(remove_duplicate=False)}
    assert differences(split(tmp_path, model, (x,), cut=cut), model, (x,)) == []
