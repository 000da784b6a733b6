"""Memory of a run, compared with the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.planner.run_comparison import compare_run
from pipegraph.schedule import build
from pipegraph.workflows.train import Training


class Rotated(nn.Module):
    """A frozen first layer, and a table that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        self.layers[0].requires_grad_(False)
        self.register_buffer("table", torch.ones(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.table
        for layer in self.layers[1:]:
            x = layer(x)
        return x * self.table


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_what_ranks_hold_is_what_was_predicted(schedule: str, tmp_path: Path) -> None:
    captured = pipegraph.capture(Rotated(), (torch.randn(8, 32),))
    split_plan = pipegraph.plan(captured, points=["layers.3"], balance="time", recompute="none")
    package = pipegraph.write_package(split_plan, tmp_path / "package")
    plan = build(schedule, 2, 6)
    training = Training(package, plan, kernels="eager")
    list(training.steps(1))
    comparison = compare_run(package.manifest, plan, training.measured())
    steps = [4 * 4, 4 * 6]  # AdamW counts the steps of each parameter that learns in a float
    for rank, of_optimizer in zip(comparison.memory, steps, strict=True):
        for kind in ("parameters", "gradients", "model buffers", "activations"):
            assert rank[kind].measured == rank[kind].predicted, kind
        assert rank["optimizer state"].measured == (rank["optimizer state"].predicted or 0) + of_optimizer
