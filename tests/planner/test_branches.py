"""Plans of a model with branches: stages of different branches do not wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import pipegraph
from benchmarks.branches import compare, linear_layers
from pipegraph.cost.hardware import Hardware
from pipegraph.graph.captured import Captured
from pipegraph.package import Package
from pipegraph.planner.comparison import candidates, compare_model
from pipegraph.planner.cut_choice import CutChoice, choose_cuts, refine_cuts
from pipegraph.planner.plan import plan_of
from pipegraph.planner.plan_file import PlanFile
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.searched_order import searched_orders
from pipegraph.planner.stage_edges import StageEdges, stage_edges
from pipegraph.planner.step_prediction import PlannedStep, predict_step
from pipegraph.schedule import build, peak_activations
from pipegraph.schedule.branches import NAME
from tests.runtime import ranks
from tests.runtime.pipelines import pipeline

BRANCHES = ((0, 2), (1, 2))


class Towers(nn.Module):
    """Two towers, and a head over both."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.towers = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))
            for _ in range(2)
        )
        self.head = nn.Sequential(*(nn.Linear(2 * width, 2 * width) for _ in range(2)))

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        first, second = self.towers
        features: Tensor = self.head(torch.cat([first(image), second(text)], dim=-1))
        return features


def inputs(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 64), torch.randn(rows, 64)


@pytest.fixture(scope="module")
def captured() -> Captured:
    return pipegraph.capture(Towers(), inputs(512))


def choice(captured: Captured, schedule: str, stages: int = 3) -> CutChoice:
    options = PlanOptions(schedule=schedule, microbatches=8, hardware=Hardware.load("cpu")).on_ranks(stages)
    return choose_cuts(options.price(captured, stages=stages), options, stages)


def test_cuts_are_where_branches_begin(captured: Captured) -> None:
    plan = pipegraph.plan(captured, stages=3, microbatches=8)
    assert str(plan.points[0]) == "towers.1"
    in_turn = choice(captured, "1f1b")
    assert plan.prediction is not None
    assert plan.prediction.value < 0.9 * in_turn.value
    assert plan.prediction.lower_bound is None  # that of a chain does not hold


def test_what_is_predicted_is_what_the_stages_wait_for(captured: Captured, tmp_path: Path) -> None:
    package = pipegraph.write_package(pipegraph.plan(captured, stages=3, microbatches=8), tmp_path / "package")
    assert package.manifest.edges() == BRANCHES
    expected = predict_step(package.manifest, build("1f1b", 3, 8))
    prediction = package.manifest.prediction
    assert prediction is not None
    assert expected.timeline is not None
    assert expected.timeline.makespan == pytest.approx(prediction.value, rel=1e-5)
    assert [row[0].start for row in expected.timeline.events[:2]] == [0.0, 0.0]


def test_cuts_given_are_predicted_with_branches(captured: Captured) -> None:
    at_borders, inside = (
        pipegraph.plan(captured, points=points, balance="time", microbatches=8)
        for points in (["towers.1", "head"], ["towers.0.2", "head"])
    )
    assert at_borders.prediction is not None
    assert inside.prediction is not None
    assert at_borders.prediction.value < inside.prediction.value


def test_a_chain_has_no_branches() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    chosen = choice(pipegraph.capture(model, (torch.randn(4, 8),)), "1f1b")
    assert chosen.with_branches().schedule == chosen.schedule
    assert chosen.with_branches().value == chosen.value
    assert not list(chosen.with_branches().branch_orders())


