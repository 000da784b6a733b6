"""What each stage computes again, chosen for given cuts and for a number of ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import pipegraph
from pipegraph.cost.hardware import Hardware, Link
from pipegraph.graph.captured import Captured
from pipegraph.package.prediction import Prediction
from pipegraph.planner.comparison import PlanComparison, candidates, compare_model
from pipegraph.planner.cut_choice import CutChoice
from pipegraph.planner.plan import plan_of
from pipegraph.planner.plan_options import PlanOptions, StagedCosts
from pipegraph.planner.recompute_options import RecomputeOptions
from pipegraph.planner.solver.solve import MemoryShortage
from pipegraph.recompute import OFFLOAD
from tests.messages import refused

A100 = Hardware.load("a100")
POINTS, MICROBATCHES = ("layers.3",), 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(6))
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@cache
def captured() -> Captured:
    torch.manual_seed(0)
    return pipegraph.capture(Layered(), (torch.randn(2048, 32),), dynamic_shapes=False)


def at_points(recompute: object, memory: float | None = None) -> Prediction:
    plan = pipegraph.plan(
        captured(), POINTS, microbatches=MICROBATCHES, hardware=A100, recompute=recompute, memory_bytes=memory
    )
    assert [str(point) for point in plan.points] == list(POINTS) and plan.prediction is not None
    return plan.prediction


@cache
def limits() -> tuple[int, ...]:
    """What no recompute needs, what the leanest needs, and between them."""
    most, least = (at_points(recompute).peak for recompute in ("none", {"layers.*": "block"}))
    assert least < most
    return most, least + (most - least) * 2 // 3, least + (most - least) // 4, least


@pytest.mark.slow
def test_at_given_points_no_choices_are_better() -> None:
    """The result is compared with every combination of choices."""
    start = next(segment.start for segment in captured().segments if segment.fqn == POINTS[0])
    options = PlanOptions(microbatches=MICROBATCHES, hardware=A100).on_ranks(2)
    priced = RecomputeOptions.price(captured(), options, [start])
    cut = [segment.start for segment in priced.costs[0].priced.chain.segments].index(start)
    schedule = options.schedule_of(2)
    every = [CutChoice(StagedCosts(pair), options, (cut,), schedule) for pair in product(priced.costs, repeat=2)]
    assert len(every) > 100
    values = []
    for memory in limits():
        fitting = [replace(choice, options=replace(options, memory_bytes=memory)) for choice in every]
        best = min(choice.value for choice in fitting if choice.fits)
        prediction = at_points("auto", memory)
        assert prediction.value == pytest.approx(best, rel=1e-5) and prediction.peak <= memory
        values.append(best)
    assert values == sorted(values) and values[0] < values[-1]


def test_at_given_points_what_does_not_fit_is_refused() -> None:
    with refused(MemoryShortage, "3.3 MiB", "6.7 MiB"):
        at_points("auto", limits()[-1] // 2)


def test_given_points_need_not_be_where_a_search_would_cut() -> None:
    """The point is after an activation, also for the choice that offloads."""
    point = "layers.3.act:end"
    hardware = structs.replace(A100, host_link=Link(0.0, 1e15))
    plan = pipegraph.plan(captured(), [point], microbatches=MICROBATCHES, hardware=hardware, recompute="auto")
    assert [str(split_point) for split_point in plan.points] == [point] and plan.priced is not None
    free = RecomputeOptions.price(captured(), PlanOptions(hardware=hardware))
    assert len(plan.priced.chain.segments) == 1 + len(free.costs[0].segments)
    assert f"layers.*={OFFLOAD}" in map(str, free.recompute)


def compared(memory: float | None, *recompute: str) -> PlanComparison:
    plans = candidates(2, ["1f1b", "zb-h1"], [MICROBATCHES], recompute=recompute)
    return compare_model(captured(), PlanOptions(hardware=A100, ranks=2, memory_bytes=memory), 2, plans)


@pytest.mark.slow
def test_for_ranks_the_best_is_never_worse_than_one_choice_for_all_stages() -> None:
    for memory in limits():
        uniform = compared(memory, "none", "min-cut", "layers.*=block")
        free = compared(memory, "auto")
        assert free.best.value <= uniform.best.value * (1 + 1e-9)
        assert all(choice.peak <= memory for choice in free.choices)
        assert free.considered == 2 and uniform.considered == 6
        plan = plan_of(captured(), free.best)
        assert plan.prediction is not None and plan.prediction.recompute == free.best.predict().recompute
    between = compared(limits()[2], "auto").best
    assert between.value < compared(limits()[2], "none", "min-cut", "layers.*=block").best.value
    assert isinstance(between.options.recompute, tuple)


def test_for_ranks_free_and_given_choices_are_compared_together() -> None:
    memory = limits()[2]
    mixture, free = compared(memory, "layers.*=block", "auto"), compared(memory, "auto")
    assert mixture.considered == 4
    assert mixture.best.value == free.best.value
