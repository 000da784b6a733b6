"""The points of torch.distributed.pipelining: `pipe_split()` in the model's forward, and torch's `SplitPoint`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import SplitPoint as TorchSplitPoint
from torch.distributed.pipelining import pipe_split

import pipegraph
from pipegraph.errors import PlanError
from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences
from tests.messages import refused


class Cut(nn.Module):
    """Calls ``pipe_split()`` before the layers ``indices``, and inside a layer if ``inside``."""

    def __init__(self, indices: tuple[int, ...], inside: bool = False) -> None:
        super().__init__()
        self.layers, self.before, self.inside = nn.ModuleList(Block() for _ in range(4)), indices, inside

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index in self.before:
                pipe_split()
            x = layer(x)
        x = torch.tanh(x)
        if self.inside:
            pipe_split()
        return torch.sin(x)


@pytest.mark.parametrize(("before", "points"), [((2,), ["layers.2"]), ((1, 3), ["layers.1", "layers.3"])])
def test_pipe_split_is_a_point(before: tuple[int, ...], points: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cut(before)
    plan = pipegraph.plan(pipegraph.capture(model, (batch(),)))
    assert [str(point) for point in plan.points] == points
    package = pipegraph.write_package(plan, tmp_path / "package")
    assert differences(package, model, (batch(),), train=True) == []
    assert "pipe_split" not in (package.path / "stage_0.py").read_text()


def test_points_that_are_given_take_the_place_of_pipe_split() -> None:
    captured = pipegraph.capture(Cut((2,)), (batch(),))
    assert [str(point) for point in pipegraph.plan(captured, points=["layers.1"]).points] == ["layers.1"]
    assert [str(point) for point in pipegraph.plan(captured, stages=4, balance="uniform").points] == [
        f"layers.{index}" for index in (1, 2, 3)
    ]


def test_a_pipe_split_inside_a_module_is_refused() -> None:
    captured = pipegraph.capture(Cut((), inside=True), (batch(),))
    with refused(PlanError, "pipe_split()", "test_pipe_splits.py:", advice="points"):
        pipegraph.plan(captured)


def test_torchs_split_points_go_by_name() -> None:
    captured = pipegraph.capture(Cut(()), (batch(),))
    points = {"layers.1": TorchSplitPoint.BEGINNING, "layers.2": TorchSplitPoint.END}
    assert [str(point) for point in pipegraph.plan(captured, points=points).points] == ["layers.1", "layers.2:end"]
    with refused(PlanError, "points['layers.1']", "'end'", advice="SplitPoint.END"):
        pipegraph.plan(captured, points={"layers.1": "end"})