def test_a_frozen_tower_and_evaluation_wait_for_values_without_gradients() -> None:
    """Values pass between the stages of a chain that is not trained, and no gradients."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    model[:4].requires_grad_(False)
    for mode in (True, False):
        chosen = choice(pipegraph.capture(model.train(mode).requires_grad_(False), (torch.randn(4, 8),)), "1f1b")
        assert chosen.with_branches().schedule.edges is None
    towers = Towers()
    towers.towers[0].requires_grad_(False)
    chain = choice(pipegraph.capture(towers, inputs(512)), "1f1b").costs.priced.chain
    (second_tower,) = chain.branch_starts
    join = next(consumer for producer, consumer in chain.edges if consumer > producer + 1)
    assert stage_edges(chain, (second_tower, join)) == StageEdges(BRANCHES, ((1, 2),))


def test_moved_cuts_have_edges_of_their_own(captured: Captured) -> None:
    chosen = choice(captured, "1f1b").with_branches()
    at_borders = pipegraph.plan(captured, stages=3, microbatches=8).prediction
    assert at_borders is not None
    while (moved := chosen.shift(0, -1)) is not None:
        chosen = moved
    assert (0, 1) in (chosen.schedule.edges or ((0, 1),))


@pytest.fixture(scope="module")
def order(captured: Captured) -> CutChoice:
    """The order with whole backwards."""
    cuts = refine_cuts(choice(captured, "1f1b").with_branches())
    assert cuts.schedule.edges == BRANCHES
    return next(cuts.branch_orders())


def test_an_order_of_branches_needs_less_memory(order: CutChoice) -> None:
    assert order.schedule.name == NAME
    assert peak_activations(order.schedule) == (2, 2, 1)
    assert peak_activations(build("1f1b", 3, 8)) == (3, 2, 1)
    named = CutChoice(order.costs, order.options, order.cuts, build("1f1b", 3, 8)).with_branches()
    assert order.memory[0] < named.memory[0]
    assert order.value < 1.1 * named.value
    assert order in list(searched_orders([named]))


def test_plans_for_ranks_have_orders_of_branches(captured: Captured) -> None:
    options = PlanOptions(hardware=Hardware.load("cpu"))
    plans = candidates(3, schedules=["1f1b"], microbatches=[8])
    comparison = compare_model(captured, options, 3, plans, searches=True)
    assert {choice.schedule.edges for choice in comparison.choices} == {BRANCHES}
    assert comparison.best.value < choice(captured, "1f1b").value


def test_a_plan_file_and_a_package_have_the_order(captured: Captured, order: CutChoice, tmp_path: Path) -> None:
    plan = plan_of(captured, order)
    file = PlanFile.from_plan(plan)
    again = PlanFile.from_json(file.to_json(), "plan.json")
    assert again == file
    assert again.edges == BRANCHES
    package = pipegraph.write_package(again.apply(captured), tmp_path / "package")
    planned = PlannedStep.from_manifest(package.manifest)
    assert planned is not None
    schedule = planned.to_schedule()
    assert schedule is not None
    assert schedule.actions == order.schedule.actions
    step = predict_step(package.manifest, schedule)
    assert step.timeline is not None
    assert step.timeline.makespan == pytest.approx(order.value, rel=1e-5)


def compare_step(rank: int, folder: str) -> float:
    """Compare a step of the planned order with the unsplit model."""
    torch.manual_seed(1)
    pipe = pipeline(Package.open(folder), None, loss_fn=nn.functional.mse_loss, kernels="eager")
    image, text = inputs(64)
    target = torch.randn(64, 128)
    whole = Towers()
    loss = nn.functional.mse_loss(whole(image, text), target)
    loss.backward()
    result = pipe.step(image, text, target=target)
    assert result.loss is not None
    assert_close(result.loss, loss.detach())
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert_close(parameter.grad, gradients[name])
    return float(result.loss)


def test_one_process_and_three_run_the_order(captured: Captured, order: CutChoice, tmp_path: Path) -> None:
    folder = str(pipegraph.write_package(plan_of(captured, order), tmp_path / "package").path)
    losses = ranks.run(compare_step, 3, folder)
    assert losses == [pytest.approx(compare_step(0, folder))] * 3


@pytest.mark.slow
def test_the_benchmark_finds_plans_that_are_no_slower_than_stages_in_sequence() -> None:
    model, args = linear_layers(1, width=64)
    values = {name: chosen.value for name, chosen in compare(model, args, 4, 4)}
    assert values["best of all orders"] <= values["side by side"] * (1 + 1e-9) < values["in sequence"]
