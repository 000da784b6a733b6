"""Megatron's layouts of a pipeline, in and out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured
from pipegraph.planner.layer_layout import format_layout, parse_layout
from pipegraph.recompute import Recompute, parse_stages


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return pipegraph.capture(Model(), (torch.randn(2, 4),), dynamic_shapes=False)


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("Et*3|(tt|)*2,L", ["Ettt", "tt", "tt", "L"]),
        ("E|(t|)*3ttL", ["E", "t", "t", "t", "ttL"]),
        ("(Et|t)*1|L", ["Et", "t", "L"]),
        ("Et*3|(tt|)*29,m|L", ["Ettt", *["tt"] * 29, "m", "L"]),  # Megatron's own example
    ],
)
def test_layouts_are_read_as_megatron_reads_them(text: str, stages: list[str]) -> None:
    assert parse_layout(text) == stages
    assert parse_layout(format_layout(stages)) == stages


@pytest.mark.parametrize(
    ("layout", "points"),
    [
        ("Et*3|tt|tL", ["layers.3", "layers.5"]),
        ("E|(ttt|)*2,L", ["layers.0", "layers.3", "head"]),
        ("Et|(t|)*4,tL", ["layers.1", "layers.2", "layers.3", "layers.4", "layers.5"]),
    ],
)
def test_stages_are_cut_where_the_layout_says(captured: Captured, layout: str, points: list[str]) -> None:
    plan = pipegraph.plan(captured, points=layout)
    assert [str(point) for point in plan.points] == points
    assert parse_layout(plan.layout) == parse_layout(layout)
    assert pipegraph.plan(captured, points=plan.layout).points == plan.points


def test_cuts_inside_layers_have_no_layout(captured: Captured) -> None:
    assert pipegraph.plan(captured, points=["layers.3.down"]).layout == ""


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Ettt||tttL", r"Stage 1 of the layout .* has no layer[\s\S]*Try: Et\*3\|t\*3L"),
        ("Ettt|ttL", r"1 embedding, 5 layers, 1 end, and Model has 1 embedding, 6 layers, 1 end[\s\S]*Et\*3\|t\*3L"),
        ("Ettt|tttm|L", "1 layer of several tokens"),
        ("Ettt|xxxL", '"x"'),
        ("Et*99999|L", "more than 10,000"),
    ],
)
def test_what_is_no_layout_of_the_model_is_refused(captured: Captured, layout: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        pipegraph.plan(captured, points=layout)


def test_recompute_of_stages_is_written_alike() -> None:
    again = Recompute.parse("layers.*=block")
    assert parse_stages("(layers.*=block|)*2,none", 3) == (again, again, Recompute.parse("none"))
