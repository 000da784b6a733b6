"""Balancing without times: layers of a class, parameters, memory, operations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.block_times import Cache, MeasureOptions
from pipegraph.cost.price import PricedModel, price
from pipegraph.errors import ArgumentError, PlanError
from tests.cost.models import TOKENS, Block, model
from tests.messages import refused
from tests.planner.machine import MACHINE

EAGER = MeasureOptions(kernels="eager", seconds=0.05)


def weights(priced: PricedModel) -> list[float]:
    assert all(cost.forward == cost.input_grad == cost.weight_grad for cost in priced.costs)
    return [cost.forward for cost in priced.costs]


def test_weights_of_the_chain() -> None:
    captured = model("tests.models.chain")  # four layers of 8 × 8 and a bias, a head of 2 × 8 and a bias
    assert weights(price(captured, "type:^Sequential$")) == [1, 1, 1, 1, 0]
    assert weights(price(captured, "type:linear")) == [1, 1, 1, 1, 1]  # upper and lower case alike
    assert weights(price(captured, "type:tanh")) == [0, 1, 0, 1, 0, 1, 0, 1, 0]  # a cut before each
    assert weights(price(captured, "parameters")) == [72, 72, 72, 72, 18]
    rows = 4
    # tanh keeps its result, which the next layer keeps as well; the mean square of the outputs keeps them.
    assert weights(price(captured, "memory")) == [4 * 72 + rows * 8 * 4] * 4 + [4 * 18 + rows * 2 * 4]


def test_units() -> None:
    captured = model("tests.models.chain")
    units = {method: price(captured, method).unit for method in ("time", "flops", "parameters", "memory")}
    assert units == {"time": "s", "flops": "FLOP", "parameters": "parameters", "memory": "bytes"}


def test_floating_point_operations_of_the_chain() -> None:
    costs = price(model("tests.models.chain"), "flops").costs
    layer, head = 2 * 4 * 8 * 8, 2 * 4 * 8 * 2
    assert [cost.forward for cost in costs] == [cost.flops for cost in costs] == [layer] * 4 + [head]
    assert [cost.input_grad for cost in costs] == [0, layer, layer, layer, head]  # none for the model's input
    assert [cost.weight_grad for cost in costs] == [layer] * 4 + [head]


@pytest.mark.parametrize(
    ("balance", "points"),
    [
        ("time", ["5"]),  # the last layer costs the same as the five before it
        ("measured", None),
        ("flops", ["5"]),
        ("parameters", ["5"]),
        ("memory", ["5"]),
        ("uniform", ["3"]),
        ("type:Linear", ["3"]),
    ],
)
def test_every_method_cuts_where_the_larger_stage_is_least(
    balance: str, points: list[str] | None, tmp_path: Path
) -> None:
    widths = [64, 64, 64, 64, 64, 64 * 5]
    stack = nn.Sequential(*(nn.Linear(64, width, bias=False) for width in widths))
    captured = pipegraph.capture(stack, (torch.randn(16, 64),))
    plan = pipegraph.plan(captured, stages=2, balance=balance, hardware=MACHINE, setting=EAGER, cache=Cache(tmp_path))
    assert points is None or [str(point) for point in plan.points] == points
    assert len(plan.stages) == 2


def test_a_tied_weight_counts_where_it_is_used_first_and_in_both_stages() -> None:
    priced = price(model("decoder"), "parameters")
    assert weights(priced)[0] == 50 * 16
    assert weights(priced)[-1] == 0
    layers = 3 * (4 * 16 + 16 * 48 + 16 * 16 + 2 * 16 * 32)
    assert sum(weights(priced)) == 50 * 16 + layers
    first, last = priced.stage(0, 4), priced.stage(4, len(priced.costs))
    assert first.forward == 50 * 16 + layers / 3
    assert last.forward == 50 * 16 + 2 * layers / 3
    total = priced.stage(0, len(priced.costs))
    assert (total.forward, total.parameter_bytes) == (50 * 16 + layers, 4 * (50 * 16 + layers))


def test_a_stage_by_memory_is_what_it_holds() -> None:
    priced = price(model("decoder"), "memory")
    stage = priced.stage(3, 8)
    assert stage.forward == stage.parameter_bytes + stage.saved_bytes


class Deep(nn.Module):
    """All layers in one container that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.body = nn.Sequential(*(Block() for _ in range(6)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))


def test_type_cuts_where_a_matching_module_begins_however_deep() -> None:
    captured = pipegraph.capture(Deep(), (TOKENS,))
    assert weights(price(captured, "type:block")) == [0, 1, 1, 1, 1, 1, 1]
    plan = pipegraph.plan(captured, stages=3, balance="type:^Block$")
    assert [str(point) for point in plan.points] == ["body.2", "body.4"]


@pytest.mark.parametrize(
    ("method", "kind", "parts", "advice"),
    [
        ("type:Conv", PlanError, ["type:Conv", "Decoder"], "Block, Embedding, LayerNorm, Linear"),
        ("type:blok", PlanError, ["type:blok", '"Block"'], "Block"),
        ("type:(", PlanError, ["type:(", "regular expression", "position 0"], "type:Linear"),
        ("type:Lin[", PlanError, ["type:Lin[", "regular expression", "position 3"], "type:Linear"),
        ("type:", ArgumentError, ['"type:"', '"type:REGEX"'], "type:REGEX"),
        ("type", ArgumentError, ['"type"'], "type:REGEX"),
        ("flop", ArgumentError, ['"flop"', '"flops"'], "flops"),
        ("time:x", ArgumentError, ['"time:x"', '"time"'], "time"),
    ],
)
def test_what_is_no_method(method: str, kind: type[PlanError], parts: list[str], advice: str) -> None:
    with refused(kind, *parts, advice=advice):
        price(model("decoder"), method)


def test_a_model_that_calls_no_module_has_no_types() -> None:
    with refused(PlanError, "type:Linear", "none", advice='balance="time"'):
        price(pipegraph.capture(nn.Linear(4, 4), (torch.randn(2, 4),)), "type:Linear")
