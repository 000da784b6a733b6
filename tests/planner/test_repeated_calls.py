"""Cuts between the calls of one module: ``layers.0@2`` is where the second one begins."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pipegraph
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured
from pipegraph.graph.partition.split_points import Point, SplitPoint
from tests.codegen.layers import Block, batch
from tests.codegen.parity import differences
from tests.messages import refused
from tests.runtime.pipelines import pipeline


class Recurrent(nn.Module):
    """Two layers, called four times each, as in a Universal Transformer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for _ in range(4):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return pipegraph.capture(Recurrent(), (batch(),))


@pytest.mark.parametrize(
    ("point", "before"),
    [
        ("layers.0", 0),
        ("layers.0@1", 0),
        ("layers.1@1:end", 2),
        ("layers.0@3", 4),
        ("layers.1@3", 5),
        ("layers.1:end", 8),
        ("layers.1@4:end", 8),
    ],
)
def test_a_stage_begins_with_a_call(captured: Captured, point: str, before: int) -> None:
    """The stage begins after the embedding and ``before`` calls of layers, of two operations each."""
    first, _ = pipegraph.plan(captured, points=[point]).stages
    assert len(first.nodes) == 1 + 2 * before


@pytest.mark.parametrize(
    ("point", "parts", "advice"),
    [
        ("layers.0@5", ["4 times"], "layers.0@1 to layers.0@4"),
        ("layers.0@0", ["4 times"], "layers.0@1 to layers.0@4"),
        ("head@2:end", ["once"], "head@1:end"),
        ("layers@2", ["never"], "layers."),
        ("layer.0@2", ["no module layer.0", '"layers.0"'], "layers.0"),
        ("embed@1", ["first stage"], "layers.0"),
    ],
)
def test_a_call_that_there_is_not(captured: Captured, point: str, parts: list[str], advice: str) -> None:
    with refused(PlanError, f"Split point {point}", *parts, advice=advice):
        pipegraph.plan(captured, points=[point])


@pytest.mark.parametrize("balance", ["uniform", "flops"])
@pytest.mark.parametrize("stages", [2, 3, 5])
def test_the_points_of_a_plan_are_where_it_cuts(captured: Captured, stages: int, balance: str) -> None:
    plan = pipegraph.plan(captured, stages=stages, balance=balance)
    again = pipegraph.plan(captured, points=[str(point) for point in plan.points])
    names = [[[node.name for node in stage.nodes] for stage in cut_plan.stages] for cut_plan in (plan, again)]
    assert names[0] == names[1]
    sizes = [len(stage.nodes) for stage in plan.stages]
    assert max(sizes) - min(sizes) <= 3


def test_a_name_may_look_like_a_call() -> None:
    model = nn.Sequential()
    for name in ("a", "a@2", "b"):
        model.add_module(name, Block())
    plan = pipegraph.plan(pipegraph.capture(model, (batch(),)), points=["a@2"])
    assert [len(stage.nodes) for stage in plan.stages] == [2, 4]


def test_torchs_points_name_calls_too(captured: Captured) -> None:
    plan = pipegraph.plan(captured, points={"layers.0@2": SplitPoint.END})
    assert plan.points == (Point("layers.0", SplitPoint.END, 2),)


def test_stages_that_share_all_layers_are_the_model(captured: Captured, tmp_path: Path) -> None:
    model = Recurrent()
    plan = pipegraph.plan(captured, points=["layers.1@1:end", "layers.1@3"])
    package = pipegraph.write_package(plan, tmp_path / "package")
    assert differences(package, model, (batch(),)) == []
    pipe = pipeline(package, "zb-h1", "eager", microbatches=2, loss_fn=nn.MSELoss())
    x, reference = torch.randn(2 * len(batch()), 8), copy.deepcopy(model)
    pipe.step(x, target=x)
    nn.MSELoss()(reference(x), x).backward()
    expected = dict(reference.named_parameters())
    assert dict(pipe.named_parameters()).keys() == expected.keys()
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, expected[name].grad)
