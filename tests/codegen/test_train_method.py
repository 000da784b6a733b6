"""Modules that a model gives another mode in its own ``train`` or ``eval`` have it in the stages, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pipegraph

X = torch.linspace(-1, 1, 48).reshape(6, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.linear(x)))
        return self.drop(x) if self.training else x * 2


class Model(nn.Module):
    """Its `train` calls `change` at the end."""

    def __init__(self, change: Callable[[Model, bool], None]) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(8, 8)
        self.change = change
        self.train()

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.change(self, mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def frozen_norms(model: Model, mode: bool) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()


def frozen_block(model: Model, mode: bool) -> None:
    model.blocks[0].eval()


def dropout_in_evaluation(model: Model, mode: bool) -> None:
    """Monte Carlo dropout."""
    for block in model.blocks:
        block.train()
        block.norm.train(mode)


def never(model: Model, mode: bool) -> None:
    nn.Module.train(model, False)


def only_some(model: Model, mode: bool) -> None:
    model.blocks[1].eval()
    model.blocks[1].norm.train(mode)


def build(change: Any) -> Model:
    torch.manual_seed(0)
    return Model(change)


@pytest.mark.parametrize("change", [frozen_norms, frozen_block, dropout_in_evaluation, never, only_some])
def test_stages_have_the_modes_of_the_model(change: Any, tmp_path: Path) -> None:
    captured = pipegraph.capture(build(change), (X,))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["blocks.2"]), tmp_path / "out")
    pipe = pipegraph.Pipeline(package, kernels="autograd", loss_fn=F.mse_loss)
    model = build(change)

    def compare() -> None:
        of_model = dict(model.named_modules())
        for stage in pipe.stages.values():
            for name, module in stage.named_modules():
                if list(module.children()) == [] or isinstance(module, type(stage)) is False:
                    assert name not in of_model or module.training == of_model[name].training, name
        pipe.stages[0].zero_grad()
        model.zero_grad()
        for forward in (lambda: pipe.eval(X), lambda: model(X)):
            torch.manual_seed(1)
            outputs.append(forward())
        torch.testing.assert_close(outputs[-2], outputs[-1].detach())

    outputs: list[Any] = []
    compare()
    for mode in (False, True, True, False, True):
        model.train(mode)
        for stage in pipe.stages.values():
            stage.train(mode)
        compare()
    torch.testing.assert_close(
        {name: buffer for stage in pipe.stages.values() for name, buffer in stage.named_buffers()},
        dict(model.named_buffers()),
    )


def test_how_it_is_written(tmp_path: Path) -> None:
    captured = pipegraph.capture(build(frozen_norms), (X,))
    package = pipegraph.write_package(pipegraph.plan(captured, points=["blocks.2"]), tmp_path / "out")
    source = (package.path / "stage_1.py").read_text()
    assert source.endswith(
        "    def train(self, mode: bool = True):\n"
        '        """Set the mode, as the model itself does: some modules have another one."""\n'
        "        super().train(mode)\n"
        '        self.blocks["2"].norm.eval()\n'
        "        return self\n"
    )


def test_a_model_without_its_own_train_has_none(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[1].eval()
    package = pipegraph.write_package(pipegraph.plan(pipegraph.capture(model, (X,)), points=["2"]), tmp_path / "out")
    assert "def train" not in (package.path / "stage_0.py").read_text()
