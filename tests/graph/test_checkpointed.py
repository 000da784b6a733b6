"""Modules that a model runs under ``torch.utils.checkpoint`` are those that its stages compute again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipegraph
from pipegraph import Pipeline
from pipegraph.kernels.stage_run import held_tensors
from pipegraph.schedule import Kind
from tests.slow import cases


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 24)
        self.down = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Checkpoints every ``every``-th layer."""

    def __init__(self, every: int, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(8, 2)
        self.every, self.reentrant = every, reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if self.training and number % self.every == 0:
                x = checkpoint(layer, x, use_reentrant=self.reentrant)
            else:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("reentrant", cases([False, True], slow=[True]))
@pytest.mark.parametrize(
    ("every", "expected"), [(1, "layers.*=block"), (2, "layers.0=block,layers.2=block"), (9, "layers.0=block")]
)
def test_the_package_says_which(every: int, expected: str, reentrant: bool, tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    captured = pipegraph.capture(Model(every, reentrant), (x,))
    plain = pipegraph.write_package(pipegraph.plan(captured, points=["layers.2"]), tmp_path / "plain")
    priced = pipegraph.plan(captured, points=["layers.2"], balance="time")
    assert plain.manifest.recompute == expected and priced.prediction is not None
    assert priced.prediction.recompute == expected
    pipe = Pipeline(plain, "gpipe", 1, loss_fn=lambda output, target: output.square().mean(), kernels="eager")
    assert pipe.recompute == expected
    saved: dict[int, int] = {}

    class Wide:
        """Counts the tensors as wide as the middle of a layer that each stage keeps."""

        def begin(self, rank: int, action: Any) -> None: ...

        def end(self, rank: int, action: Any, saved_values: Any) -> None:
            if action.kind is Kind.F:
                saved[action.stage] = sum(tensor.shape == (6, 24) for tensor in held_tensors(saved_values) or ())

    pipe.observe(Wide())
    pipe.step(x)
    again = [number % every == 0 for number in range(4)]
    assert [saved[stage] > 0 for stage in (0, 1)] == [not all(again[:2]), not all(again[2:])]


def test_a_model_without_any_says_nothing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    package = pipegraph.write_package(
        pipegraph.plan(pipegraph.capture(model, (torch.randn(6, 4),)), points=["1"]), tmp_path / "package"
    )
    assert '"recompute"' not in (package.path / "pipeline.json").read_text()
    assert package.manifest.recompute == "min-cut"
