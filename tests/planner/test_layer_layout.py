"""Megatron's layouts of a pipeline, in and out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from examples import unet
from pipegraph.errors import PlanError
from pipegraph.graph.captured import Captured
from pipegraph.planner.layer_layout import format_layout, layout_of, parse_layout
from pipegraph.recompute import Recompute, parse_stages
from tests.messages import refused


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x))


class Headless(nn.Module):
    """Layers and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Interrupted(nn.Module):
    """Layers with another module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.between = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[2](self.between(x)))


class Twice(nn.Module):
    """Layers of which one runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 0):
            x = self.layers[number](x)
        return x


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
    ("model", "points", "layout"),
    [
        (Headless(), ["layers.1", "layers.3"], "t|tt|t"),
        (nn.Sequential(nn.Linear(4, 8), *(Layer() for _ in range(4)), nn.Linear(8, 4)), ["2", "5"], "Et|t*3|L"),
    ],
)
def test_e_and_l_stand_only_for_what_there_is(model: nn.Module, points: list[str], layout: str) -> None:
    width = 4 if isinstance(model, nn.Sequential) else 8
    small = pipegraph.capture(model, (torch.randn(2, width),), dynamic_shapes=False)
    assert pipegraph.plan(small, points=points).layout == layout
    for text in (layout, f"E{layout}L".replace("EE", "E").replace("LL", "L")):  # Megatron's always have both
        assert [str(point) for point in pipegraph.plan(small, points=text).points] == points


def test_a_layout_has_two_stages_or_more(captured: Captured) -> None:
    assert layout_of(captured, ()) == ""


@pytest.mark.parametrize(
    ("model", "example", "point", "has"),
    [
        (unet.UNet(8), torch.randn(2, 3, 16, 16), "up.1", "3 layers in down and 3 layers in up"),
        (
            Interrupted(),
            torch.randn(2, 8),
            "layers.2",
            "4 layers in layers, not in a row",
        ),
        (Twice(), torch.randn(2, 8), "layers.2", "4 layers in layers, not in a row"),
        (nn.Linear(4, 4), torch.randn(2, 4), None, "no repeated layers"),
    ],
    ids=["two lists", "another between", "one twice", "none"],
)
def test_only_one_row_of_layers_has_a_layout(model: nn.Module, example: Tensor, point: str | None, has: str) -> None:
    several = pipegraph.capture(model, (example,), dynamic_shapes=False)
    if point is not None:
        assert pipegraph.plan(several, points=[point]).layout == ""
    with refused(PlanError, f"{type(model).__name__} has {has}", advice="points with names of modules"):
        pipegraph.plan(several, points="Et|tL")


def test_a_stage_with_nothing_to_compute_is_refused() -> None:
    small = pipegraph.capture(Headless(), (torch.randn(2, 8),), dynamic_shapes=False)
    for layout, position in (("E|tttt", "first"), ("tttt|L", "last")):
        with refused(PlanError, f"{position} stage", layout, "Headless", advice='points="t*4"'):
            pipegraph.plan(small, points=layout)


@pytest.mark.parametrize(
    ("layout", "parts", "advice"),
    [
        ("Ettt||tttL", ["Stage 1", "no layer"], "Et*3|t*3L"),
        ("Ettt|ttL", ["1 embedding, 5 layers, 1 end", "Model has 1 embedding, 6 layers, 1 end"], 'points="Et*3|t*3L"'),
        ("Ettt|tttm|L", ["1 layer of several tokens"], 'points="Ett|tt|ttL"'),
        ("Ettt|xxxL", ['"x"'], "Et*3|"),
        ("Et*99999|L", ["10,000"], "Et*3|"),
    ],
)
def test_what_is_no_layout_of_the_model_is_refused(
    captured: Captured, layout: str, parts: list[str], advice: str
) -> None:
    with refused(PlanError, layout, *parts, advice=advice):
        pipegraph.plan(captured, points=layout)


def test_recompute_of_stages_is_written_alike() -> None:
    again = Recompute.parse("layers.*=block")
    assert parse_stages("(layers.*=block|)*2,none", 3) == (again, again, Recompute.parse("none"))
