"""The values that cross between stages: (producer, consumers, whether a gradient comes back)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.graph.captured import Captured
from pipegraph.package import StageCost
from tests.captures import captured

ROOT = Path(__file__).parents[2]
Crossing = tuple[int, tuple[int, ...], bool]


def crossing(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], cut: str) -> list[Crossing]:
    return of_capture(pipegraph.capture(model, args, kwargs), cut)


def of_file(name: str, cut: str) -> list[Crossing]:
    return of_capture(captured(name), cut)


def of_capture(model: Captured, cut: str) -> list[Crossing]:
    plan = pipegraph.plan(model, points=cut.split(","))
    return [(boundary.producer, boundary.consumers, boundary.requires_grad) for boundary in plan.boundaries]


@pytest.mark.parametrize(
    ("name", "cut", "expected"),
    [
        # images; down.0's skip to the last stage, down.1's to the last, the pooled one on; down.2's stays
        (
            "examples/unet.py",
            "down.2,up.1",
            [(-1, (0,), False), (0, (2,), True), (0, (2,), True), (0, (1,), True), (1, (2,), True), (2, (), True)],
        ),
        # one skip goes straight over two stages
        (
            "examples/unet.py",
            "down.1,bottom,up.0,up.2",
            [
                (-1, (0,), False),
                (0, (4,), True),
                (0, (1,), True),
                (1, (3,), True),
                (1, (3,), True),
                (1, (2,), True),
                (2, (3,), True),
                (3, (4,), True),
                (4, (), True),
            ],
        ),
        # cos and sin are made on each stage, from nothing but its table
        (
            "tests/models/rotary.py",
            "layers.2,layers.4",
            [(-1, (0,), False), (0, (1,), True), (1, (2,), True), (2, (), True)],
        ),
        # the padding mask is made on each stage from the lengths, which every rank may be given
        (
            "tests/models/masked.py",
            "layers.1,layers.3",
            [(-1, (0,), False), (-1, (0, 1, 2), False), (0, (1,), True), (1, (2,), True), (2, (), True)],
        ),
        # inputs that only the last stages read go there from the caller
        (
            "tests/models/late_input.py",
            "layers.2,head",
            [(-1, (0,), False), (-1, (1,), False), (-1, (1,), False), (0, (1,), True), (1, (2,), True), (2, (), True)],
        ),
    ],
)
def test_crossing(name: str, cut: str, expected: list[Crossing]) -> None:
    assert of_file(name, cut) == expected


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, 8)


class Several(Layers):
    """Floats with and without a gradient, integers and a mask, over one and over two stages."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        order, positive, fixed = h.argsort(-1), h > 0, x.cos()
        h = self.b(h).gather(-1, order)
        return self.c(h * fixed) * fixed * positive


class Early(Layers):
    """Values of an early stage, an input and a parameter are returned."""

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.a(x)
        return self.c(self.b(h)), h, x, ids, self.a.bias


def test_a_float_without_gradient_crosses_two_stages() -> None:
    """torch.distributed.pipelining: "Backward of skip connections not supported yet"."""
    assert crossing(Several(), (torch.ones(3, 8),), {}, "b,c") == [
        (-1, (0,), False),  # x
        (0, (1,), True),  # h
        (0, (1,), False),  # order
        (0, (2,), False),  # positive
        (0, (1, 2), False),  # fixed
        (1, (2,), True),
        (2, (), True),
    ]


def test_returned_values_pass_through_the_last_stage() -> None:
    model, inputs = Early(), (torch.ones(3, 8), torch.arange(3))
    assert crossing(model, inputs, {}, "b,c") == [
        (-1, (0, 2), False),  # x
        (-1, (2,), False),  # ids
        (0, (1, 2), True),  # h
        (1, (2,), True),
        (2, (), True),
        (2, (), True),  # the bias, of which the last stage has its own
    ]
    plan = pipegraph.plan(pipegraph.capture(model, inputs), points=["b", "c"])
    assert [node.name for node in plan.stages[2].outputs] == ["linear_2", "linear", "x", "ids", "p_a_bias"]
    assert "a.bias" in plan.stages[2].state


def test_a_costly_value_is_sent_and_not_made_again() -> None:
    class Costly(Layers):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(rows, 8))

        def forward(self, x: Tensor) -> Tensor:
            summed = self.table.exp().sum(0)
            return self.b(self.a(x) * summed) * summed

    cheap = crossing(Costly(8), (torch.ones(3, 8),), {}, "b")
    costly = crossing(Costly(64), (torch.ones(3, 8),), {}, "b")
    assert cheap == [(-1, (0,), False), (0, (1,), True), (1, (), True)]
    assert costly == [(-1, (0,), False), (0, (1,), False), (0, (1,), True), (1, (), True)]


def test_random_numbers_are_drawn_once() -> None:
    class Noise(Layers):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(8)
            return self.b(self.a(x) * noise) * noise

    assert (0, (1,), False) in crossing(Noise(), (torch.ones(3, 8),), {}, "b")


def test_costs_count_what_is_held_and_sent() -> None:
    plan = pipegraph.plan(captured("tests/models/chain.py"), points=["layers.2"])
    figures = [
        {"flops": 1024, "parameters": 144, "parameter_bytes": 576, "input_bytes": 0, "output_bytes": 128},
        {"flops": 1152, "parameters": 162, "parameter_bytes": 648, "input_bytes": 128, "output_bytes": 0},
    ]
    expected = [StageCost(**counts, trained_bytes=counts["parameter_bytes"], buffer_bytes=0) for counts in figures]
    assert list(plan.costs) == expected


def test_frozen_parameters_and_buffers_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
    model[0].requires_grad_(False)
    costs = pipegraph.plan(pipegraph.capture(model, (torch.ones(4, 8),)), points=["2"]).costs
    assert [(cost.parameter_bytes, cost.trained_bytes) for cost in costs] == [(4 * (72 + 16), 4 * 16), (256, 256)]
    assert [cost.buffer_bytes for cost in costs] == [4 * 16 + 8, 0]  # means, variances, and how many batches there were
