"""Plans in an order that `search` found for their times: where it saves enough, as a file, and run as a package."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.testing import assert_close

import pipegraph
from pipegraph.cost.hardware import Hardware
from pipegraph.errors import ScheduleError, SourceError
from pipegraph.graph.captured import Captured
from pipegraph.package import Package
from pipegraph.planner.comparison import PlanComparison, candidates, compare_model
from pipegraph.planner.plan import plan_of
from pipegraph.planner.plan_file import PlanFile
from pipegraph.planner.plan_options import PlanOptions
from pipegraph.planner.searched_order import LEAST_GAIN
from pipegraph.planner.step_prediction import PlannedStep, stage_times
from pipegraph.schedule import Kind, check, simulate
from pipegraph.workflows.schedules import choose_schedule
from tests.messages import refused
from tests.runtime.pipelines import pipeline

RANKS = 4


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())))


@pytest.fixture(scope="module")
def captured() -> Captured:
    return pipegraph.capture(model(), (torch.randn(32, 64),))


def options(hop: float, memory_bytes: float | None = None) -> PlanOptions:
    """On a CPU whose ranks are ``hop`` seconds apart."""
    hardware = Hardware.load("cpu")
    link = structs.replace(hardware.links.intra_node, latency=hop)
    links = structs.replace(hardware.links, intra_node=link)
    return PlanOptions(hardware=structs.replace(hardware, links=links), memory_bytes=memory_bytes)


def comparison(captured: Captured, plan_options: PlanOptions, searches: bool = True) -> PlanComparison:
    return compare_model(captured, plan_options, RANKS, candidates(RANKS, microbatches=[16]), searches)


@pytest.fixture(scope="module")
def searched(captured: Captured) -> PlanComparison:
    return comparison(captured, options(2e-4))


def test_an_order_is_found_where_ranks_are_far_apart(captured: Captured, searched: PlanComparison) -> None:
    best, named = searched.best, comparison(captured, options(2e-4), searches=False).best
    assert best.schedule.name == "searched"
    assert best.value < named.value * (1 - LEAST_GAIN)
    check(best.schedule)
    assert {action.kind for row in best.schedule.actions for action in row} <= {Kind.F, Kind.I, Kind.W, Kind.B}


def test_names_are_kept_where_an_order_saves_little(captured: Captured) -> None:
    assert all(choice.schedule.name != "searched" for choice in comparison(captured, options(5e-6)).choices)


def test_an_order_fits_the_memory(captured: Captured, searched: PlanComparison) -> None:
    limit = searched.best.peak - 1
    choices = comparison(captured, options(2e-4, limit)).choices
    assert choices and all(choice.peak <= limit for choice in choices)


def test_a_plan_file_has_the_order(captured: Captured, searched: PlanComparison) -> None:
    file = PlanFile.from_plan(plan_of(captured, searched.best))
    again = PlanFile.from_json(file.to_json(), "plan.json")
    assert again == file
    assert len(again.order) == RANKS
    assert again.apply(captured).prediction == file.prediction


@pytest.mark.parametrize("kind", ["short", "of other ranks", "stuck", "text"])
def test_a_file_with_a_wrong_order_is_refused(captured: Captured, searched: PlanComparison, kind: str) -> None:
    file = PlanFile.from_plan(plan_of(captured, searched.best))
    order = {
        "short": file.order[:-1],
        "of other ranks": (*file.order[1:], file.order[0]),
        "stuck": (*file.order[:-1], ",".join(reversed(file.order[-1].split(",")))),
        "text": (*file.order[:-1], "3F0,hello"),
    }[kind]
    text = json.dumps(file.to_dict() | {"order": list(order)})
    with refused(SourceError, "plan.json", "order"):
        PlanFile.from_json(text, "plan.json")


@pytest.fixture(scope="module")
def package(captured: Captured, searched: PlanComparison, tmp_path_factory: pytest.TempPathFactory) -> Package:
    return pipegraph.write_package(plan_of(captured, searched.best), tmp_path_factory.mktemp("searched") / "package")


def test_a_package_runs_its_order(package: Package, searched: PlanComparison) -> None:
    planned = PlannedStep.from_manifest(package.manifest)
    assert planned is not None
    pipe = pipeline(package, None, loss_fn=nn.functional.mse_loss, kernels="eager")
    assert pipe.schedule.actions == searched.best.schedule.actions == choose_schedule(package).actions
    assert planned.is_of(pipe.schedule)
    assert not planned.is_of(replace(pipe.schedule, actions=tuple(map(tuple, pipe.schedule.actions[::-1]))))
    x, target = torch.randn(64, 64), torch.randn(64, 64)
    whole = model()
    loss = nn.functional.mse_loss(whole(x), target)
    loss.backward()
    result = pipe.step(x, target=target)
    assert_close(result.loss, loss.detach())
    gradients = {name: parameter.grad for name, parameter in pipe.named_parameters()}
    assert_close(gradients, {name: parameter.grad for name, parameter in whole.named_parameters()})


def test_a_name_takes_the_place_of_the_order(package: Package) -> None:
    assert pipeline(package, "gpipe", loss_fn=nn.functional.mse_loss, microbatches=2).schedule.name == "gpipe"
    with refused(ScheduleError, "16 microbatches", "microbatches=4", advice="leave it out"):
        pipeline(package, None, loss_fn=nn.functional.mse_loss, microbatches=4)


def test_its_prediction_is_the_simulation(searched: PlanComparison) -> None:
    best = searched.best
    times = stage_times(best.costs.stages(best.cuts), best.schedule, best.options.link)
    assert simulate(best.schedule, times).makespan == pytest.approx(best.value)
